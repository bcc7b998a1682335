"""Checks that `move` keeps all state bit-identical and sends the fewest bytes.

A walk makes 200 moves among random placements on one to six ranks, in the simulator with real tensors and with sizes.
Ranks join, leave and are lost. 20 of the moves also run on real ranks as threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tests.ranks import experiment, run
from tests.spread import DTYPES, RANKS, Step, least, order, reference, walk
from workbench import simulate
from workbench.host.placement.move_state import State, move_state
from workbench.rank import Bucket, Rank
from workbench.strategies import Strategy

MOVES, LIVE = 200, 20


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are bit-identical, including NaNs, and have one dtype."""
    return one.dtype == other.dtype and one.view(torch.uint8).equal(other.view(torch.uint8))


def check(step: Step, rank: int, state: State, true: dict[str, torch.Tensor]) -> None:
    """Checks that a rank has exactly its part of the whole after a move; with sizes only, the right count."""
    assert set(state) == set(step.to.slices_of_rank(rank))
    for name, mine in state.items():
        want = order(step.to, rank, name)
        assert mine.shape == (len(want),)
        assert mine.is_meta or alike(mine, true[name][want]), (rank, name)


@dataclass(frozen=True, kw_only=True)
class Walking(Strategy):
    """Makes the next move of a walk in each step, or refuses it if elements are lost. It does not train."""

    seed: int = 0
    moves: int = MOVES

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        device = params[0].data.device
        like = {name: torch.empty(0, dtype=kind, device=device) for name, kind in DTYPES.items()}
        true = {name: x.to(device) for name, x in reference(self.seed).items()}
        steps = walk(self.seed, self.moves)
        held = {
            name: true[name][order(steps[0].was, rank.index, name)] for name in steps[0].was.slices_of_rank(rank.index)
        }
        return {"walk": steps, "true": true, "like": like, "held": held}

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        step, like = state["walk"][rank.step], state["like"]
        held = {n: x.clone() for n, x in state["held"].items()} if rank.index in step.alive else {}
        if step.lost:
            with pytest.raises(LookupError, match="elements have no owner left"):
                await move_state(rank, held, step.was, step.to, step.alive, like)
            return
        state["held"] = await move_state(rank, held, step.was, step.to, step.alive, like)
        check(step, rank.index, state["held"], state["true"])


def walking(seed: int, moves: int) -> tuple[tuple[Step, ...], Any]:
    steps = walk(seed, moves)
    return steps, experiment(RANKS, len(steps), strategy=Walking(seed=seed, moves=moves), pace=1)


@pytest.mark.parametrize("real", [True, False])
def test_a_walk_of_200_moves_keeps_every_bit_and_sends_the_fewest_bytes(real: bool) -> None:
    steps, e = walking(11, MOVES)
    done = simulate(e, real=real)
    comm = done.spans[done.spans.lane == "comm"]
    assert set(comm.name) == {"all_to_allv move"}
    sent = comm.groupby("step").nbytes.sum()
    want = {i: 0 if step.lost else least(step) for i, step in enumerate(steps)}
    assert {i: int(sent.get(i, 0)) for i in want} == want
    assert comm.groupby(["step", "rank"]).size().max() == 1, "one exchange each"
    assert set(sent.index) == {i for i, n in want.items() if n}, "and none where nobody lacks anything"
    assert sum(not step.lost for step in steps) == MOVES and any(step.lost for step in steps)


def test_the_walk_has_ranks_that_join_leave_and_are_lost_and_placements_on_one_to_six() -> None:
    steps = [step for step in walk(11, MOVES) if not step.lost]
    assert {len(step.to.holding_ranks) for step in steps} == set(range(1, RANKS + 1))
    assert sum(bool({*step.to.holding_ranks} - {*step.was.holding_ranks}) for step in steps) > 50
    assert sum(bool({*step.was.holding_ranks} - {*step.to.holding_ranks}) for step in steps) > 50
    assert sum(bool({*step.was.holding_ranks} - {*step.alive}) for step in steps) > 20


@pytest.mark.ranks
def test_twenty_moves_on_real_ranks_send_the_same_and_keep_every_bit() -> None:
    steps, e = walking(11, LIVE)
    sessions = run(e.set("pace", 0))
    for i, step in enumerate(steps):
        sent = [n for s in sessions for at, _, n in s.record.comm() if at == i]
        assert sum(sent) == (0 if step.lost else least(step))
        assert len(sent) in (0, RANKS)
