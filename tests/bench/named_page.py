"""Writes the section of a page of docs/project/benchmarks/ on the accuracy of named causes: see `tests.bench.named`."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.bench.named import BETWEEN, CAUSES, EVERY, PACE, STOOD, WITHIN, pairs, right, soon, wanted

ASKED, FREE = 0.95, 3000  # of the trials; steps without a false alarm
SAID = {
    frozenset({("forward", 2)}): "two ranks late at once, both in forward",
    frozenset({("forward", 1), ("backward", 1)}): "two late at once, one in forward, one in backward",
    frozenset({("outside", 1)}): "one that pauses between two steps",
    frozenset({("frozen", 1)}): f"one that stands still once, for {STOOD:g} steps",
    frozenset({("network", 1)}): "one whose port is slow",
}  # fmt: skip


def section(cells: dict[str, Any]) -> str:
    """Returns the requirements with the results."""
    lines = ["| ranks, beside | delay | trials | named rightly | first, after steps | not named | wrong | a step |",
             "| --- | --- | --- | --- | --- | --- | --- | --- |"]  # fmt: skip
    for name, cell in cells.items():
        if cell["trials"] and "apart" not in name:
            lines.append(_row(cell))
    apart = [_apart(cell) for name, cell in cells.items() if "apart" in name]
    free = [c for c in cells.values() if EVERY * c["free_looks"] >= FREE or c["busy"]]
    alarms = (f"{c['ranks']} ranks{_beside(c)}{_percent(c)}: at {len(c['free'])} of {c['free_looks']} looks in "
              f"{EVERY * c['free_looks']} steps" for c in free)  # fmt: skip
    tenth, calm = ([c for c in some if not c["busy"]] for some in (cells.values(), free))
    kept = _on_all(tenth) and all(sum(map(right, c["trials"])) >= ASKED * len(c["trials"]) for c in tenth)
    silent = _on_all(calm) and not any(c["free"] for c in calm)
    about = (
        "Real ranks, paced. By a plan that no change announces one rank "
        f"takes longer in one phase, for {WITHIN} steps; then nobody for {BETWEEN}. Phases in turn: "
        f"{', '.join(CAUSES)}; ranks are drawn. The record is looked at as it was after each step. Right: after the "
        "last of them the list of causes names this rank and this phase, and no other. Percent are of a step as its "
        "pace and its wire ask for; the last column is the median of all steps. Rows take up to half a second to come "
        "to a notebook, which is not in it."
    )
    quiet = (
        f"Asked: 10 % named in 19 of 20 trials: {'kept' if kept else 'NOT kept'}. No false alarm in {FREE:,} steps: "
        f"{'kept' if silent else 'NOT kept'}."
    )
    least = ", ".join(f"{x or 'none'}{' %' if x else ''} on {n} ranks" for n in PACE for x in [_least(cells, n)])
    return "\n\n".join([
        about, "\n".join(lines), f"The line about one straggler named this rank in {_lines(cells)} trials.",
        "Told apart, at 10 %. " + " ".join(apart),
        "Somebody named where nothing was wrong: " + "; ".join(alarms) + ".",
        f"{quiet} Beside two spinning processes the smallest of the delays tried that is named in 19 of 20 (asked: at "
        f"most 30 %): {least}.\n",
    ])  # fmt: skip


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
    return f" (of the run at {cell['percent']:g} %)" if cell["busy"] else ""


def _row(cell: dict[str, Any]) -> str:
    trials = cell["trials"]
    waited = sorted(s for t in trials if (s := soon(t)) is not None)
    missed = [t for t in trials if not wanted(t) <= pairs(t["looks"][-1][1])]
    wrong = [t for t in trials if pairs(t["looks"][-1][1]) - wanted(t)]
    seconds, first = trials[0]["delays"][0][4], waited[len(waited) // 2] if waited else "-"
    return (f"| {cell['ranks']}{_beside(cell)} | {seconds * 1e3:.1f} ms, {cell['percent']:g} % | {len(trials)} | "
            f"{sum(map(right, trials))} | {first} ({waited[-1] if waited else '-'}) | {_of(missed)} | {_of(wrong)} | "
            f"{cell['pace']['step_50'] * 1e3:.0f} ms |")  # fmt: skip


def _of(trials: list[dict[str, Any]]) -> str:
    """Returns the number of trials, by cause."""
    counts = Counter(d[3] for t in trials for d in t["delays"][:1])
    return f"{len(trials)}: " + ", ".join(f"{cause} {n}" for cause, n in counts.items()) if trials else "0"


def _apart(cell: dict[str, Any]) -> str:
    by: dict[frozenset[tuple[str, int]], list[bool]] = {}
    for trial in cell["trials"]:
        by.setdefault(frozenset(Counter(d[3] for d in trial["delays"]).items()), []).append(right(trial))
    each = (f"{SAID[kind]}: {sum(rights)} of {len(rights)}" for kind, rights in by.items())
    return f"On {cell['ranks']} ranks{_beside(cell)}: " + "; ".join(each) + "."
