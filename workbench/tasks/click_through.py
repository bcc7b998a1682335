"""Synthetic clicks on advertisements from a planted model with a known best loss."""

from __future__ import annotations

import heapq
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from workbench.settings import knob
from workbench.tasks._base import Learner, TaskBase, TaskError
from workbench.tasks._clicks import Batch, ClickNet, auc, log_loss, lookups, of_rate

HELD_OUT = 8192  # examples of an evaluation
FACTORS = 4  # length of an id's vector; neighbouring fields' ids interact by the product


@dataclass(frozen=True, kw_only=True)
class ClickThrough(TaskBase):
    """Embeddings and a small network that predict clicks from a planted model with a known best loss.

        chance of a click = sigmoid(bias + sum_f a_f[id_f] + sum_f <v_f[id_f], v_(f+1)[id_(f+1)]> + <w, numbers>)

    A batch reads few rows of the large tables, so almost all of a gradient is zero. Recommenders are alike: see Zen. In
    each field the j-th id has a probability in proportion to j^-skew. So ranks share the frequent ids, in neighbouring
    rows. Each rank draws its own examples, each only once. So the model cannot memorise them.

    The held-out loss is the mean cross-entropy of 8192 examples against their planted chances, without the noise of
    drawn clicks. "entropy" is its minimum, the planted model's own loss. The difference is the mean divergence from the
    truth. The loss begins at log 2 = 0.693. "normalised entropy" is the loss divided by the entropy of the mean click
    rate. Below 1 the model knows more than this rate (He et al., "Practical Lessons from Predicting Clicks on Ads at
    Facebook", 2014, https://doi.org/10.1145/2648584.2648589). "auc" is how often a drawn click scores above a drawn
    non-click.

    With `shards` = "ids" no two ranks see the same ids of the first field. The ids' probabilities add up to about the
    same on each rank. If the most frequent id exceeds an even share, its rank gets few other ids.

    When to use it: for sparse gradients (Zen, Hogwild) or to compare a loss with the best possible one.

    Reference: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems", 2019,
    https://arxiv.org/abs/1906.00091
    """

    fields: int = knob(8, 1, 64, live=False, doc="categorical features, each with its own table")
    ids: int = knob(8000, 2, 10_000_000, log=True, live=False, doc="rows of each table")
    numbers: int = knob(4, 0, 64, live=False, doc="numeric features")
    width: int = knob(16, 1, 512, live=False, doc="features of an embedding")
    hidden: int = knob(64, 1, 4096, live=False, doc="features of each hidden layer")
    skew: float = knob(1.1, 0.0, 3.0, live=False, doc="how much rarer later ids are; 0: all are equally frequent")
    world: int = knob(0, 0, 2**31 - 1, live=False, doc="seed of the planted model")

    shards: str = knob("iid", choices=("iid", "ids"), live=False, doc="ranks see all first ids (iid), or each its own")

    lr: ClassVar[float] = 2e-3
    batch: ClassVar[int] = 64
    looks_up: ClassVar[bool] = True

    def build(self) -> Learner:
        return Learner(
            model=lambda: ClickNet(self.fields, self.ids, self.numbers, self.width, self.hidden),
            data=self._batches,
            loss=log_loss,
            optimizer=lambda params, lr: torch.optim.Adam(params, lr),
            evaluate=partial(_evaluated, self._about),
            lookups=lookups,
            indexed=True,
            pure=True,
        )

    @property
    def _about(self) -> About:
        return About(self.fields, self.ids, self.numbers, self.skew, self.world)

    def _batches(self, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[Batch]:
        world = planted(self._about)
        first = world.frequency if self.shards == "iid" else shard_ids(world.frequency, ranks, rank)
        below = first.cumsum(0)
        about = f"{seed}/{rank}/{ranks}" + (f"/{used}" if used else "")
        generator = torch.Generator().manual_seed(zlib.crc32(about.encode()))
        while True:
            ids, numbers = world.draw(batch, generator, below)
            yield ids, numbers, torch.bernoulli(world.chance(ids, numbers), generator=generator)


class About(NamedTuple):
    """The settings of a planted model."""

    fields: int
    ids: int
    numbers: int
    skew: float
    seed: int


class World(NamedTuple):
    """A planted model.

    frequency: of a field's ids, `(ids,)` float64; below: their running sum
    alone:     each id's own addition to the log odds, `(fields, ids)`
    factors:   each id's vector, multiplied with that of the next field's id, `(fields, ids, FACTORS)`
    weights:   of the numbers, `(numbers,)`
    bias:      the constant part of the log odds
    """

    frequency: Tensor
    below: Tensor
    alone: Tensor
    factors: Tensor
    weights: Tensor
    bias: float = -1.0

    def draw(self, n: int, generator: torch.Generator, below: Tensor) -> tuple[Tensor, Tensor]:
        """Draws n examples: `(n, fields)` int64 and `(n, numbers)` float32. below: the first field's running sum"""
        fields, ids = self.alone.shape
        u = torch.rand(fields, n, generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(self.below, u)
        drawn[0] = torch.searchsorted(below, u[0] * below[-1])
        return drawn.clamp_(max=ids - 1).T.contiguous(), torch.randn(n, len(self.weights), generator=generator)

    def chance(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """`(n, fields)` int64 and `(n, numbers)` float32 -> chances of a click, `(n,)` float32."""
        field = torch.arange(ids.shape[1])
        v = self.factors[field, ids]
        both = (v[:, :-1] * v[:, 1:]).sum((1, 2))
        return torch.sigmoid(self.bias + self.alone[field, ids].sum(1) + both + numbers @ self.weights)


@cache
def planted(about: About) -> World:
    """Returns the planted model. By default the log odds vary by about 1.5 among examples."""
    generator = torch.Generator().manual_seed(about.seed)
    frequency = torch.arange(1, about.ids + 1, dtype=torch.float64) ** -about.skew
    frequency /= frequency.sum()
    alone = 0.45 * torch.randn(about.fields, about.ids, generator=generator)
    factors = 0.35 * torch.randn(about.fields, about.ids, FACTORS, generator=generator)
    weights = 0.3 * torch.randn(about.numbers, generator=generator)
    return World(frequency, frequency.cumsum(0), alone, factors, weights)


def shard_ids(frequency: Tensor, ranks: int, rank: int) -> Tensor:
    """Returns the frequencies of the ids of `rank`, zero elsewhere. Each id goes to the rank with the least so far."""
    n = len(frequency)
    if n < ranks:
        raise TaskError(f"ids={n}: too few for {ranks} ranks; take at most {n} ranks or shards='iid'")
    loads, mine = [(0.0, r) for r in range(ranks)], torch.zeros_like(frequency)
    for place, share in enumerate(frequency.tolist()):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + share, least))
        if least == rank:
            mine[place] = share
    return mine


class HeldOut(NamedTuple):
    """Held-out examples: chances of a click, drawn clicks and the planted model's loss."""

    ids: Tensor
    numbers: Tensor
    chance: Tensor
    clicked: Tensor
    entropy: float


@cache
def held_out(about: About) -> HeldOut:
    """Returns the same examples for every model of these settings. No rank trains on them."""
    world = planted(about)
    generator = torch.Generator().manual_seed(zlib.crc32(f"held out of {about.seed}".encode()))
    ids, numbers = world.draw(HELD_OUT, generator, world.below)
    chance = world.chance(ids, numbers)
    entropy = F.binary_cross_entropy(chance.double(), chance.double())
    return HeldOut(ids, numbers, chance, torch.bernoulli(chance, generator=generator), float(entropy))


@torch.no_grad()
def _evaluated(about: About, model: nn.Module) -> dict[str, float]:
    held = held_out(about)
    where = next(model.parameters()).device
    odds = model(held.ids.to(where), held.numbers.to(where)).cpu().double()
    loss = F.binary_cross_entropy_with_logits(odds, held.chance.double())
    return {
        "loss": float(loss), "auc": auc(odds, held.clicked), "entropy": held.entropy,
        "normalised entropy": float(loss) / of_rate(float(held.chance.double().mean())),
    }  # fmt: skip
