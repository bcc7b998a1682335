"""Tests `move` on a few ranks, collective by collective: its result, its participants, its refusals."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import together
from workbench.host.placement.move_state import State, move_state
from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice
from workbench.rank import Op, Rank

SHAPES = {"a": (4, 6), "b": (5, 3)}
SIZES = {"a": 24, "b": 15}
LIKE = {name: torch.empty(0) for name in SIZES}
TRUE = {"a": torch.arange(24.0), "b": torch.arange(100.0, 115.0)}


def everywhere(states: list[Any], was: Placement, to: Placement, alive: Any = range(6), like: Any = LIKE,
               members: Any = (), seen: list[Op] | None = None) -> list[State]:  # fmt: skip
    """Returns each rank's state after a move that all ranks request."""
    asked = [move_state(Rank(i, len(states)), state, was, to, alive, like, members) for i, state in enumerate(states)]
    try:
        return together(asked, seen)
    finally:
        for coro in asked:
            coro.close()


WHOLE = Placement.place_whole(SIZES, range(2))
ZERO = Placement.sharded(SIZES, range(2))


def test_a_shard_has_its_own_memory_and_a_move_without_missing_elements_sends_nothing() -> None:
    seen: list[Op] = []
    states = everywhere([TRUE, TRUE], WHOLE, ZERO, seen=seen)
    assert seen == []
    assert [[x.untyped_storage().nbytes() for x in s.values()] for s in states] == [[80], [16, 60]]
    assert torch.cat([x for s in states for x in s.values()]).equal(torch.cat([*TRUE.values()]))


def test_one_exchange_carries_the_whole_move() -> None:
    seen: list[Op] = []
    states = everywhere(everywhere([TRUE, TRUE], WHOLE, ZERO), ZERO, WHOLE, seen=seen)
    assert [(op.verb, op.args[2], op.args[1]) for op in seen] == [("all_to_allv", "move", ((0, 80), (76, 0)))]
    for state in states:
        assert all(state[name].equal(x) for name, x in TRUE.items())


def test_a_tensor_with_unchanged_slices_is_returned_itself() -> None:
    other = Placement.place_whole({"a": 24}, range(2)) | Placement.sharded({"b": 15}, range(2))
    state = everywhere([TRUE, TRUE], WHOLE, other)[1]
    assert state["a"] is TRUE["a"] and state["b"].tolist() == [*range(108, 115)]


def test_parameters_may_have_any_shape_and_need_gradients() -> None:
    weight = nn.Parameter(TRUE["a"].view(6, 4).t())  # not even contiguous
    columns = Placement.place_slices({"a": (4, 6)}, range(3), 1)
    states = everywhere([{"a": weight}, {}, {}], Placement.place_whole({"a": 24}, [0]), columns)
    for k, state in enumerate(states):
        assert state["a"].view(4, 2).equal(weight.detach()[:, 2 * k : 2 * k + 2]) and not state["a"].requires_grad


def test_a_joining_rank_begins_empty_and_a_leaving_rank_ends_empty() -> None:
    was, to = Placement.place_whole(SIZES, [0, 1]), Placement.place_whole(SIZES, [1, 2])
    states = everywhere([TRUE, TRUE, {}], was, to)
    assert states[0] == {} and states[1]["a"] is TRUE["a"] and states[2]["b"].equal(TRUE["b"])


def test_a_replaced_rank_takes_part_and_receives_all_its_state() -> None:
    broken = {name: torch.full_like(x, torch.nan) for name, x in TRUE.items()}
    states = everywhere([broken, TRUE], WHOLE, WHOLE, alive=[1])
    assert all(s["a"].equal(TRUE["a"]) and s["b"].equal(TRUE["b"]) for s in states)


def test_placements_use_the_runs_rank_numbers_within_a_group() -> None:
    was, to = Placement.place_whole(SIZES, [7]), Placement.sharded(SIZES, [3, 7])
    states = everywhere([TRUE, {}], was, to, alive=[7], members=(7, 3))
    assert states[1]["a"].tolist() == [*range(20)] and list(states[0]) == ["a", "b"]
    with pytest.raises(ValueError, match=re.escape("rank 3 must send or receive, but is not in the group of [7, 4]")):
        everywhere([TRUE, {}], was, to, alive=[7], members=(7, 4))


def test_one_rank_alone_moves_within_itself() -> None:
    was = Placement.place_slices({"a": (4, 6)}, [0], 1)
    assert everywhere([TRUE], WHOLE, Placement.sharded(SIZES, [0]))[0]["b"] is TRUE["b"]
    assert everywhere([{"a": TRUE["a"]}], was, was)[0]["a"] is TRUE["a"]


@pytest.mark.parametrize(
    ("state", "like", "said"),
    [
        ({"a": TRUE["a"]}, LIKE, "by the placement rank 0 has 15 elements of b, and it is not in its state"),
        ({**TRUE, "b": torch.ones(4)}, LIKE, "by the placement rank 0 has 15 elements of b, and 4 of them"),
        ({**TRUE, "b": TRUE["b"].double()}, LIKE, "b is torch.float64 on rank 0 and torch.float32 in `like`"),
        (TRUE, {"a": LIKE["a"]}, "b has no dtype; add it to `like`"),
    ],
)  # fmt: skip
def test_a_state_that_contradicts_its_placement_raises_value_error(state: Any, like: Any, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"move: {said}")):
        everywhere([state, TRUE], WHOLE, ZERO, like=like)


def test_a_move_with_lost_elements_raises_before_any_rank_sends() -> None:
    seen: list[Op] = []
    with pytest.raises(LookupError, match="a: 20 elements have no owner left"):
        everywhere([{}, {}], ZERO, WHOLE, alive=[1], seen=seen)
    assert seen == []


def test_dtypes_of_every_width_are_aligned_in_one_buffer() -> None:
    kinds = {"a": torch.bool, "b": torch.complex128, "c": torch.bfloat16, "d": torch.float64, "e": torch.int32}
    like = {name: torch.empty(0, dtype=kind) for name, kind in kinds.items()}
    sizes = dict.fromkeys(kinds, 7)
    true = {name: torch.arange(7).to(kind) for name, kind in kinds.items()}
    was, to = Placement.place_whole(sizes, [0]), Placement.sharded(sizes, [0, 1, 2])
    states = everywhere([true, {}, {}], was, to, like=like)
    for name, x in true.items():
        assert torch.cat([s[name] for s in states if name in s]).equal(x)


def test_several_slices_of_one_tensor_are_concatenated() -> None:
    first = Placement(
        {"a": 24},
        {
            0: {"a": (StridedSlice(12, 6), StridedSlice(1, 1, 6, 2))},
            1: {"a": (StridedSlice(18, 6), StridedSlice(0, 12))},
        },
    )
    other = Placement(
        {"a": 24},
        {1: {"a": (StridedSlice(20, 4), StridedSlice(0, 6))}, 0: {"a": (StridedSlice(6, 14), StridedSlice(0, 5))}},
    )
    states = everywhere([TRUE, {}], Placement.place_whole({"a": 24}, [0]), first)
    assert states[0]["a"].tolist() == [*range(12, 18), 1, 7]
    assert states[1]["a"].tolist() == [*range(18, 24), *range(12)]
    states = everywhere(states, first, other)
    assert states[0]["a"].tolist() == [*range(6, 20), *range(5)]
    assert states[1]["a"].tolist() == [*range(20, 24), *range(6)]


def test_received_rows_in_one_buffer_may_begin_anywhere() -> None:
    like = {"a": torch.empty(0, dtype=torch.float64), "b": torch.empty(0, dtype=torch.bool)}
    was = Placement.place_whole({"b": 15}, [0]) | Placement.place_whole({"a": 24}, [1])
    asked = move_state(Rank(2, 3), {}, was, Placement.place_whole(SIZES, [2]), range(3), like)
    op = asked.send(None)
    assert op.args[1] == ((0, 0, 15), (0, 0, 24 * 8), (0, 0, 0))
    came = torch.cat([torch.ones(15, dtype=torch.uint8), TRUE["a"].double().view(torch.uint8)])
    with pytest.raises(StopIteration) as over:
        asked.send(came.split([15, 192, 0]))
    assert over.value.value["a"].equal(TRUE["a"].double()) and over.value.value["b"].all()
