"""The interface of a policy, which knows only values from the record."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from workbench.settings import Change, Family, knob


class Decision(NamedTuple):
    """Knobs to set together before the next step in this order, with a reason. Either all are set or none.

    reason:   why, in a sentence for the record
    changes:  values by path for `Experiment.set`: a number or a setting as plain JSON
    """

    reason: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The knowledge of a policy between two steps, the same on any rank.

    experiment: the settings in force
    step:       rank 0's step; other ranks may differ if ranks keep no common step
    seconds:    since the run began
    numbers:    for each name that the policy `reads`, each rank's mean since the last look. NaN: no value
    changes:    all changes so far, by people and by policies
    """

    experiment: Any
    step: int
    seconds: float
    numbers: Mapping[str, tuple[float, ...]]
    changes: tuple[Change, ...] = ()

    def mean(self, name: str) -> float:
        """Returns the mean over the ranks that have this number; NaN if none has.

        name:  one of the names that the policy `reads`
        """
        known = [x for x in self.numbers[name] if not math.isnan(x)]
        return fmean(known) if known else math.nan


@dataclass(frozen=True, kw_only=True)
class PolicyBase(Family):
    """The base class of policies and of ByHand."""

    home: ClassVar[str] = "workbench.policies"
    decides: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyBase):
    """Looks at the run's numbers at intervals and may change knobs with a reason.

    Rank 0 calls it between two steps when all ranks have met. It sends the decisions to the other ranks. So a policy
    need not decide alike on every rank, and its state from `init` may hold anything. A decision becomes a Change with
    the policy's name as `by` and its `reason`. If a person sets a knob after the policy began, the policy cannot
    override it.

    reads:  names of Samples; the policy gets each rank's mean since the last look. "compute" is no Sample: it is the
            rank's seconds of compute per step, without waiting

    Its methods take these arguments:

    experiment: the settings in force
    seen:       the numbers and the changes since the last look
    state:      the result of `init`
    """

    paused: bool = knob(False, doc="the policy pauses and changes nothing")
    look_every: int = knob(20, 1, 10**6, unit="steps", log=True, doc="steps between two looks at the record")

    decides: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()

    def init(self) -> Any:
        """Returns the state that it keeps between looks."""
        return None

    def next_look(self, experiment: Any, after: int) -> int:
        """Returns the next step before which it looks.

        after:  the step of the last look. -1: before the first step
        """
        return max(after, 0) + self.look_every

    def needs(self, experiment: Any) -> str | None:
        """Returns which missing setting prevents a decision, with a remedy. None if it can decide."""
        return None

    @abstractmethod
    def decide(self, seen: Seen, state: Any) -> Iterable[Decision]:
        """Returns the changes for the next step. A value already in force changes nothing."""
