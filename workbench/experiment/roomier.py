"""What would need less memory on a device than an experiment does, of what is not refused beside the rest of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

SHARING = ("ZeRO3", "ZeROInfinity")  # each keeps less on a device than the one before


def roomier(e: Experiment, standing: bool = False, now: Experiment | None = None,
            fits: Callable[[str, object], bool] | None = None) -> list[str]:  # fmt: skip
    """In words, what people may set instead.

    standing: is there too little while nothing is trained (between two steps, or in an evaluation)? Then neither a
              batch nor what backward keeps is in the way
    now:  what is in force where `e` was asked for: what it has is no news, and what needs more than it is none either
    fits: does it fit with that value of the knob of that path? Without it what nothing else refuses is said
    """
    return list(_ways(e, standing, now or e, fits))


def _ways(
    e: Experiment, standing: bool, now: Experiment, fits: Callable[[str, object], bool] | None
) -> Iterator[str]:
    would = fits or partial(_can, e)
    mine = [type(one.strategy).__name__ for one in (e, now)]
    others = SHARING[max((SHARING.index(name) + 1 for name in mine if name in SHARING), default=0) :]
    if able := [name for name in others if would("strategy", name)]:
        yield f"strategy {' or '.join(able)}"
    if standing:
        less = e.bucket_mb / 4
        if fits and fits("bucket_mb", less):
            yield f"bucket_mb={less:g}"
        return
    recomputed = [getattr(one.partition, "checkpoint", "none") != "none" for one in (e, now)]
    if not any(recomputed) and would("partition.checkpoint", "units"):
        yield "partition.checkpoint='units'"
    yield "a smaller batch or bucket_mb"


def _can(e: Experiment, path: str, value: object) -> bool:
    try:
        e.set(path, value)
    except KnobError:
        return False
    return True
