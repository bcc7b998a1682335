"""Predicting clicks from ids and numbers: the network, its loss, and how well it ranks. No data is known here."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor, Tensor]  # ids (B, fields) int64, numbers (B, numbers) float32, clicked (B,) float32


class ClickNet(nn.Module):
    """An embedding of each id, joined with the numbers, through two hidden layers: (B,) log odds of a click.

    Each field has a table of its own, whose gradient is dense in shape and zero in all rows that a batch does not name.
    """

    def __init__(self, fields: int, ids: int, numbers: int, width: int, hidden: int) -> None:
        super().__init__()
        tables = [nn.Embedding(ids, width) for _ in range(fields)]
        self.tables = nn.ModuleList(tables)
        self.body = nn.Sequential(
            nn.Linear(fields * width + numbers, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(hidden, 1)
        for table in tables:
            nn.init.normal_(table.weight, std=0.1)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        rows = [table(ids[:, f]) for f, table in enumerate(self.tables)]
        return self.head(self.body(torch.cat([*rows, numbers], 1)))[:, 0]


def lookups(batch: Batch) -> dict[str, Tensor]:
    """Which rows of which table a batch reads: (B,) of each."""
    return {f"tables.{field}.weight": ids for field, ids in enumerate(batch[0].unbind(1))}


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean nats per example; clicks may be chances instead of 0 and 1."""
    ids, numbers, clicked = batch
    return F.binary_cross_entropy_with_logits(model(ids, numbers), clicked)


def of_rate(rate: float) -> float:
    """The entropy of clicks that come at this rate, in nats per example: the loss of whoever knows no more than it.

    Where all or none click nothing is left to tell, and it is taken as the smallest number above 0.
    """
    p = min(max(rate, 1e-12), 1 - 1e-12)
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """How often an example with a click scores higher than one without; equal scores count half, one kind alone 0.5."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)  # sorted
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    yes = clicked > 0.5
    n, m = int(yes.sum()), int((~yes).sum())
    return float((ranks[yes].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
