"""Where a rank is: what its training thread is in, whether it waits for others there, and since when.

Written by that thread at every operation, read by whoever asks the rank. It does not know what is silence.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session


LONG = 1.0  # seconds in one operation after which a script's stack is looked at


class At:
    """One training thread's whereabouts, one tuple so that a reader never sees half of a change.

    op: what is being done; waits: whether only others can end it; moved: when that began, on the monotonic clock.
    """

    def __init__(self) -> None:
        self.now: tuple[str, bool, float] = ("", False, time.monotonic())

    @property
    def op(self) -> str:
        return self.now[0]

    @property
    def waits(self) -> bool:
        return self.now[1]

    def __call__(self, op: str, waits: bool = False) -> None:
        self.now = (op, waits, time.monotonic())


def status(run: Session) -> dict[str, Any]:
    """What a rank answers when it is asked where it is.

    busy: what it is in; waits: only for others; still: for how many seconds; asleep: because its settings say so
    own: does a script wait in a collective of its own, which the strategy does not know?
    lost: rows that it could not write to disk
    step_s: the longest of its last steps and of its evaluations, in seconds; 0 before the first
    """
    waits, still = standing(run)
    place = run.training.locate_script() if run.training is not None and still > LONG else None
    own = place is not None and bool(place.collective)
    busy = op_of(run) if place is None else str(place)
    where = {"state": run.phase, "step": run.rank.step, "busy": busy, "error": run.error}
    step_s = max(run.training.evaluated, *run.training.lengths.copy()) if run.training is not None else 0.0
    more = {"asleep": run.naps.asleep, "lost": run.record.lost, "step_s": step_s}
    return {**where, "waits": waits or own, "own": own, "still": round(still, 3), **more}


def op_of(run: Session) -> str:
    """What a rank is in: its own operation, or the lane's for which it waits."""
    if run.training is None:
        return "set-up"
    host = run.training.host
    return (host.lanes.busy if host.at.waits else "") or host.op


def standing(run: Session) -> tuple[bool, float]:
    """Whether a rank's training thread waits for others, and the seconds since it, or a wire for it, moved."""
    op, waits, moved = run.training.host.at.now if run.training is not None else ("set-up", False, run.born)
    for wire in run.wires:
        if wire.tag in ("control", "data"):
            moved = max(moved, wire.moved)
            waits = waits or (wire.tag == "control" and wire.waits)
    strategy = run.experiment.strategy
    waits = waits or (strategy.opaque and (op == "backward" or (op == "forward" and bool(strategy.shards))))  # in torch
    return waits, time.monotonic() - moved
