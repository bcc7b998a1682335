"""Checks that a deadlock at a meeting names the waiting ranks and the ranks that do not come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from tests.sim.virtual import paced
from workbench import Deadlock, simulate
from workbench.rank import Group, Op, Rank
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class RankZeroMeetsNobody(Strategy):
    """Rank 0 waits to agree with the ranks of `group`, but no other rank comes."""

    group: Group | None = None

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
        if rank.index == 0:
            meeting = Op("together", "agree", 0, lambda each: each, 0.0)
            meeting.group = self.group
            await meeting


@pytest.mark.parametrize(
    ("group", "gone"), [(None, "ranks 1, 2, 3"), (Group(("dp",), (0, 2)), "rank 2")], ids=["all ranks", "a group"]
)
def test_a_deadlock_names_the_ranks_that_do_not_come_to_a_meeting(group: Group | None, gone: str) -> None:
    with pytest.raises(Deadlock) as said:
        simulate(paced(4, 1, strategy=RankZeroMeetsNobody(group=group)))
    assert f"\n  rank 0 waits to agree together with {gone}\n" in str(said.value)
