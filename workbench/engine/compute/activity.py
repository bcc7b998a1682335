"""A rank's present operation. Its training thread writes it, and any thread may read it."""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Protocol

from workbench.engine.collectives.shaping import PacedSleep
from workbench.engine.collectives.wire import Wire
from workbench.engine.control.script_position import ScriptLine
from workbench.engine.record.recorder import Recorder
from workbench.experiment import Experiment
from workbench.rank import Rank

STACK_AFTER = 1.0  # seconds in one operation after which the script's stack is read


class Activity:
    """One training thread's position, in one tuple so that a reader never sees half of a change.

    op: the operation; waits: whether only peers can end it; moved: when it began, on the monotonic clock
    """

    def __init__(self) -> None:
        self.now: tuple[str, bool, float] = ("", False, time.monotonic())

    @property
    def op(self) -> str:
        return self.now[0]

    @property
    def is_waiting(self) -> bool:
        return self.now[1]

    def __call__(self, op: str, waits: bool = False) -> None:
        self.now = (op, waits, time.monotonic())


class LanesView(Protocol):
    """A rank's lanes. current_collective: the name of the one under way, "" without one"""

    @property
    def current_collective(self) -> str: ...


class HostView(Protocol):
    """A rank's host."""

    @property
    def at(self) -> Activity: ...
    @property
    def op(self) -> str: ...
    @property
    def lanes(self) -> LanesView: ...


class TrainingView(Protocol):
    """A rank's training."""

    @property
    def host(self) -> HostView: ...
    @property
    def step_seconds(self) -> deque[float]: ...
    @property
    def longest_evaluation(self) -> float: ...

    def locate_script(self) -> ScriptLine | None:
        """Returns the line at which this rank's script is; None without a script."""


class ActivityView(Protocol):
    """A rank's session. training: None during set-up"""

    @property
    def training(self) -> TrainingView | None: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def rank(self) -> Rank: ...
    @property
    def phase(self) -> str: ...
    @property
    def error(self) -> dict[str, Any] | None: ...
    @property
    def paced_sleep(self) -> PacedSleep: ...
    @property
    def record(self) -> Recorder: ...
    @property
    def wires(self) -> list[Wire]: ...
    @property
    def setup_began_at(self) -> float: ...


def describe_rank(run: ActivityView) -> dict[str, Any]:
    """Returns a report of a rank's position.

    busy: its operation; waits: whether only peers can end it; still: seconds in it; asleep: by its settings
    own: whether a script waits in a collective of its own, which the strategy does not know
    lost: rows that it could not write to disk
    step_s: the longest of its last steps and evaluations, in seconds; 0 before the first
    """
    waits, still = measure_wait(run)
    place = run.training.locate_script() if run.training is not None and still > STACK_AFTER else None
    own = place is not None and bool(place.collective)
    busy = current_op(run) if place is None else str(place)
    where = {"state": run.phase, "step": run.rank.step, "busy": busy, "error": run.error}
    step_s = (
        max(run.training.longest_evaluation, *run.training.step_seconds.copy()) if run.training is not None else 0.0
    )
    more = {"asleep": run.paced_sleep.is_asleep, "lost": run.record.lost_rows, "step_s": step_s}
    return {**where, "waits": waits or own, "own": own, "still": round(still, 3), **more}


def current_op(run: ActivityView) -> str:
    """Returns a rank's own operation, or that of the lane for which it waits."""
    if run.training is None:
        return "set-up"
    host = run.training.host
    return (host.lanes.current_collective if host.at.is_waiting else "") or host.op


def measure_wait(run: ActivityView) -> tuple[bool, float]:
    """Returns whether a rank's training thread waits for peers, and the seconds since it or its wire moved."""
    op, waits, moved = run.training.host.at.now if run.training is not None else ("set-up", False, run.setup_began_at)
    for wire in run.wires:
        if wire.tag in ("control", "data"):
            moved = max(moved, wire.moved_at)
            waits = waits or (wire.tag == "control" and wire.is_waiting)
    strategy = run.experiment.strategy
    waits = waits or (strategy.opaque and (op == "backward" or (op == "forward" and bool(strategy.shards))))  # in torch
    return waits, time.monotonic() - moved
