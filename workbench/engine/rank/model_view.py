"""One rank, as its model and its steps' lead see it."""

from __future__ import annotations

import queue
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.shaping import PacedSleep, Port
from workbench.engine.collectives.wire import Wire
from workbench.engine.compute.clocked_view import ClockedView
from workbench.engine.compute.host import Host
from workbench.engine.compute.shared_parameters import SharedParameters
from workbench.engine.control.peers import PeeringView, Peers
from workbench.engine.control.script_position import ScriptLine
from workbench.engine.record.recorder import Recorder
from workbench.engine.record.step_profiler import StepProfiler
from workbench.engine.script.script_view import ScriptView, SessionView
from workbench.experiment import Experiment
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.learning_rate import Rate
from workbench.host.core.planned_event import Planned
from workbench.host.memory.batches import BatchReader
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.transfer.change_view import ChangeView
from workbench.rank import Op
from workbench.settings import Change, Json
from workbench.tasks import Learner


class BuiltModel(NamedTuple):
    """One rank's model with its parts. lr: the learning rate at the start"""

    learner: Learner
    model: nn.Module
    layout: ParameterLayout
    optimizer: Optimizer
    lr: float
    rate: Rate
    batches: BatchReader


class TrainedModel(Protocol):
    """Builds one rank's model, and computes its losses and gradients.

    repeats: whether the rank can compute a batch again
    """

    @property
    def repeats(self) -> bool: ...

    def build_parts(self) -> BuiltModel:
        """All ranks call it together. Raises KnobError if the model cannot be trained."""

    def mark_limits(self) -> None:
        """Records what the record does not show of this model."""

    def run_loss_backward(self, loss: Tensor, share: float | None) -> None:
        """Runs the backward of `loss`, scaled by `share`."""

    def show_loss(self, loss: Tensor) -> Tensor:
        """Returns a loss as it is recorded."""

    def wrap_model(self) -> None:
        """Wraps the model for an opaque strategy."""

    def keep_sums(self) -> AbstractContextManager[None]:
        """In this context torch's wrapper is removed. Gradients that are still needed outlive it."""

    async def follow_change(self, change: Planned, made: Coroutine[Op, Any, bool]) -> bool:
        """Awaits `made`, which makes the change. Returns its result."""


class LoopLead(Protocol):
    """Leads the steps of one rank."""

    def locate_script(self) -> ScriptLine | None:
        """Returns the script's present line; None without a script."""

    def require_followed(self, wanted: Experiment) -> None:
        """Raises KnobError if the loop cannot run under `wanted`."""

    def find_step_begin(self) -> Any:
        """Returns when the coming step began, as a Stopwatch shows it."""

    async def check_loop_end(self, over: bool) -> bool:
        """Returns whether no step follows. over: whether the settings or a person end the run here"""

    async def drive_step(self, step: Coroutine[Op, Any, Any]) -> int:
        """Returns how many steps it counts for; 0 if none was made."""

    def accept_requests(self, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns the requests that the rank can obey."""

    async def finish_loop(self) -> None:
        """Called after the last step."""

    def close(self) -> None:
        """Gives everything back, in whatever state the rank is."""


class PlaceView(Protocol):
    """Where a rank trains.

    kind:   the backend, such as "gloo"
    device: its name, such as "cpu"
    joins:  whether the rank joins a run, and receives the state of other ranks
    resume: the checkpoint from which it resumes, or ""
    """

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def joins(self) -> bool: ...
    @property
    def resume(self) -> str: ...


class ModelView(ChangeView, Protocol):
    """A rank with a model."""

    @property
    def session(self) -> PlaceView: ...
    @property
    def control(self) -> Wire | None: ...
    @property
    def host(self) -> Host: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def port(self) -> Port: ...
    @property
    def shared(self) -> SharedParameters: ...

    @property
    def evaluation_copy(self) -> nn.Module | None: ...

    def copy_model(self) -> nn.Module: ...

    def make_example(self, wanted: Experiment) -> Any:
        """Returns a batch that is equal on all ranks."""

    def take_early_requests(self) -> None: ...

    def mark_buckets(self) -> None:
        """Records the size of each bucket."""

    def end_wait(self) -> Any: ...


class ScriptPlace(PlaceView, SessionView, Protocol):
    """The session of a rank that runs a script. stopping: whether the run ends before its last step"""

    @property
    def stopping(self) -> bool: ...

    def stop_early(self) -> None: ...


class RankSessionView(PeeringView, ScriptPlace, Protocol):
    """One rank's part in a run, as its training sees it.

    member:  this rank's number, the same in all generations
    used:    examples of the data's order that were used up when this generation began
    planned: the changes that the run begins with
    """

    @property
    def member(self) -> int: ...
    @property
    def secret(self) -> bytes: ...
    @property
    def run_dir(self) -> Path | None: ...
    @property
    def used(self) -> int: ...
    @property
    def planned(self) -> list[Change]: ...
    @property
    def paced_sleep(self) -> PacedSleep: ...
    @property
    def inbox(self) -> queue.SimpleQueue[dict[str, Any]]: ...
    @property
    def record(self) -> Recorder: ...
    @property
    def profiler(self) -> StepProfiler: ...

    def mark(self, name: str, detail: Mapping[str, Json]) -> None: ...

    def set_phase(self, phase: str) -> None: ...

    def confirm_formed(self) -> None: ...

    def crash_rank(self, mine: bool) -> None: ...

    async def resize_run(self, members: tuple[int, ...], number: str) -> None: ...

    async def remove_preempted(self, members: Sequence[int], number: str) -> None: ...


class ScriptRankView(ChangeView, ScriptView, ClockedView, Protocol):
    """A rank that a script leads."""

    @property
    def session(self) -> ScriptPlace: ...
    @property
    def control(self) -> Wire | None: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def port(self) -> Port: ...
    @property
    def queue(self) -> ChangeQueue: ...

    def end_wait(self) -> Any: ...
