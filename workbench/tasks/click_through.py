"""Clicks on advertisements that were never shown: drawn from a planted model, so that the best loss is known."""

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

HELD_OUT = 8192  # examples that the held-out loss is taken over
FACTORS = 4  # numbers by whose products an id of one field and one of the next act together


@dataclass(frozen=True, kw_only=True)
class ClickThrough(TaskBase):
    """Embeddings and a small network that predict clicks drawn from a planted model, whose best loss is known.

        chance of a click = sigmoid(bias + sum_f a_f[id_f] + sum_f <v_f[id_f], v_(f+1)[id_(f+1)]> + <w, numbers>)

    A batch touches few rows of the large tables, so almost all of a gradient is zero, as in recommenders: see Zen.
    In each field the j-th id comes with a probability in proportion to j^-skew, so ranks have the frequent ids in
    common, and those lie side by side. Examples are drawn as they are asked for, on each rank others, and none comes
    twice, so nothing is learned by heart.

    The held-out loss is the mean over 8192 examples of the cross-entropy against their planted chances, so no luck in
    drawing clicks is in it; "entropy" is its least possible value, that of the planted model itself, and what lies
    between them is the mean divergence from the truth. It begins at log 2 = 0.693. "normalised entropy" is the loss in
    parts of what it would be if all that was known were how many click: below 1 something else has been learned (He et
    al., "Practical Lessons from Predicting Clicks on Ads at Facebook", 2014, https://doi.org/10.1145/2648584.2648589).
    "auc" is how often a drawn click scores above a drawn non-click.

    With `shards` = "ids" each rank sees ids of the first field that no other sees, with probabilities that add up to
    about the same on each; the most frequent may be more than an even share, and the rank that has it little else.

    When to use it: for sparse gradients (Zen, Hogwild), and to know how far a loss is from the best there can be.

    Reference: Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation Systems",
    2019, https://arxiv.org/abs/1906.00091
    """

    fields: int = knob(8, 1, 64, live=False, doc="categorical features, each with a table of its own")
    ids: int = knob(8000, 2, 10_000_000, log=True, live=False, doc="rows of each table")
    numbers: int = knob(4, 0, 64, live=False, doc="numeric features")
    width: int = knob(16, 1, 512, live=False, doc="features of an embedding")
    hidden: int = knob(64, 1, 4096, live=False, doc="features of each hidden layer")
    skew: float = knob(1.1, 0.0, 3.0, live=False, doc="how much rarer later ids are; 0: all are as frequent")
    world: int = knob(0, 0, 2**31 - 1, live=False, doc="seed of the planted model")

    shards: str = knob("iid", choices=("iid", "ids"), live=False, doc="do ranks see all first ids, or each its own")

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
        first = world.frequency if self.shards == "iid" else dealt_ids(world.frequency, ranks, rank)
        below = first.cumsum(0)
        about = f"{seed}/{rank}/{ranks}" + (f"/{used}" if used else "")
        generator = torch.Generator().manual_seed(zlib.crc32(about.encode()))
        while True:
            ids, numbers = world.draw(batch, generator, below)
            yield ids, numbers, torch.bernoulli(world.chance(ids, numbers), generator=generator)


class About(NamedTuple):
    """What a planted model depends on."""

    fields: int
    ids: int
    numbers: int
    skew: float
    seed: int


class World(NamedTuple):
    """A planted model.

    frequency: of the ids of a field, (ids,) float64; below: their running sum
    alone:     what each id adds to the log odds, (fields, ids)
    factors:   by whose products with the next field's ids act together, (fields, ids, FACTORS)
    weights:   of the numbers, (numbers,)
    bias:      the log odds without all that
    """

    frequency: Tensor
    below: Tensor
    alone: Tensor
    factors: Tensor
    weights: Tensor
    bias: float = -1.0

    def draw(self, n: int, generator: torch.Generator, below: Tensor) -> tuple[Tensor, Tensor]:
        """n examples, the first field by frequencies that sum to `below`: (n, fields) int64, (n, numbers) float32."""
        fields, ids = self.alone.shape
        u = torch.rand(fields, n, generator=generator, dtype=torch.float64)
        drawn = torch.searchsorted(self.below, u)
        drawn[0] = torch.searchsorted(below, u[0] * below[-1])
        return drawn.clamp_(max=ids - 1).T.contiguous(), torch.randn(n, len(self.weights), generator=generator)

    def chance(self, ids: Tensor, numbers: Tensor) -> Tensor:
        """(n, fields) int64 and (n, numbers) float32 -> chances of a click, (n,) float32."""
        field = torch.arange(ids.shape[1])
        v = self.factors[field, ids]
        both = (v[:, :-1] * v[:, 1:]).sum((1, 2))
        return torch.sigmoid(self.bias + self.alone[field, ids].sum(1) + both + numbers @ self.weights)


@cache
def planted(about: About) -> World:
    """The planted model of these settings; with the usual ones its log odds vary by about 1.5 among examples."""
    generator = torch.Generator().manual_seed(about.seed)
    frequency = torch.arange(1, about.ids + 1, dtype=torch.float64) ** -about.skew
    frequency /= frequency.sum()
    alone = 0.45 * torch.randn(about.fields, about.ids, generator=generator)
    factors = 0.35 * torch.randn(about.fields, about.ids, FACTORS, generator=generator)
    weights = 0.3 * torch.randn(about.numbers, generator=generator)
    return World(frequency, frequency.cumsum(0), alone, factors, weights)


def dealt_ids(frequency: Tensor, ranks: int, rank: int) -> Tensor:
    """The frequencies of the ids that belong to `rank`, zero elsewhere: each goes to whoever has least so far."""
    n = len(frequency)
    if n < ranks:
        raise TaskError(f"ids={n}: cannot be dealt to {ranks} ranks; take at most {n} ranks, or shards='iid'")
    loads, mine = [(0.0, r) for r in range(ranks)], torch.zeros_like(frequency)
    for place, share in enumerate(frequency.tolist()):
        load, least = loads[0]
        heapq.heapreplace(loads, (load + share, least))
        if least == rank:
            mine[place] = share
    return mine


class HeldOut(NamedTuple):
    """Held-out examples, their chances of a click, clicks drawn by them, and the loss of whoever knows the chances."""

    ids: Tensor
    numbers: Tensor
    chance: Tensor
    clicked: Tensor
    entropy: float


@cache
def held_out(about: About) -> HeldOut:
    """The same examples for every model of these settings; no rank trains on them."""
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
