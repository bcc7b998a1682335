# ruff: noqa: E501
"""Writes the first part of docs/project/strategies.md: claim, regime, result, from docs/data/home/ alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.bench.home_claims import CLAIMS
from tests.bench.home_looks import Claim, proven, seen
from tests.bench.home_rows import FRESH, MOST, SEEDS, Book, Row, tried, winner, words
from tests.bench.methods import found
from tests.bench.page import table
from workbench.settings import members
from workbench.strategies import Strategy

ROOT = Path(__file__).parents[2]
DATA = ROOT / "docs" / "data" / "home"
ALIKE = 0.02  # numbers this close count as equal
SHOWS, HOLDS_BOTH, NOT_RUN = "yes", "no: the interval contains the goal", "not run yet"  # verdicts


def text(folder: Path = DATA, claims: tuple[Claim, ...] = CLAIMS) -> str:
    """Returns the section: method, table, tuned settings and why some claims do not show."""
    book = Book(folder)
    lines = [[c.method, f"{c.paper} ({c.source})", _regime(c), shown(c, book), verdict(c, book)] for c in claims]
    causes = [line for claim in claims if (line := because(claim, book))]
    parts = [
        "## Papers' claims, tuned\n",
        table(["method", "paper's claim", "regime", "measured", "claim shows"], lines),
        ABOUT,
    ]
    if causes:
        head = ["method", "supposed cause", "test", "result of the test", "is it the cause"]
        parts.append(f"### Claims that do not show\n\n{table(head, causes)}\n{CAUSES}")
    if rows := list({tuple(line[:2]): line for claim in claims for line in settings(claim, book)}.values()):
        head = ["regime", "method", "best trial", "trials"]
        parts.append(f"### Tuned settings\n\n{table(head, rows)}\n{SETTINGS}")
    return "\n".join([*parts, _without(claims), _under(book)])


ABOUT = (
    "Each method and its baseline are tuned with the same budget, in the regime that the method's paper describes. "
    f"Each has a grid of at most {MOST} trials with {len(SEEDS)} seeds each. A trial varies the learning rate and the method's own knobs. "
    "A baseline that has no other knobs to tune tries as many learning rates. If the best trial lies at the edge of an axis, one value beyond the edge is tried, once. "
    f"The best trial then runs with {len(FRESH)} other seeds, and the numbers come from these seeds only. "
    "A number compares method and baseline with the same seed. It is the median of the seeds, with the 95 % bootstrap interval in brackets. With five seeds the interval is about lowest to highest. "
    "Times are those of the virtual clock, until a held-out loss that is the same for every method in a regime. A seed that never reaches that loss counts as 0. "
    "A claim shows if the whole interval reaches the goal. Each seed has its own shards and its own random slowdowns.\n"
)
CAUSES = (
    "Each test runs the winning settings again, without the supposed cause or without every other cause. "
    '"Yes, but not alone" means: the result improves, but another cause remains.\n'
)
SETTINGS = "'rate' is a multiple of the task's learning rate. '12 + 2' means: the grid has 12 trials, and 2 more trials lie beyond its edges.\n"


def summary(folder: Path = DATA, claims: tuple[Claim, ...] = CLAIMS) -> str:
    """Returns how many claims show, in one or two sentences."""
    book = Book(folder)
    verdicts = [verdict(claim, book) for claim in claims]
    shows, holds_both, missing = (sum(v.startswith(start) for v in verdicts) for start in (SHOWS, HOLDS_BOTH, NOT_RUN))
    also = f" For {holds_both} more the interval contains the goal." if holds_both else ""
    lacking = f" {missing} claims are not tested yet." if missing else ""
    return f"With method and baseline tuned alike, {shows} of {len(claims)} papers' claims show.{also}{lacking}"


def _regime(claim: Claim) -> str:
    return f"{claim.row.regime.name}: {claim.row.regime.words}"


def shown(claim: Claim, book: Book) -> str:
    """Returns the numbers of a claim, each with its required value."""
    result = seen(claim, book)
    return "; ".join(f"{one.words} (goal: at least {one.look.least:g})" for one in result) if result else ""


def verdict(claim: Claim, book: Book) -> str:
    """Returns the verdict in a few words."""
    result = seen(claim, book)
    if result is None:
        return f"{NOT_RUN}{_so_far(claim, book)}"
    if all(one.holds for one in result):
        return SHOWS
    if all(one.high >= one.look.least for one in result):
        return HOLDS_BOTH
    return "no: see below" if proven(claim, book) else "no: no cause is proven yet"


def _so_far(claim: Claim, book: Book) -> str:
    """Returns how many trials of both sides exist."""
    trials = [(row, trial) for row in (claim.row, claim.against) for trial in tried(row, book)]
    done = sum(book.found(row, trial, SEEDS) is not None for row, trial in trials)
    return f" ({done} of {len(trials)} trials)" if done else ""


def because(claim: Claim, book: Book) -> list[str]:
    """Returns the row on why a claim does not show, with the results in the regime of the proof; [] if it shows."""
    result, elsewhere = seen(claim, book), proven(claim, book)
    if claim.because is None or not result or not elsewhere or all(one.holds for one in result):
        return []
    told = "; ".join(one.words for one in elsewhere)
    nearer = all(there.median > here.median for here, there in zip(result, elsewhere, strict=True) if not here.holds)
    so = "yes" if all(one.holds for one in elsewhere) else "yes, but not alone" if nearer else "NO"
    if claim.because.same:
        pairs = zip(result, elsewhere, strict=True)
        so = "yes" if all(abs(there.median - here.median) <= ALIKE * here.median for here, there in pairs) else "NO"
    same = claim.because.regime == claim.row.regime
    where = "the same regime" if same else claim.because.regime.words
    but = f", but {words(claim.because.knobs)}" if claim.because.knobs else ""
    return [claim.method, f"{claim.because.words}.", f"{where}{but}", told, so]


def settings(claim: Claim, book: Book) -> list[list[str]]:
    """Returns the chosen settings of both sides, once both are known."""
    if seen(claim, book) is None:
        return []
    return [_setting(row, book) for row in (claim.row, claim.against)]


def _setting(row: Row, book: Book) -> list[str]:
    chosen, trials = winner(row, book), tried(row, book)
    assert chosen is not None
    at_edge = [axis for axis in row.axes if _edged(row, axis, chosen[axis], [t[axis] for t in trials])]
    edge = f" ({', '.join(at_edge)}: at the edge of the tried values)" if at_edge else ""
    count = (
        f"{len(row.trials())} + {len(trials) - len(row.trials())}"
        if len(trials) > len(row.trials())
        else str(len(trials))
    )
    return [row.regime.name, row.label, f"{words(chosen) if chosen else 'default settings'}{edge}", count]


def _edged(row: Row, axis: str, value: Any, values: list[Any]) -> bool:
    """Whether more values could be tried beyond a value at the edge of the tried ones."""
    return replace(row, axes={axis: tuple(dict.fromkeys(values))}).beyond(axis, value) is not None


def _without(claims: tuple[Claim, ...]) -> str:
    """Returns the strategies without a line."""
    named = {row.method for claim in claims for row in (claim.row, claim.against)}
    others = [name for name, cls in members(Strategy).items() if found(name) is cls and name not in named]
    return f"No claim is tested here for {', '.join(sorted(others))}.\n"


def _under(book: Book) -> str:
    """Returns the dates and the commits of the results."""
    lines = book.lines()
    commits = ", ".join(sorted({line.get("commit") or "?" for line in lines})) or "none"
    dates = sorted({line["date"] for line in lines if "date" in line}) or ["not run yet"]
    hours = sum(line.get("seconds", 0.0) for line in lines) / 3600
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"*{when}; commit {commits}; `python -m tests.bench.home`; {len(lines)} cells, {hours:.1f} hours of one core.*\n"
