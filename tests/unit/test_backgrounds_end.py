"""Tests that both hosts finish exchanges between backgrounds before a change."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from tests.ranks import experiment, live, run
from workbench import simulate
from workbench.fabric import Fabric, Link, Slow
from workbench.rank import Rank
from workbench.settings import Change, knob
from workbench.strategies import ShadowEASGD, Strategy
from workbench.strategies._average import average

pytestmark = pytest.mark.ranks

HOPS = 7  # passes of a message from rank to rank, each by a background
BEGUN: Counter[int] = Counter()  # by rank, chains that its step has begun
APART: list[int] = []  # the distance in steps of a pair's ranks, in each round
ENDED: Counter[int] = Counter()  # by rank, chains that have come back to it


@dataclass(frozen=True, kw_only=True)
class Chains(Strategy):
    """Each step begins a message that backgrounds pass from rank to rank until it is back at its origin."""

    every: int = knob(1, 1, 9, doc="something to turn")

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
        BEGUN[rank.index] += 1
        await rank.send(torch.tensor([rank.index, HOPS * rank.size]), rank.index, "chain")

    async def background(self, rank: Rank, state: Any) -> None:
        while (got := await rank.recv(torch.zeros(2, dtype=torch.int64), None, "chain")) is not None:
            begun_by, left = got[0].tolist()
            if left:
                await rank.send(torch.tensor([begun_by, left - 1]), (rank.index + 1) % rank.size, "chain")
            else:
                assert begun_by == rank.index
                ENDED[rank.index] += 1

    async def leave(self, rank: Rank, state: Any) -> None:
        await average(rank)


CHANGES = [Change(step, "strategy.every", 1 + step % 5) for step in (2, 5, 6, 9)] + [Change(11, "bucket_mb", 0.02)]


@pytest.mark.parametrize("virtual", [True, False], ids=["simulated", "engine"])
def test_a_chain_of_messages_between_backgrounds_ends_before_a_change(virtual: bool) -> None:
    BEGUN.clear(), ENDED.clear()
    link = Fabric(link=Link(bandwidth=1000.0, latency=1.0))
    e = experiment(3, 14, strategy=Chains(), pace=4.0, fabric=link)
    if virtual:
        simulate(e, changes=CHANGES, real=True)
    else:
        run(e, *CHANGES)
    assert ENDED == BEGUN and min(BEGUN.values()) > 5, "a rank that falls behind goes on with the step of the first"


class Kept(ShadowEASGD):
    """Counts begun and ended rounds, and given and taken centres."""

    async def _meet(self, rank: Rank, state: Any, step: int) -> None:
        BEGUN[rank.index] += 1
        await super()._meet(rank, state, step)
        ENDED[rank.index] += 1


@pytest.mark.parametrize("servers", [0, 1, 2])
def test_every_round_of_a_shadow_ends_with_its_centre(servers: int) -> None:
    BEGUN.clear(), ENDED.clear()
    e = experiment(4, 20, strategy=Kept(servers=servers), pace=3.0, fabric=Fabric(link=Link(bandwidth=100.0)))
    changes = [Change(step, "strategy.alpha", 0.2 + step / 50) for step in (3, 7, 8, 15)]
    run(e, *changes)
    assert ENDED == BEGUN and len(BEGUN) == 4 - servers


@dataclass(frozen=True, kw_only=True)
class Pairs(Strategy):
    """Neighbours' backgrounds make rounds together, independent of the other pair."""

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        return (("pair", size // 2), ("in", 2))

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()

    async def background(self, rank: Rank, state: Any) -> None:
        pair = rank.group("in")
        while step := await pair.again():
            BEGUN[rank.index] += 1
            steps = await pair.all_gather(torch.tensor([step]), "steps")
            APART.append(abs(int(steps[0] - steps[1])))

    async def leave(self, rank: Rank, state: Any) -> None:
        await average(rank)


@pytest.mark.parametrize("virtual", [True, False], ids=["simulated", "engine"])
def test_a_background_in_a_group_does_not_wait_for_other_groups(virtual: bool) -> None:
    BEGUN.clear()
    APART.clear()
    slow = tuple(Slow(rank=r, factor=8.0) for r in (2, 3))
    e = experiment(4, 24, strategy=Pairs(), pace=4.0, fabric=Fabric(faults=slow))
    changes = [Change(6, "lr", 0.01), Change(15, "bucket_mb", 0.02)]
    done = simulate(e, changes=changes, real=True) if virtual else run(e, *changes)
    if virtual:
        assert BEGUN[0] == 24, "a round for each step, of which the others make an eighth meanwhile"
        assert max(APART) < 3, "two of a pair are equally fast"
    else:
        assert all(s.rank.step == 24 for s in done) and min(BEGUN.values()) > 3
    assert BEGUN[0] == BEGUN[1] and BEGUN[2] == BEGUN[3]


@dataclass(frozen=True, kw_only=True)
class Misplaced(Pairs):
    """Calls in its step a verb that belongs in a background."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.group("in").again()


def test_again_outside_a_background_is_an_error_on_the_engine() -> None:
    sessions = live(experiment(2, 4, strategy=Misplaced()))
    for s in sessions:
        s.join(60)
    assert any("`again` belongs in a background" in s.error["text"] for s in sessions if s.error)
