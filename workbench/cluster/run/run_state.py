"""The state of one live run, as its controller's parts see it."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.observe.hang_monitor import HangMonitor
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run.run_changes import Changes, PendingChange
from workbench.cluster.run.run_ending import RunEnding
from workbench.cluster.transport.reorder_buffer import ReorderBuffer
from workbench.record.run import Run
from workbench.settings.describe_error import said, text_of


class CommandsView(Protocol):
    """The queue of commands to ranks. dismissed: ranks that were sent away before they joined"""

    dismissed: set[int]

    def put_command(self, what: str, everyone: bool = False, to: Sequence[int] = (), **rest: Any) -> None: ...

    def put_change(self, asked: PendingChange) -> None: ...

    def dismiss_ranks(self, ranks: Sequence[int]) -> None: ...


class RunState(ABC):
    """One live run. watched: whether a person sees it"""

    commands: CommandsView
    reorder_buffer: ReorderBuffer
    hang_monitor: HangMonitor

    def __init__(self, run: Run, cluster: Cluster, changes: Changes, run_id: str, watched: Callable[[], bool]) -> None:
        self.run, self.cluster, self.changes, self.run_id = run, cluster, changes, run_id
        self.watched = watched
        self.ranks = range(changes.experiment.ranks)
        self.initial_experiment = changes.experiment
        self.members = tuple(self.ranks)  # that train
        self.generation_number = 0  # of their generation, if known
        self.used_ranks = set(self.ranks)  # that ever trained
        self.successor_ranks: dict[int, int] = {}  # by a former rank: the new rank of its engine
        self.resize_lock = threading.RLock()  # until chosen engines begin as ranks
        self.session_arguments: dict[str, Any] = {}  # of later ranks too
        self.pickled_experiment, self.secret = b"", ""
        self.state = "starting"
        self.step = 0
        self.loss: float | None = None
        self.notes: list[str] = []
        self.error: BaseException | None = None
        self.status: dict[int, dict[str, Any]] = {}
        self.spool_folders: dict[int, str] = {}
        self.preempted: dict[int, float | None] = {}  # and when their engines were first gone
        self.ending, self.over = RunEnding(self.ranks), threading.Event()

    @property
    def steps_done(self) -> int:
        return self.step + 1 if self.step else 0

    def is_elsewhere(self, rank: int) -> bool:
        return self.spool_folders.get(rank, str(self.run.path)) != str(self.run.path)

    def admit_ranks(self, new: list[int]) -> None:
        self.used_ranks |= set(new)
        self.ranks = self.hang_monitor.ranks = range(max(self.used_ranks) + 1)
        self.ending.admit_ranks(new)

    def queue_command(self, what: str, everyone: bool = False, **rest: Any) -> None:
        self.commands.put_command(what, everyone, **rest)

    def note_error(self, failure: BaseException) -> None:
        """Adds a kernel's error to the notes, unless it is among the last 5."""
        text = text_of(failure) if isinstance(failure, ClusterError) else said(failure)
        if text not in self.notes[-5:]:
            self.notes.append(text)

    def describe_ranks(self) -> str:
        ranks = [f"rank {r} at step {s['step']} in {s['busy'] or 'nothing'}" for r, s in sorted(self.status.items())]
        return ", ".join([f"the run is {self.state}", *ranks, *self.notes[-3:]])

    @abstractmethod
    def stop(self) -> None:
        """Stops at the next step boundary. A second call aborts."""

    @abstractmethod
    def request_stop(self) -> None:
        """Stops at the next step boundary."""

    @abstractmethod
    def abort(self) -> None:
        """Ends the run at once, in the middle of a step."""

    @abstractmethod
    def abort_ranks(self) -> None:
        """Tells all ranks to leave in the middle of a step."""
