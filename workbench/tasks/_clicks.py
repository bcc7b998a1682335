"""Click prediction from ids and numbers: the network, its loss and AUC."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Batch = tuple[Tensor, Tensor, Tensor]  # ids (B, fields) int64, numbers (B, numbers) float32, clicked (B,) float32


class ClickNet(nn.Module):
    """Embeds each id and appends the numbers. Two hidden layers give `(B,)` log odds of a click.

    Each field has its own table. Its gradient is dense, with zeros in unread rows.
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
    """Returns the rows that a batch reads of each table: (B,) of each."""
    return {f"tables.{field}.weight": ids for field, ids in enumerate(batch[0].unbind(1))}


def log_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Returns mean nats per example. `clicked` may hold probabilities instead of 0 and 1."""
    ids, numbers, clicked = batch
    return F.binary_cross_entropy_with_logits(model(ids, numbers), clicked)


def of_rate(rate: float) -> float:
    """Returns the entropy of clicks at this rate in nats per example: the loss of a model that knows only the rate.

    Clamps the rate, to stay above 0 if all or no examples are clicks.
    """
    p = min(max(rate, 1e-12), 1 - 1e-12)
    return -p * math.log(p) - (1 - p) * math.log(1 - p)


def auc(scores: Tensor, clicked: Tensor) -> float:
    """Returns how often a click scores above a non-click. Ties count half; a single class gives 0.5."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)  # sorted
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts - 1) / 2)[place]
    yes = clicked > 0.5
    n, m = int(yes.sum()), int((~yes).sum())
    return float((ranks[yes].sum() - n * (n + 1) / 2) / (n * m)) if n and m else 0.5
