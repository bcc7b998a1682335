"""Handwritten digits from scikit-learn, and a small convolutional network."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.settings import knob
from workbench.tasks._base import Learner, TaskBase, TaskError, shuffled
from workbench.tasks._shards import dirichlet, draw_from_shard

EVERY = 5  # one image in this many is held out


@dataclass(frozen=True, kw_only=True)
class Digits(TaskBase):
    """A small convolutional network that reads handwritten digits.

    1,797 images of 8 x 8 pixels. 20 % of them are held out. It begins at log(10) = 2.3 nats and 10 % accuracy. Almost
    all parameters are in one layer: much traffic for little compute.

    With `shards` = "iid" ranks share each epoch's examples and see the same mix of digits. With "dirichlet" each rank
    keeps its own examples, equally many. Its mix of digits is q_r ~ Dirichlet(alpha * the mix of all). At alpha = 100
    mixes are nearly alike. At 1 some digits are rare. At 0.1 two or three digits are most of the examples.

    When to use it: for a quick answer in accuracy, for ranks with different data or for much traffic and little
    compute.

    Reference: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998; data: Alpaydin
    and Kaynak, "Optical Recognition of Handwritten Digits", UCI 1998, https://doi.org/10.24432/C50P49;
    shards: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification", 2019, https://arxiv.org/abs/1909.06335
    """

    width: int = knob(32, 4, 512, live=False, doc="channels of the first layer; the second has twice as many")
    hidden: int = knob(384, 16, 8192, live=False, doc="features of the large layer")

    shards: str = knob("iid", choices=("iid", "dirichlet"), live=False, doc="ranks see the same mix, or each its own")
    alpha: float = knob(0.5, 0.01, 1000.0, log=True, live=False, doc="Dirichlet alpha: small is non-IID")
    shard_seed: int = knob(0, 0, 2**31 - 1, live=False, doc="seed of Dirichlet shards")

    lr: ClassVar[float] = 1e-3
    batch: ClassVar[int] = 32
    metric: ClassVar[str] = "held-out accuracy"

    def build(self) -> Learner:
        return Learner(
            model=lambda: network(self.width, self.hidden),
            data=self._batches,
            loss=_loss,
            optimizer=lambda params, lr: torch.optim.Adam(params, lr),
            evaluate=_held_out,
            indexed=self.shards == "iid",
            pure=True,
        )

    def _batches(self, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        images, shown = _images(held_out=False)
        if self.shards == "iid":
            order = shuffled(len(shown), rank, ranks, batch, seed, used)
        else:
            order = draw_from_shard(_skewed(ranks, self.alpha, self.shard_seed), rank, batch, seed)
        return ((images[index], shown[index]) for index in order)


def network(width: int, hidden: int) -> nn.Module:
    """Returns a network `(B, 1, 8, 8)` float32 from 0 to 1 -> `(B, 10)` logits."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(2 * width * 16, hidden), nn.ReLU(), nn.Linear(hidden, 10),
    )  # fmt: skip


@cache
def _images(held_out: bool) -> tuple[Tensor, Tensor]:
    """Returns images `(n, 1, 8, 8)` float32 and their digits `(n,)` int64."""
    table = _table()
    mine = table[(torch.arange(len(table)) % EVERY == EVERY - 1) == held_out]
    return mine[:, :-1].reshape(-1, 1, 8, 8) / 16, mine[:, -1].long()


def _table() -> Tensor:
    """Returns `(1797, 65)` float32: 64 pixels from 0 to 16 and the digit.

    Reads the file, because importing scikit-learn would take each rank more than a second.
    """
    found = find_spec("sklearn")
    if found is None or not found.submodule_search_locations:
        raise TaskError("Digits reads the images that come with scikit-learn: pip install scikit-learn")
    path = Path(found.submodule_search_locations[0], "datasets", "data", "digits.csv.gz")
    if path.exists():
        return torch.tensor(np.loadtxt(path, delimiter=",", dtype=np.float32))
    from sklearn.datasets import load_digits

    pixels, shown = load_digits(return_X_y=True)
    return torch.tensor(np.column_stack([pixels, shown]), dtype=torch.float32)


@cache
def _skewed(ranks: int, alpha: float, seed: int) -> list[Tensor]:
    return dirichlet(_images(held_out=False)[1], ranks, alpha, seed)


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    images, shown = batch
    return F.cross_entropy(model(images), shown)


@torch.no_grad()
def _held_out(model: nn.Module) -> dict[str, float]:
    where = next(model.parameters()).device
    images, shown = (x.to(where) for x in _images(held_out=True))
    logits = model(images)
    right = (logits.argmax(1) == shown).float().mean()
    return {"loss": float(F.cross_entropy(logits, shown)), "accuracy": float(right)}
