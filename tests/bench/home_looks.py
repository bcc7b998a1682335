"""Claims, the quantities that test them, and results: a number relative to a baseline's, with its interval."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from tests.bench.cells import reached
from tests.bench.home_rows import FRESH, Book, Regime, Row, Trial, needs, winner
from tests.bench.page import interval

UNITS = {
    "time": "times as fast to the target loss", "pace": "times the samples/s", "bytes": "times fewer bytes",
    "burst": "times fewer bytes in the worst step", "loss": "as baseline's loss / own loss",
    "points": "points of accuracy more",
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """One number of a method relative to its baseline's (more is better), and the smallest that counts as shown."""

    what: str  # of UNITS
    least: float

    def value(self, mine: Mapping[str, Any], base: Mapping[str, Any], goals: tuple[float, float]) -> float:
        """Returns the number from a run of each with the same seed; 0 for a loss that is not a number."""
        if "refused" in mine or "refused" in base:
            return 0.0
        if self.what == "time":
            return _sooner(mine["curve"], base["curve"], goals)
        if self.what == "points":
            return 100.0 * float(mine["accuracy"] - base["accuracy"])
        if self.what == "loss":
            ratio = float(base["curve"][-1][2]) / float(mine["curve"][-1][2])
            return ratio if math.isfinite(ratio) else 0.0
        name, less = {"pace": ("samples_per_s", False), "bytes": ("bytes", True), "burst": ("largest", True)}[self.what]
        above, below = (base[name], mine[name]) if less else (mine[name], base[name])
        return float(above) / float(below) if below else math.inf


def _sooner(mine: Any, base: Any, goals: tuple[float, float]) -> float:
    """Returns the relative speed; 0 without the goal. A baseline that missed it counts with its whole time."""
    seconds = reached(mine, goals[0])
    return 0.0 if seconds is None else (reached(base, goals[1]) or base[-1][1]) / seconds


@dataclass(frozen=True, kw_only=True)
class Because:
    """Why a claim does not show, and the proof: the same winners in a regime where it should.

    regime:  where both are run again, with the settings that won
    against: the baseline's regime, if different: a claim about numbers of ranks has two regimes
    knobs:   the method's knobs that differ there
    same:    the proof is that no more shows there either, although no other cause is left
    """

    words: str
    regime: Regime
    against: Regime | None = None
    knobs: Mapping[str, Any] = field(default_factory=dict)
    same: bool = False


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A paper's statement about a method, where to test it, and the required result.

    source: which text of the paper was read: "abstract", "paper", "logs", ...
    """

    method: str
    paper: str
    source: str
    row: Row
    against: Row
    looks: tuple[Look, ...]
    because: Because | None = None

    def proof(self, book: Book) -> tuple[tuple[Row, Trial], tuple[Row, Trial]] | None:
        """Returns the two runs that prove the reason; None without winners or a reason."""
        mine, base = winner(self.row, book), winner(self.against, book)
        if self.because is None or mine is None or base is None:
            return None
        there = replace(self.row, regime=self.because.regime)
        elsewhere = replace(self.against, regime=self.because.against or self.because.regime)
        return (there, {**mine, **self.because.knobs}), (elsewhere, base)


class Seen(NamedTuple):
    """One look: the median of the seeds, the ends of its 95 % interval, and whether the whole interval suffices."""

    look: Look
    median: float
    low: float
    high: float

    @property
    def holds(self) -> bool:
        return self.low >= self.look.least

    @property
    def words(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f}) {UNITS[self.look.what]}"


def beside(claim: Claim, mine: tuple[Row, Trial], base: tuple[Row, Trial], book: Book) -> list[Seen] | None:
    """Returns a method's looks relative to a baseline by seed; None if a seed is missing."""
    found = [book.found(row, trial, FRESH) for row, trial in (mine, base)]
    if found[0] is None or found[1] is None:
        return None
    goals = (mine[0].regime.goal, base[0].regime.goal)
    return [
        Seen(look, *interval([look.value(a, b, goals) for a, b in zip(found[0], found[1], strict=True)]))
        for look in claim.looks
    ]


def seen(claim: Claim, book: Book) -> list[Seen] | None:
    """Returns a claim's looks, each side at its best; None while any run is missing."""
    mine, base = winner(claim.row, book), winner(claim.against, book)
    return None if mine is None or base is None else beside(claim, (claim.row, mine), (claim.against, base), book)


def proven(claim: Claim, book: Book) -> list[Seen] | None:
    """Returns the looks in the regime of the proof."""
    pair = claim.proof(book)
    return beside(claim, *pair, book) if pair else None


def wanted(claim: Claim, book: Book, there: Callable[[Row, Trial, int], bool]) -> list[tuple[Row, Trial, int]]:
    """Returns the cells that a claim needs next; those of its proof only if the claim does not show."""
    for row in (claim.against, claim.row):
        if todo := needs(row, book, there):
            return todo
    result, pair = seen(claim, book), claim.proof(book)
    if pair is None or result is None or all(one.holds for one in result):
        return []
    return [(row, trial, seed) for row, trial in pair for seed in FRESH if not there(row, trial, seed)]
