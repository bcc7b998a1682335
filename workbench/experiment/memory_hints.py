"""Suggests settings that need less device memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from workbench.settings import KnobError

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment

SHARING = ("ZeRO3", "ZeROInfinity")  # each keeps less on a device than its predecessor


def suggest_less_memory(e: Experiment, standing: bool = False, now: Experiment | None = None,
            fits: Callable[[str, object], bool] | None = None) -> list[str]:  # fmt: skip
    """Returns alternatives to set instead, as text.

    standing: memory runs out between steps or in an evaluation. So neither the batch nor activations are the cause
    now:  the settings in force. Suggestions must differ and need less
    fits: whether a value of the knob at a path would fit. Without it every valid value counts
    """
    return list(_ways(e, standing, now or e, fits))


def _ways(e: Experiment, standing: bool, now: Experiment, fits: Callable[[str, object], bool] | None) -> Iterator[str]:
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
