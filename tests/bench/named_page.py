"""Writes the section of a page of docs/project/benchmarks/ on the accuracy of named causes: see `tests.bench.named`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.bench.named import BETWEEN, CAUSES, EVERY, PACE, STOOD, WITHIN, pairs, right, soon, wanted
from tests.bench.words import listed

ASKED, FREE = 0.95, 3000  # of the trials; steps without a false alarm
CASES = {
    frozenset({("forward", 2)}): "two ranks are slow at once, both in forward",
    frozenset({("forward", 1), ("backward", 1)}): "two ranks are slow at once, one in forward, one in backward",
    frozenset({("outside", 1)}): "a rank pauses between two steps",
    frozenset({("frozen", 1)}): f"a rank stands still once, for {STOOD:g} steps",
    frozenset({("network", 1)}): "the port of a rank is slow",
}  # fmt: skip


def section(cells: dict[str, Any]) -> str:
    """Returns the requirements with the results."""
    from tests.bench.page import table  # it imports this module

    rows = [_row(cell) for name, cell in cells.items() if cell["trials"] and "apart" not in name]
    apart = [row for name, cell in cells.items() if "apart" in name for row in _apart(cell)]
    free = [c for c in cells.values() if EVERY * c["free_looks"] >= FREE or c["busy"]]
    alarms = [[f"{c['ranks']}{_beside(c)}{_percent(c)}", f"{EVERY * c['free_looks']}", f"{c['free_looks']}",
               f"{len(c['free'])}"] for c in free]  # fmt: skip
    quiet, calm = ([c for c in some if not c["busy"]] for some in (cells.values(), free))
    kept = _on_all(quiet) and all(sum(map(right, c["trials"])) >= ASKED * len(c["trials"]) for c in quiet)
    silent = _on_all(calm) and not any(c["free"] for c in calm)
    about = (
        "The ranks are real and paced. By a plan without a recorded change, one rank takes longer in one phase for "
        f"{WITHIN} steps. Then no rank is slow for {BETWEEN} steps. The phases take turns: {listed(CAUSES)}. The slow "
        f"rank is random. The benchmark reads the record as it was after each step. A trial is right if after {WITHIN} "
        "steps the list of causes has this rank with this phase, and no other rank or phase. The delay in per cent is "
        "a share of a step as its pace and its link determine it. The last column is the median of all steps. Rows "
        "take up to half a second to reach a notebook. The table does not include this time."
    )
    head = ["ranks, other load", "delay", "trials", "right", "steps until first found: median (most)", "not found",
            "wrong", "median step"]  # fmt: skip
    verdict = [
        f"- Goal: with a delay of 10 % at least 19 of 20 trials are right in each run without spinning processes: "
        f"{'kept' if kept else 'NOT kept'}.",
        f"- Goal: no false alarm in {FREE:,} steps: {'kept' if silent else 'NOT kept'}.",
        "- Goal: next to two spinning processes the analysis finds a delay of at most 30 % in 19 of 20 trials. The "
        f"smallest tried delay that it finds so often is {listed([_smallest(cells, ranks) for ranks in PACE])}.",
    ]
    return "\n\n".join([
        about, table(head, rows) + f"\nThe line about one straggler names this rank in {_lines(cells)} trials.",
        "Other cases, at a delay of 10 %:", table(["ranks, other load", "case", "right"], apart).rstrip(),
        "A false alarm is a look that names a rank when no recent step has a delay:",
        table(["ranks, other load", "steps", "looks", "false alarms"], alarms).rstrip(), "\n".join(verdict) + "\n",
    ])  # fmt: skip


def _smallest(cells: dict[str, Any], ranks: int) -> str:
    least = _least(cells, ranks)
    return f"{least or 'none'}{' %' if least else ''} on {ranks} ranks"


def _on_all(cells: list[dict[str, Any]]) -> bool:
    """Whether all required numbers of ranks were measured; otherwise no claim is kept."""
    return {c["ranks"] for c in cells} == set(PACE)


def _lines(cells: dict[str, Any]) -> str:
    """Returns in how many trials of one rank the line about stragglers named it after the last step."""
    trials = [t for name, c in cells.items() if "apart" not in name for t in c["trials"]]
    hit = sum([ranks for _, ranks in t["looks"][-1][2]] == [[t["delays"][0][2]]] for t in trials)
    return f"{hit} of {len(trials)}"


def _least(cells: dict[str, Any], ranks: int) -> float | None:
    """Returns the smallest delay, in per cent, such that the analysis found all larger ones on a busy machine."""
    mine = sorted((c for c in cells.values() if c["busy"] and c["ranks"] == ranks), key=lambda c: -c["percent"])
    least = None
    for cell in mine:
        if sum(map(right, cell["trials"])) < ASKED * len(cell["trials"]):
            break
        least = cell["percent"]
    return least


def _beside(cell: dict[str, Any]) -> str:
    """Returns a note on the machine's other load; `beside` is entered by hand."""
    return (", two processes spin" if cell["busy"] else "") + (f", {cell['beside']}" if cell.get("beside") else "")


def _percent(cell: dict[str, Any]) -> str:
    return f" (the run with delays of {cell['percent']:g} %)" if cell["busy"] else ""


def _row(cell: dict[str, Any]) -> list[str]:
    trials = cell["trials"]
    waited = sorted(s for t in trials if (s := soon(t)) is not None)
    missed = [t for t in trials if not wanted(t) <= pairs(t["looks"][-1][1])]
    wrong = [t for t in trials if pairs(t["looks"][-1][1]) - wanted(t)]
    seconds, first = trials[0]["delays"][0][4], waited[len(waited) // 2] if waited else "-"
    return [
        f"{cell['ranks']}{_beside(cell)}", f"{seconds * 1e3:.1f} ms, {cell['percent']:g} %", f"{len(trials)}",
        f"{sum(map(right, trials))}", f"{first} ({waited[-1] if waited else '-'})", _of(missed), _of(wrong),
        f"{cell['pace']['step_50'] * 1e3:.0f} ms",
    ]  # fmt: skip


def _of(trials: list[dict[str, Any]]) -> str:
    """Returns the number of trials, by cause."""
    counts = Counter(d[3] for t in trials for d in t["delays"][:1])
    return f"{len(trials)}: " + ", ".join(f"{cause} {n}" for cause, n in counts.items()) if trials else "0"


def _apart(cell: dict[str, Any]) -> list[list[str]]:
    by: dict[frozenset[tuple[str, int]], list[bool]] = {}
    for trial in cell["trials"]:
        by.setdefault(frozenset(Counter(d[3] for d in trial["delays"]).items()), []).append(right(trial))
    where = f"{cell['ranks']}{_beside(cell)}"
    return [[where, CASES[kind], f"{sum(rights)} of {len(rights)}"] for kind, rights in by.items()]
