"""What would need less memory on a device than an experiment does, of what is not refused beside the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

SHARING = ("ZeRO3", "ZeROInfinity")  # each keeps less on a device than the one before


def roomier(e: Experiment, evaluating: bool = False, now: Experiment | None = None) -> list[str]:
    """In words, what people may set instead.

    evaluating: is it while the model is evaluated that there is too little? Then what backward keeps is not in the way
    now: what is in force where `e` was asked for: what it has is no news, and what needs more than it is none either
    """
    return list(_ways(e, evaluating, now or e))


def _ways(e: Experiment, evaluating: bool, now: Experiment) -> Iterator[str]:
    mine = [type(one.strategy).__name__ for one in (e, now)]
    others = SHARING[max((SHARING.index(name) + 1 for name in mine if name in SHARING), default=0) :]
    if able := [name for name in others if _can(e, "strategy", name)]:
        yield f"strategy {' or '.join(able)}"
    if evaluating:
        return
    recomputed = [getattr(one.partition, "checkpoint", "none") != "none" for one in (e, now)]
    if not any(recomputed) and _can(e, "partition.checkpoint", "units"):
        yield "partition.checkpoint='units'"
    yield "a smaller batch or bucket_mb"


def _can(e: Experiment, path: str, value: object) -> bool:
    try:
        e.set(path, value)
    except KnobError:
        return False
    return True
