"""Tests which optimizers step each element by itself, so that shards may be stepped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import experiment, shipped, toy
from workbench import simulate
from workbench.optimizers import Optimizer, elementwise
from workbench.optimizers._slots import ELEMENTWISE
from workbench.rank import Rank, StrategyError
from workbench.strategies import Strategy

Maker = Callable[[list[Any]], torch.optim.Optimizer]
OURS = {name: lambda params, cls=cls: cls().make(params, 0.01, lambda lr: torch.optim.SGD(params, 0.01))
        for name, cls in shipped(Optimizer).items()}  # fmt: skip
TORCHS = {cls.__name__: lambda params, cls=cls: cls(params, lr=0.01) for cls in ELEMENTWISE}


def stepped(make: Maker, cuts: list[int]) -> torch.Tensor:
    """Returns one tensor after 5 steps with the same gradients, kept in pieces that end at `cuts`: (64,)."""
    rng = torch.Generator().manual_seed(1)
    start = torch.randn(64, 1, generator=rng)
    ends = [*cuts, 64]
    pieces = [nn.Parameter(start[a:b].clone()) for a, b in zip([0, *cuts], ends, strict=True)]
    optimizer = make(pieces)
    for _ in range(5):
        grad = torch.randn(64, 1, generator=rng)
        for piece, part in zip(pieces, grad.split([len(p) for p in pieces]), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return torch.cat([p.detach() for p in pieces]).view(-1)


@pytest.mark.parametrize("make", [*OURS.values(), *TORCHS.values()], ids=[*OURS, *TORCHS])
def test_optimizers_step_pieces_like_the_whole_exactly_if_they_claim_it(make: Maker) -> None:
    claimed = elementwise(make([nn.Parameter(torch.zeros(2, 1))]))
    assert torch.equal(stepped(make, []), stepped(make, [1, 40])) == claimed


def test_a_users_optimizer_claims_it_by_an_attribute() -> None:
    class Mine(torch.optim.SGD):
        pass

    class Cut(Mine):
        elementwise = True

    params = [nn.Parameter(torch.zeros(2))]
    assert not elementwise(Mine(params, lr=1.0)) and elementwise(Cut(params, lr=1.0))


@dataclass(frozen=True, kw_only=True)
class Sharded(Strategy):
    """Every rank steps its shard of each bucket."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        async for bucket in rank.backward():
            await rank.update(bucket.shard(rank.index, rank.size))


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
def test_other_optimizers_refuse_a_shard(optimizer: str) -> None:
    e = experiment(2, 3, task=toy(), strategy=Sharded(), pace=5).set("optimizer", optimizer)
    with pytest.raises(StrategyError, match="not known to step each element by itself; use SGD, Adam or AdamW"):
        simulate(e)


def test_adamw_steps_a_shard() -> None:
    e = experiment(2, 3, task=toy(), strategy=Sharded(), pace=5).set("optimizer", "AdamW")
    assert simulate(e).state == "done"
