"""The rule by which `lab.tune` and `run.advice` say which of several settings is better.

A setting is usable if a run learns the same under it, or if its measured loss keeps to the trend. Usable settings come
first, the fastest of them before the others. Then come settings whose loss nobody has measured, or whose loss is worse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from workbench.sim.plan.trials import Interval

T = TypeVar("T")


class Evidence(NamedTuple):
    """What is known of a setting. seconds: per batch; usable: see `is_usable`"""

    seconds: float
    usable: bool


def is_usable(alike: bool, loss: Interval | None, worse: float) -> bool:
    """Whether a setting may be used without harm to the loss.

    alike: as `learns_alike` has it; loss: by which share it lies above its trend; None: nobody has measured it
    """
    return alike or (loss is not None and loss.high <= worse)


def sort_by_evidence(found: Iterable[T], evidence: Callable[[T], Evidence]) -> list[T]:
    """The best setting first."""

    def key(one: T) -> tuple[bool, float]:
        seconds, usable = evidence(one)
        return not usable, seconds

    return sorted(found, key=key)
