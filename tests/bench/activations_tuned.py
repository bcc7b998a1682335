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
    "rank 20 before its repair",
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
    columns = ["seeds", "training loss", "held-out loss"]
    head = ["row", *(f"{column} at {ByteGPT.lr:g}" for column in columns), "rates tried", "best rate",
            *(f"{column} at the best rate" for column in columns)]  # fmt: skip
    return f"{_about()}\n\n{table(head, lines)}\n{_said(cells)}"


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
        f"These are the runs of rank 20 with one choice in 2 slices, as in the section above, at the task's rate {ByteGPT.lr:g}. The rows {NONE} and {NOW} "
        f"also run at their own best rate. Rates are a factor of {FACTOR:g} apart, and the best one has the least held-out loss on the first seed. If it is at the edge, "
        "one more rate follows.\n\n"
        f'Before a repair, "rank 20, both, one choice" trained better than none. A zero tensor has no strongest directions, so the codec sent its first {RANK} features. '
        f"A gradient that went back through these reached only {RANK} outputs of a block's last matrices, which begin as zero. So the next tensor had only these features, too, "
        "until the end of the run.\n\n"
        f"Two controls test whether this is the cause. In one, blocks write {RANK} of {ByteGPT().width} features by construction, without a codec and in one process. In the other, blocks "
        f'begin at random, so no tensor is zero. A third control tests what was good about it: in "{SLOW}" the blocks write all features, but their last matrices learn at 1/{share} of '
        "the rate. Between stages an activation contains the output of the embedding and is never zero. So nothing was confined there."
    )


def _said(cells: Cells) -> str:
    """Returns the differences between rows at the task's rate and at their best rates."""
    from tests.bench.page import table

    stirred = [f"{name}, blocks begin at random" for name in (WAS, NONE)]
    pairs = [(WAS, NONE), (FEW, NONE), (WAS, FEW), (SLOW, NONE), (NOW, NONE), (stirred[0], stirred[1])]
    rows = [[a, b, "the task's", *_apart(of(cells, a, 1.0), of(cells, b, 1.0))] for a, b in pairs]
    tuned = {row: of(cells, row, chosen[0]) for row in TUNED if (chosen := best(cells, row))}
    if len(tuned) == len(TUNED):
        rows.append([NOW, NONE, "each row's best", *_apart(tuned[NOW], tuned[NONE])])
        rows.append([FEW, NONE, f"the task's; best of {NONE}", *_apart(of(cells, FEW, 1.0), tuned[NONE])])
    head = ["row", "compared with", "rate", "training loss, difference", "held-out loss, difference", "seeds"]
    return f"The differences on the same seeds, with mean and standard error:\n\n{table(head, rows)}"


def _apart(mine: Cells, other: Cells) -> list[str]:
    """Returns the mean difference on the same seeds with its standard error, in training and held-out loss, and the seeds."""
    found = []
    for what in ("loss", "held_out"):
        base = {c["seed"]: c[what] for c in other}
        each = [c[what] - base[c["seed"]] for c in mine if c["seed"] in base]
        if len(each) < 2:
            return ["not measured yet", "", ""]
        found.append(f"{statistics.fmean(each):+.3f} ± {statistics.stdev(each) / math.sqrt(len(each)):.3f}")
    return [*found, str(len(each))]


if __name__ == "__main__":
    main()
