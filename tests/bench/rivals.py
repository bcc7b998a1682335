"""Tunes competing methods with one budget: a grid of rates by two settings, then the best with other seeds.

The pages on shadows' losses share this module. A grid is widened once at its edge. Runs are kept next to the result,
one per line, so a campaign resumes.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench.page import interval, table
from workbench.strategies import Strategy

SEEDS, OTHERS = (0, 1, 2), (10, 11, 12, 13, 14)  # of a trial; of the best trial afterwards
HEAD = [
    "method",
    "best learning rate",
    "best setting",
    "normalised entropy",
    "gap",
    "difference from its foreground form",
]
BUDGET = (
    "Each method gets twelve trials of three seeds each: six learning rates with two settings. If the best rate is at "
    "the edge of the grid, one more rate follows. The best trial then runs with five other seeds. The table shows "
    "their median with a 95 % bootstrap interval. A model that knows only the click rate has a normalised entropy of "
    "1; lower is better. A gap is the mean number of steps between two synchronisations."
)

Run = Callable[[Strategy, float, int], tuple[float, float]]  # of a rate and a seed: the loss, and the mean gap


class Kept:
    """Runs that are kept in a file, one per line, and new runs."""

    def __init__(self, path: Path, run: Run) -> None:
        self.path, self._run = path, run
        lines = path.read_text().splitlines() if path.exists() else []
        self._found = {tuple(key): tuple(value) for key, value in map(json.loads, lines)}

    def run(self, strategy: Strategy, lr: float, seed: int) -> tuple[float, float]:
        key = str(strategy), lr, seed
        if key not in self._found:
            self._found[key] = self._run(strategy, lr, seed)
            with self.path.open("a") as file:
                file.write(json.dumps([key, self._found[key]]) + "\n")
            print(*key, *self._found[key], flush=True)
        return self._found[key]  # type: ignore[return-value]


def tuned(run: Run, pair: Sequence[Strategy], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Returns the trials of the grid, and of one more rate if the best is at its edge."""
    seen: list[dict[str, Any]] = []

    def tried(lr: float) -> None:
        for number, strategy in enumerate(dict.fromkeys(pair)):
            seen.append({"lr": lr, "setting": number, "losses": [run(strategy, lr, seed)[0] for seed in SEEDS]})

    for lr in rates:
        tried(lr)
    if wider := {rates[0]: rates[0] / 2, rates[-1]: rates[-1] * 2}.get(best(seen)["lr"]):
        tried(wider)
    return seen


def best(trials: list[dict[str, Any]]) -> dict[str, Any]:
    return min(trials, key=lambda t: statistics.mean(t["losses"]))


def cell(run: Run, pair: Sequence[Strategy], rates: Sequence[float]) -> dict[str, Any]:
    """Returns one method's trials, the best one and its results with other seeds."""
    trials = tuned(run, pair, rates)
    found = best(trials)
    strategy = pair[found["setting"]]
    others = [run(strategy, found["lr"], seed) for seed in OTHERS]
    return {"trials": trials, "best": {**found, "strategy": str(strategy)}, "others": others}


def compared(cells: Mapping[str, dict[str, Any]], beside: Mapping[str, str], every_step: str = "") -> str:
    """Returns a table of the methods.

    beside:     the method to compare each one with, seed by seed
    every_step: the method that synchronises in each step, so its gap is 1
    """
    rows = []
    for way, its in cells.items():
        losses, than = [loss for loss, _ in its["others"]], ""
        if way in beside:
            other = [loss for loss, _ in cells[beside[way]]["others"]]
            than = "{:+.4f} ({:+.4f} to {:+.4f})".format(*interval([a - b for a, b in zip(losses, other, strict=True)]))
        gap = statistics.mean(g for _, g in its["others"]) if way != every_step else 1.0
        rows.append([way, f"{its['best']['lr']:g}", its["best"]["strategy"],
                     "{:.4f} ({:.4f} to {:.4f})".format(*interval(losses)), f"{gap:.1f}", than])  # fmt: skip
    return table(HEAD, rows)
