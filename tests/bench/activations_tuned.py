# ruff: noqa: E501
"""Tests rank 20 with one choice in 2 slices at each row's own learning rate, and why it beat none before.

Before a repair, a Projection sent the gradient of a zero tensor through directions that were no choice. The matrices
that write a block's output begin as zero here, so they learned only that many features. The old codec is kept below.
Two controls are next to it: the same restriction without a codec, and blocks with a random start, where nothing is
zero.

    python -m tests.bench.activations_tuned --out docs/data/activations_tuned.json
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor as Values
from torch import nn
from torch.nn import functional as F

from tests.bench.activations import CODECS, STEPS, losses
from workbench import Experiment
from workbench.compressors import Dense, Projection
from workbench.partitions import Partition, Tensor, Whole
from workbench.tasks import ByteGPT, Learner

Cells = list[dict[str, Any]]

RANK, FACTOR = 20, 2.0
SEEDS, FEWER = 5, 3  # seeds of rows compared at their best rates, and of other rows
CODEC = CODECS["rank 20"]


@dataclass(frozen=True, kw_only=True)
class Confining(Projection):
    """The old Projection: even a zero tensor's gradient returns along the sent directions."""

    def chosen(self, payload: tuple[Values, ...]) -> Values | None:
        return payload[1] if len(payload) > 1 else None


class Few(nn.Linear):
    """A Linear whose matrix only writes its first features."""

    def forward(self, x: Values) -> Values:
        reached = torch.arange(self.out_features) < RANK
        return F.linear(x, self.weight * reached[:, None], self.bias)


@dataclass(frozen=True, kw_only=True)
class Confined(ByteGPT):
    """A ByteGPT whose blocks write only `RANK` features."""

    def build(self) -> Learner:
        return _with(super().build(), lambda out: setattr(out, "__class__", Few))


class Slow(nn.Linear):
    """A Linear whose matrix Adam moves more slowly, in proportion to the features that `Few` writes."""

    def forward(self, x: Values) -> Values:
        return F.linear(x, self.weight * (RANK / self.out_features), self.bias)


@dataclass(frozen=True, kw_only=True)
class Slowed(ByteGPT):
    """A ByteGPT whose blocks' last matrices begin as zero and learn that much more slowly."""

    def build(self) -> Learner:
        return _with(super().build(), lambda out: setattr(out, "__class__", Slow))


@dataclass(frozen=True, kw_only=True)
class Stirred(ByteGPT):
    """A ByteGPT whose blocks do not begin as the identity."""

    def build(self) -> Learner:
        return _with(super().build(), lambda out: nn.init.normal_(out.weight, std=0.02))


def _with(learner: Learner, change: Callable[[nn.Linear], Any]) -> Learner:
    def model() -> nn.Module:
        made: Any = learner.model()
        for block in made.blocks:
            change(block.attention_out)
            change(block.mlp_out)
        return made

    return replace(learner, model=model)


def _one_choice(codec: Projection | Dense) -> Partition:
    return Tensor(activations=codec, gradients=codec, mask=True)


WAS, NONE, NOW, FEW, SLOW = (
    "rank 20 before its mend",
    "none",
    "rank 20",
    "none, blocks write 20 features",
    "none, slower blocks",
)
ROWS: dict[str, tuple[ByteGPT, Partition]] = {
    NONE: (ByteGPT(), Tensor()),
    NOW: (ByteGPT(), _one_choice(CODEC)),
    WAS: (ByteGPT(), _one_choice(Confining(rank=RANK))),
    FEW: (Confined(), Whole()),
    SLOW: (Slowed(), Whole()),
    f"{NONE}, blocks begin at random": (Stirred(), Tensor()),
    f"{WAS}, blocks begin at random": (Stirred(), _one_choice(Confining(rank=RANK))),
}
TUNED = (NONE, NOW)


def experiment(row: str, rate: float, seed: int) -> Experiment:
    """rate: in multiples of the task's"""
    task, partition = ROWS[row]
    ranks = 2 if isinstance(partition, Tensor) else 1
    return Experiment(task=task, ranks=ranks, steps=STEPS, seed=seed, pace=1.0, eval_every=STEPS, partition=partition,
                      lr=task.lr * rate)  # fmt: skip


def of(cells: Cells, row: str, rate: float) -> Cells:
    """Returns the runs of a row at a rate, by seed."""
    return sorted((c for c in cells if c["row"] == row and c["rate"] == rate), key=lambda c: c["seed"])


def best(cells: Cells, row: str) -> tuple[float, bool] | None:
    """Returns the rate with the smallest held-out loss on the first seed, and whether it is at the grid's edge."""
    ends = {c["rate"]: _finite(c["held_out"]) for c in cells if c["row"] == row and c["seed"] == 0}
    if len(ends) < 3:
        return None
    rate = min(ends, key=lambda r: ends[r])
    return rate, rate in (min(ends), max(ends))


def _finite(x: float) -> float:
    return x if math.isfinite(x) else math.inf


def wanted(cells: Cells) -> tuple[str, float, int] | None:
    """Returns the next run: all rows at the task's rate, then grids and then seeds.

    A grid grows if its best rate is at an edge.
    """
    asked = [(row, 1.0, seed) for row in ROWS for seed in range(SEEDS if row in TUNED else FEWER)]
    for row in TUNED:
        asked += [(row, rate, 0) for rate in (1 / FACTOR, FACTOR)]
        rate, edge = best(cells, row) or (1.0, False)
        if edge:
            asked.append((row, rate / FACTOR if rate < 1 else rate * FACTOR, 0))
        else:
            asked += [(row, rate, seed) for seed in range(SEEDS)]
    there = {(c["row"], c["rate"], c["seed"]) for c in cells}
    return next((one for one in asked if one not in there), None)


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__)
    ask.add_argument("--out", type=Path, required=True)
    out = ask.parse_args().out
    found = json.loads(out.read_text()) if out.exists() else {"cells": []}
    while one := wanted(found["cells"]):
        row, rate, seed = one
        loss, held_out = losses(experiment(row, rate, seed))[:2]
        found["cells"].append({"row": row, "rate": rate, "seed": seed, "loss": loss, "held_out": held_out})
        out.write_text(json.dumps(found, indent=1))
        print(*one, loss, held_out, flush=True)


# -- the page --


def text(found: dict[str, Any]) -> str:
    """Returns the section of the page."""
    from tests.bench.page import table

    cells, lines = found["cells"], []
    for row in ROWS:
        known, chosen = of(cells, row, 1.0), best(cells, row)
        line = [row, str(len(known)), *(_told(known, what) for what in ("loss", "held_out"))]
        if row in TUNED and chosen:
            at = of(cells, row, chosen[0])
            tried = ", ".join(f"{r * ByteGPT.lr:g}" for r in sorted({c["rate"] for c in cells if c["row"] == row}))
            line += [
                tried,
                f"{chosen[0] * ByteGPT.lr:g}{' (the edge)' if chosen[1] else ''}",
                str(len(at)),
                *(_told(at, what) for what in ("loss", "held_out")),
            ]
        lines.append(line + [""] * (9 - len(line)))
    head = [
        "",
        "seeds",
        "training loss",
        "held-out loss",
        "rates tried",
        "best rate",
        "seeds",
        "training loss",
        "held-out loss",
    ]
    return f"{_about()}\n\n{table(head, lines)}\n{_said(cells)}\n"


def _told(cells: Cells, what: str) -> str:
    each = [c[what] for c in cells]
    if not each:
        return ""
    if not all(map(math.isfinite, each)):
        return "not finite"
    return f"{statistics.fmean(each):.3f} ({min(each):.3f} to {max(each):.3f})"


def _about() -> str:
    share = ByteGPT().width // RANK
    return (
        f"Rank 20 with one choice in 2 slices: the same runs as in the section above, at the task's rate, {ByteGPT.lr:g}, and {NONE} and {NOW} at their own: "
        f"rates a factor of {FACTOR:g} apart, the least held-out loss on the first seed, one more rate wherever that lies at the edge. "
        f'Before a mend "rank 20, both, one choice" trained better than none. A tensor that is zero has no strongest directions, and the {RANK} that are sent of it '
        f"are the first {RANK} features. A gradient that went back through these reached so many outputs of a block's last matrices, which begin as zero; so the next tensor lay in "
        f"these features, too, and so on to the end. Two rows tell whether that is the cause: blocks that write {RANK} of {ByteGPT().width} features by construction, without a codec "
        f'and in one process, and blocks that begin at random, where no tensor is zero. A third tells what was good about it: "{SLOW}" write all features, but their last '
        f"matrices learn at an {share}th of the rate. Between stages an activation holds what the embedding has found and is never zero, so nothing was confined there."
    )


def _said(cells: Cells) -> str:
    """Returns the differences between rows at the task's rate and at their best rates."""
    stirred = [f"{name}, blocks begin at random" for name in (WAS, NONE)]
    pairs = [(WAS, NONE), (FEW, NONE), (WAS, FEW), (SLOW, NONE), (NOW, NONE), (stirred[0], stirred[1])]
    lines = [
        f"* At the task's rate {a} is over {b} by {_apart(of(cells, a, 1.0), of(cells, b, 1.0))}." for a, b in pairs
    ]
    tuned = {row: of(cells, row, chosen[0]) for row in TUNED if (chosen := best(cells, row))}
    if len(tuned) == len(TUNED):
        lines.append(f"* Each at its best rate {NOW} is over {NONE} by {_apart(tuned[NOW], tuned[NONE])}.")
        lines.append(
            f"* At the task's rate {FEW} is over {NONE} at its best by {_apart(of(cells, FEW, 1.0), tuned[NONE])}."
        )
    return "\n".join(lines)


def _apart(mine: Cells, other: Cells) -> str:
    """Returns the mean difference on the same seeds with its standard error, in training and in held-out loss."""
    found = []
    for name, what in (("training", "loss"), ("held-out", "held_out")):
        base = {c["seed"]: c[what] for c in other}
        each = [c[what] - base[c["seed"]] for c in mine if c["seed"] in base]
        if len(each) < 2:
            return "what is not measured yet"
        found.append(f"{statistics.fmean(each):+.3f} ± {statistics.stdev(each) / math.sqrt(len(each)):.3f} in {name}")
    return f"{' and '.join(found)} loss ({len(each)} seeds; mean and standard error)"


if __name__ == "__main__":
    main()
