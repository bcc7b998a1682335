"""Tests Hierarchical on real ranks: exact sums over equal and unequal sites, for any length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import experiment, run
from workbench.fabric import Fabric, Link
from workbench.fabric.algorithms import Hierarchical
from workbench.rank import Rank
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Counted(Strategy):
    """Sums integers of many lengths and dtypes in each step. A Sample counts wrong elements."""

    lockstep: ClassVar[bool] = True

    async def step(self, rank: Rank, state: Any) -> None:
        wrong = 0
        for n in (1, 2, 3, 7, 1001):
            for kind in (torch.float32, torch.int64):
                x = torch.arange(n, dtype=kind) * (rank.id + 1)
                await rank.all_reduce(x, name=f"{n} {kind}")
                wrong += int((x != torch.arange(n, dtype=kind) * (rank.size * (rank.size + 1) // 2)).sum())
        await rank.sample("wrong", wrong)


@pytest.mark.parametrize(("ranks", "site"), [(4, 2), (5, 3), (3, 2), (4, 3), (2, 1)])
def test_hierarchical_sums_are_exact_on_real_ranks_of_equal_and_unequal_sites(ranks: int, site: int) -> None:
    fabric = Fabric(link=Link(bandwidth=800.0, latency=0.1), site=site, algorithm=Hierarchical())
    for s in run(experiment(ranks, 2, strategy=Counted(), fabric=fabric)):
        assert [value for _, name, _, value in s.record.samples if name == "wrong"] == [0, 0]
        assert all(name.startswith("send ") for _, name, _ in s.record.comm())
