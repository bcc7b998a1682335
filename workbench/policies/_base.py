"""The whole contract of a policy, on one screen. It knows no clock, wire or tensor: only what is on the record."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any, ClassVar, NamedTuple

from workbench.settings import Change, Family, knob


class Decision(NamedTuple):
    """Knobs to set together before the next step, in this order, and why: all of them are set, or none.

    changes: by path, as `Experiment.set` takes them: a number, or a setting as plain JSON
    """

    reason: str
    changes: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What is known between two steps, the same whoever asks.

    experiment: what is in force
    step:       that of rank 0; others may be elsewhere where ranks keep no common step
    seconds:    since the run began
    numbers:    by name of what the policy `reads`, of each rank what it came to since the look before; NaN: nothing
    changes:    all that were made so far, by people and by policies
    """

    experiment: Any
    step: int
    seconds: float
    numbers: Mapping[str, tuple[float, ...]]
    changes: tuple[Change, ...] = ()

    def mean(self, name: str) -> float:
        """Of all ranks that have such a number; NaN where none has."""
        known = [x for x in self.numbers[name] if not math.isnan(x)]
        return fmean(known) if known else math.nan


@dataclass(frozen=True, kw_only=True)
class PolicyBase(Family):
    """Who decides, besides people, what is changed during a run."""

    home: ClassVar[str] = "workbench.policies"
    decides: ClassVar[bool] = False


@dataclass(frozen=True, kw_only=True)
class Policy(PolicyBase):
    """Looks every so often at what is known of the run, and may change knobs, with a reason in words.

    Rank 0 asks it, between two steps for which all ranks have come together, and tells the others; so it need not be
    the same everywhere, and may remember what it likes in the state that `init` makes. What it decides is a Change like
    any other, with its name as `by` and its `reason`. What a person has set meanwhile it leaves alone.

    reads:  names of Samples; of each rank it is told their mean since the look before. "compute" is no Sample: the
            seconds that the rank computed per step, without waiting
    """

    paused: bool = knob(False, doc="it looks no more and leaves everything as it is")
    look_every: int = knob(20, 1, 10**6, unit="steps", log=True, doc="steps between two looks at the record")

    decides: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ()

    def init(self) -> Any:
        """What it remembers from look to look."""
        return None

    def next_look(self, experiment: Any, after: int) -> int:
        """The first step after `after` before which it looks; -1 is before the first."""
        return max(after, 0) + self.look_every

    def needs(self, experiment: Any) -> str | None:
        """What it waits for, in a sentence that says what would do; None where it can decide."""
        return None

    @abstractmethod
    def decide(self, seen: Seen, state: Any) -> Iterable[Decision]:
        """What is to be changed before the next step; what is so already changes nothing."""
