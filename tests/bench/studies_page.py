# ruff: noqa: E501
"""Writes the part of docs/project/compression.md on Accordion, levels at equal bits and Zen's schemes."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from tests.bench.cells import Results
from tests.bench.compression_studies import BITS, BLOCKS, CHECKS, LATENCY, PAIRS, RANKS, ROUNDERS, said
from tests.bench.page import table
from tests.bench.words import spread
from workbench.compressors._schemes import SCHEMES


def text(found: Results, folder: Path, old: list[str] | None = None) -> str:
    """Returns all three studies, with notes on missing measurements.

    old: rows with seeds that ran with older code
    """
    unfitted = [row for row in old or [] if row.startswith(("ALQ", "AMQ"))]
    return "\n".join(
        [
            _accordion(found),
            _levels(found, _rows(folder / "variance.json"), _rows(folder / "tails.json"), unfitted),
            _zen(folder),
        ]
    )


def _rows(path: Path) -> Any:
    return json.loads(path.read_text())["rows"] if path.exists() else None


def _ends(found: Results, part: str, row: str) -> list[float]:
    return [f["curve"][-1][2] for f in found.seeds(part, row, "any link").values()]


def _accordion(found: Results) -> str:
    head = ["pair", "ratio", "sent per rank and step", "final held-out loss", "loss against gentle"]
    lines, says = [], []
    for of in PAIRS:
        gentle = _ends(found, "accordion", f"{of}: gentle")
        for word in ("gentle", "Accordion", "harsh"):
            each = found.seeds("accordion", f"{of}: {word}", "any link").values()
            ends = _ends(found, "accordion", f"{of}: {word}")
            if ends and gentle:
                sent = statistics.fmean(f["bytes"] for f in each)
                lines.append(
                    [
                        of,
                        word,
                        f"{sent / 1e3:.1f} kB",
                        spread(ends),
                        f"{statistics.fmean(ends) / statistics.fmean(gentle) - 1:+.1%}",
                    ]
                )
        says += _between(found, of)
    if not lines:
        return "## Accordion against its two ratios\n\nNot measured yet: `make bench-compression`.\n"
    about = (
        "The training is that of the tables above, at a constant learning rate, under error feedback. It runs with the gentle ratio, with the harsh ratio, and with Accordion, which checks "
        f"every {CHECKS} steps. The paper finds the gentle ratio's accuracy at nearly the harsh ratio's bytes, over 300 epochs with learning rates that drop. Here the only critical regime is the beginning, because the rate never drops."
    )
    return f"## Accordion against its two ratios\n\n{about}\n\n{table(head, lines)}\n" + "\n".join(says) + "\n"


def _between(found: Results, of: str) -> list[str]:
    """Returns Accordion's position between its two ratios, in bytes and in loss."""
    names = [f"{of}: {word}" for word in ("gentle", "Accordion", "harsh")]
    losses = [_ends(found, "accordion", name) for name in names]
    if not all(losses):
        return []
    g, a, h = (statistics.fmean(x) for x in losses)
    gb, ab, hb = (statistics.fmean(f["bytes"] for f in found.seeds("accordion", n, "any link").values()) for n in names)
    noise = max(statistics.stdev(x) for x in losses) if all(len(x) > 1 for x in losses) else 0.0
    saved = f"{(gb - ab) / (gb - hb):.0%} of the bytes that the harsh ratio saves"
    if abs(h - g) <= noise:
        return [
            f"- {of}: Accordion saves {saved}. The two ratios' losses differ by less than seeds do, so Accordion had nothing to win back here."
        ]
    return [f"- {of}: Accordion saves {saved} and pays {(a - g) / (h - g):.0%} of the loss that the harsh ratio costs."]


def _tails(tails: dict[str, dict[str, float]] | None) -> str:
    """Returns the table of ALQ's and AMQ's errors on normal numbers, which ALQ assumes, and on other numbers."""
    if not tails:
        return ""
    names = list(next(iter(tails.values())))
    lines = [[kind.rstrip(","), *(f"{at[name]:.3g}" for name in names)] for kind, at in tails.items()]
    head = ["distribution of the numbers", *(f"variance, {name}" for name in names)]
    return f" ALQ solves for normal distributions:\n\n{table(head, lines)}"


def _before_the_fix(old: list[str]) -> str:
    if not old:
        return ""
    return f' In the cells "before the fix" ({len(old)}), some seeds ran before the first step fitted levels. Their losses say nothing about levels, so the table leaves them out.'


def _levels(
    found: Results, variance: dict[str, list[float]] | None, tails: dict[str, dict[str, float]] | None, old: list[str]
) -> str:
    head = ["rounding", *(f"{what}, blocks of {b}" for what in ("variance", "loss") for b in BLOCKS)]
    lines = []
    for label in ROUNDERS:
        names = [f"{label}, blocks of {b}" for b in BLOCKS]
        lost = [f"{statistics.fmean(variance[n]):.3g}" if variance else "" for n in names]
        ends = ["before the fix" if n in old else spread(e) if (e := _ends(found, "levels", n)) else "" for n in names]
        lines.append([label, *lost, *ends])
    worse = [b for b in BLOCKS if variance and _mean(variance, "ALQ", b) > _mean(variance, "AMQ", b)]
    note = (
        f"\nIn blocks of {' and '.join(map(str, worse))} ALQ has a larger variance than AMQ, although it could have found AMQ's levels.{_tails(tails)}"
        if worse
        else ""
    )
    dense = _ends(found, "loss", "Dense")
    base = f" Dense fp32 ends at {spread(dense)} at the same learning rate, which is not its best one." if dense else ""
    about = (
        f"Every row sends {BITS} bits per element and 4 bytes per block. Variance is ||C(x) - x||^2 / ||x||^2 of gradients from the last third of a training in one process. By then, a compressor that fits levels "
        f"has fitted them three times. Loss is the final loss of the training above, with three seeds and without error feedback.{base}{_before_the_fix(old)}"
    )
    return f"## Rounding levels at equal bits\n\n{about}\n\n{table(head, lines)}{note}"


def _mean(variance: dict[str, list[float]], label: str, block: int) -> float:
    return statistics.fmean(variance[f"{label}, blocks of {block}"])


def _zen(folder: Path) -> str:
    crossings, seen = _rows(folder / "crossings.json"), _rows(folder / "schemes.json")
    out = ["## Zen's schemes by density\n"]
    if crossings:
        head = ["faster below", "faster above", "ranks", "crossing, formula", "crossing, virtual time", "ratio"]
        lines = [
            [
                c["below"],
                c["above"],
                str(c["ranks"]),
                f"{c['formula']:.3%}",
                f"{c['simulated']:.3%}",
                f"{c['simulated'] / c['formula']:.2f}",
            ]
            for c in crossings
        ]
        out.append(
            "A crossing is the density at which two schemes take equally long, for elements at independent places and without latency.\n\n"
            + table(head, lines)
        )
    if seen:
        about = (
            f"ClickThrough runs on {RANKS} real ranks over emulated links with a latency of {LATENCY:g} ms. Times are medians of one step's exchange. The fewer rows the tables have, the denser a batch's gradient is. "
            "The formulas count bytes. If messages are small, rounds take longer than bytes. Gather and dense have 1 round, tree 2 log2 p, owners 4, and ring 2 p. In each round four ranks take turns on two cores."
        )
        out += [
            about,
            *(_measured_schemes([s for s in seen if s["mbit"] == m]) for m in dict.fromkeys(s["mbit"] for s in seen)),
        ]
    return "\n".join(out) if len(out) > 1 else out[0] + "\nNot measured yet: `make bench-compression`.\n"


def _measured_schemes(seen: list[dict[str, Any]]) -> str:
    """Returns milliseconds by scheme on real ranks, and whether the fastest is the formulas' choice."""
    by = {(s["ids"], s["scheme"]): s for s in seen}
    head = ["rows per table", "density", *SCHEMES, "auto", "fastest", "the formulas' choice"]
    lines, agreed = [], 0
    tables = list(dict.fromkeys(s["ids"] for s in seen))
    for ids in tables:
        some = by[ids, "gather"]
        took = {s: by[ids, s]["wire"] for s in SCHEMES}
        best = min(took, key=lambda s: took[s])
        guess = min(SCHEMES, key=lambda s: said(some["density"], some["model"], s))
        agreed += took[guess] <= 1.05 * took[best]
        ms = [f"{took[s] * 1e3:.1f} ms" for s in SCHEMES]
        lines.append([str(ids), f"{some['density']:.2%}", *ms, f"{by[ids, 'auto']['wire'] * 1e3:.1f} ms", best, guess])
    about = f"{seen[0]['mbit']:g} Mbit/s: in {agreed} of {len(tables)} rows the formulas' choice is within 5 % of the fastest scheme."
    return f"\n{about}\n\n{table(head, lines)}"
