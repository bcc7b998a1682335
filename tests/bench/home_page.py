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


def text(folder: Path = DATA, claims: tuple[Claim, ...] = CLAIMS) -> str:
    """Returns the section: method, table, tuned settings and why some claims do not show."""
    book = Book(folder)
    lines = [
        [c.method, f"{c.paper} ({c.source})", c.row.regime.words, shown(c, book), verdict(c, book)] for c in claims
    ]
    whys = [why for claim in claims if (why := because(claim, book))]
    parts = [
        "## Each on its home ground\n",
        ABOUT,
        table(["method", "its paper's claim", "where", "seen", "verdict"], lines),
    ]
    if whys:
        parts.append("Why some do not show:\n\n" + "\n".join(f"- {why}" for why in whys) + "\n")
    if rows := list({tuple(line[:2]): line for claim in claims for line in settings(claim, book)}.values()):
        parts.append(
            "What each was tuned to:\n\n" + table(["where", "method", "the best of its trials", "trials"], rows)
        )
    return "\n".join([*parts, _without(claims), _under(book)])


ABOUT = (
    f"Method and baseline are tuned by the same budget in the regime that the method's paper speaks of: at most {MOST} trials of {len(SEEDS)} seeds each over the learning rate "
    "and the method's own knobs (the baseline takes as many learning rates where it has nothing else to turn). Where the best lies at the edge of an axis, one value beyond is tried, once. "
    f"The best of each then runs with {len(FRESH)} other seeds, and numbers are of these: the median of method beside baseline with the same seed, in brackets the 95 % bootstrap interval, "
    "which with five seeds is about lowest to highest. Times are the virtual clock's, to a held-out loss that is the same for all in a regime; a seed that never gets there counts as 0. "
    "Seen is what the whole interval bears out. Shards and stumbles are other ones with each seed.\n"
)


def shown(claim: Claim, book: Book) -> str:
    """Returns the numbers of a claim, each with its required value."""
    result = seen(claim, book)
    return "; ".join(f"{one.words} (asked: {one.look.least:g})" for one in result) if result else ""


def verdict(claim: Claim, book: Book) -> str:
    """Returns the verdict in a few words."""
    result = seen(claim, book)
    if result is None:
        return f"not run yet{_so_far(claim, book)}"
    if all(one.holds for one in result):
        return "seen"
    if all(one.high >= one.look.least for one in result):
        return "not seen: the interval holds both"
    return "not seen: see below" if proven(claim, book) else "not seen; no reason is proven yet"


def _so_far(claim: Claim, book: Book) -> str:
    """Returns how many trials of both sides exist."""
    trials = [(row, trial) for row in (claim.row, claim.against) for trial in tried(row, book)]
    done = sum(book.found(row, trial, SEEDS) is not None for row, trial in trials)
    return f" ({done} of {len(trials)} trials)" if done else ""


def because(claim: Claim, book: Book) -> str:
    """Returns why a claim does not show, with the results in the regime of the proof."""
    result, elsewhere = seen(claim, book), proven(claim, book)
    if claim.because is None or not result or not elsewhere or all(one.holds for one in result):
        return ""
    told = "; ".join(one.words for one in elsewhere)
    nearer = all(there.median > here.median for here, there in zip(result, elsewhere, strict=True) if not here.holds)
    so = "this" if all(one.holds for one in elsewhere) else "this, but not alone" if nearer else "NOT this"
    if claim.because.same:
        pairs = zip(result, elsewhere, strict=True)
        so = (
            "this"
            if all(abs(there.median - here.median) <= ALIKE * here.median for here, there in pairs)
            else "NOT this"
        )
    same = claim.because.regime == claim.row.regime
    where = "In the same place" if same else f"On {claim.because.regime.words}"
    but = f" but {words(claim.because.knobs)}" if claim.because.knobs else ""
    return (
        f"{claim.method}: {claim.because.words}. {where}, with the settings that had won{but}: {told}. So it is {so}."
    )


def settings(claim: Claim, book: Book) -> list[list[str]]:
    """Returns the chosen settings of both sides, once both are known."""
    if seen(claim, book) is None:
        return []
    return [_setting(row, book) for row in (claim.row, claim.against)]


def _setting(row: Row, book: Book) -> list[str]:
    chosen, trials = winner(row, book), tried(row, book)
    assert chosen is not None
    at_edge = [axis for axis in row.axes if _edged(row, axis, chosen[axis], [t[axis] for t in trials])]
    edge = f" ({', '.join(at_edge)}: the edge of what was tried)" if at_edge else ""
    count = (
        f"{len(row.trials())} + {len(trials) - len(row.trials())}"
        if len(trials) > len(row.trials())
        else str(len(trials))
    )
    return [row.regime.name, row.label, f"{words(chosen)}{edge}", count]


def _edged(row: Row, axis: str, value: Any, values: list[Any]) -> bool:
    """Whether more values could be tried beyond a value at the edge of the tried ones."""
    return replace(row, axes={axis: tuple(dict.fromkeys(values))}).beyond(axis, value) is not None


def _without(claims: tuple[Claim, ...]) -> str:
    """Returns the strategies without a line."""
    named = {row.method for claim in claims for row in (claim.row, claim.against)}
    others = [name for name, cls in members(Strategy).items() if found(name) is cls and name not in named]
    return f"No claim is looked for here of {', '.join(sorted(others))}.\n"


def _under(book: Book) -> str:
    """Returns the dates and the commits of the results."""
    lines = book.lines()
    commits = ", ".join(sorted({line.get("commit") or "?" for line in lines})) or "none"
    dates = sorted({line["date"] for line in lines if "date" in line}) or ["not run yet"]
    hours = sum(line.get("seconds", 0.0) for line in lines) / 3600
    when = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    return f"*{when}; commit {commits}; `python -m tests.bench.home`; {len(lines)} cells, {hours:.1f} hours of one core.*\n"
