"""The rule by which `lab.tune` and `run.advice` say which of several settings is better.

A setting is usable if a run learns the same, or if its measured loss keeps to the trend. Usable settings come first,
settings with unknown or worse loss last, and faster settings before slower ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, TypeVar

from workbench.sim.plan.trials import Interval

T = TypeVar("T")


class Evidence(NamedTuple):
    """seconds: per batch; usable: see `is_usable`"""

    seconds: float
    usable: bool


def is_usable(alike: bool, loss: Interval | None, worse: float) -> bool:
    """Whether a setting does not harm the loss.

    alike: the result of `learns_alike`; loss: share above its trend, None: not measured; worse: highest such share
    """
    return alike or (loss is not None and loss.high <= worse)


def sort_by_evidence(found: Iterable[T], evidence: Callable[[T], Evidence]) -> list[T]:
    """The best setting first."""

    def key(one: T) -> tuple[bool, float]:
        seconds, usable = evidence(one)
        return not usable, seconds

    return sorted(found, key=key)
