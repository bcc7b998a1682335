"""What would need less memory on a device than an experiment does, of what is not refused beside the rest of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

SHARING = ("ZeRO3", "ZeROInfinity")  # each keeps less on a device than the one before


def roomier(e: Experiment, evaluating: bool = False) -> list[str]:
    """In words, what people may set instead.

    evaluating: is it while the model is evaluated that there is too little? Then what backward keeps is not in the way
    """
    return list(_ways(e, evaluating))


def _ways(e: Experiment, evaluating: bool) -> Iterator[str]:
    mine = type(e.strategy).__name__
    others = SHARING[SHARING.index(mine) + 1 :] if mine in SHARING else SHARING
    if able := [name for name in others if _can(e, "strategy", name)]:
        yield f"strategy {' or '.join(able)}"
    if evaluating:
        return
    if getattr(e.partition, "checkpoint", "") == "none" and _can(e, "partition.checkpoint", "units"):
        yield "partition.checkpoint='units'"
    yield "a smaller batch or bucket_mb"


def _can(e: Experiment, path: str, value: object) -> bool:
    try:
        e.set(path, value)
    except KnobError:
        return False
    return True
