"""Tests placements: which rank holds which elements, nested placements, and refusals."""

from __future__ import annotations

import pickle
import re

import pytest
import torch

from tests.spread import order
from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice
from workbench.rank import Bucket, Part

SIZES = {"b": 10, "a": 6, "c": 1}  # in order of use


def by_rank(placement: Placement, name: str) -> dict[int, list[int]]:
    """Returns the elements of one tensor by rank, in the order of each rank's memory."""
    return {r: order(placement, r, name) for r in placement.holding_ranks if name in placement.slices_of_rank(r)}


def test_replicas_hold_everything() -> None:
    placement = Placement.place_whole(SIZES, [4, 2])
    assert placement.holding_ranks == [2, 4] and placement.slices_of_rank(3) == {}
    assert by_rank(placement, "a") == {2: [*range(6)], 4: [*range(6)]}
    assert [placement.count_elements(2), placement.count_elements(2, "b"), placement.count_elements(3)] == [17, 10, 0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 20])
def test_shards_are_those_of_one_bucket_with_the_tensors_in_order_of_use(ranks: int) -> None:
    placement = Placement.sharded(SIZES, range(ranks))
    parts = (Part("b", (10,), 0, 10), Part("a", (6,), 10, 16), Part("c", (1,), 16, 17))
    bucket = Bucket(0, torch.zeros(17), parts, 0)
    for r in range(ranks):
        shard = bucket.shard(r, ranks)
        assert {n: placement.count_elements(r, n) for n in placement.slices_of_rank(r)} == {
            p.name: p.stop - p.start for p in shard.parts
        }


def test_shares_are_split_by_element_without_padding() -> None:
    even = Placement.sharded({"w": 10}, range(4), shares=(1, 1, 1, 1))
    assert [even.count_elements(r) for r in range(4)] == [2, 3, 2, 3]
    uneven = Placement.sharded(SIZES, range(3), shares=(3, 0, 1))
    assert [uneven.count_elements(r) for r in range(3)] == [12, 0, 5]
    assert uneven.slices_of_rank(0) == {"b": (StridedSlice(0, 10),), "a": (StridedSlice(0, 2),)}


def test_a_pipeline_places_layers_in_stages_and_may_put_several_on_a_rank() -> None:
    tied = Placement.place_layers({"in": 4, "x": 5, "y": 6}, [0, 1], [["in"], ["x"], ["y"], ["in"]])
    assert {r: set(tied.slices_of_rank(r)) for r in tied.holding_ranks} == {0: {"in", "y"}, 1: {"x", "in"}}


def test_a_split_along_any_dimension_equals_torchs_tensor_split() -> None:
    x = torch.arange(3 * 4 * 10)
    for shape, dim in [((12, 10), 0), ((12, 10), 1), ((12, 10), -1), ((3, 4, 10), 1), ((2, 3, 20), 2), ((120,), 0)]:
        placement = Placement.place_slices({"w": shape}, [7, 5, 6], dim)
        for rank, want in zip([7, 5, 6], x.view(shape).tensor_split(3, dim), strict=True):
            if shape[dim] % 3 == 0:
                assert order(placement, rank, "w") == want.flatten().tolist()
            assert len(placement.slices_of_rank(rank)["w"]) == 1, "one slice, also of a fused qkv"
        assert sum(placement.count_elements(r) for r in placement.holding_ranks) == 120


def test_an_uneven_split_is_as_even_as_possible() -> None:
    assert [Placement.place_slices({"w": (7, 2)}, range(3), 0).count_elements(r) for r in range(3)] == [4, 4, 6]
    assert Placement.place_slices({"w": (1, 2)}, range(3), 0).holding_ranks == [2]


def test_placements_nest() -> None:
    stages = Placement.place_layers({"a": 6, "b": 4}, [0, 1], [["a"], ["b"]])
    replicas = stages.copy_to_groups({0: [0, 2], 1: [1, 3]})
    assert by_rank(replicas, "a") == {0: [*range(6)], 2: [*range(6)]}
    shards = stages.shard_to_groups({0: [0, 2], 1: [1, 3]})  # ZeRO inside the stages
    assert by_rank(shards, "b") == {1: [0, 1], 3: [2, 3]}
    hybrid = Placement.sharded({"a": 6}, [0, 1]).copy_to_groups({0: [0, 2], 1: [1, 3]})  # HSDP
    assert by_rank(hybrid, "a") == {0: [0, 1, 2], 1: [3, 4, 5], 2: [0, 1, 2], 3: [3, 4, 5]}
    tensor = Placement.place_slices({"a": (2, 3)}, [1], 1) | Placement.place_slices(
        {"b": (2, 2)}, [2, 3], 1
    )  # inside stages
    assert by_rank(tensor, "b") == {2: [0, 2], 3: [1, 3]}
    both = Placement.place_slices({"w": (4, 4)}, [0, 1], 1).shard_to_groups({0: [0, 2], 1: [1, 3]})  # ZeRO of columns
    assert by_rank(both, "w") == {0: [0, 1, 4, 5], 2: [8, 9, 12, 13], 1: [2, 3, 6, 7], 3: [10, 11, 14, 15]}
    assert by_rank(stages.copy_to_groups({1: [1, 5]}), "a") == {0: [*range(6)]}, (
        "who is in no group keeps what it holds"
    )


def test_moments_may_be_placed_unlike_parameters() -> None:
    zero_one = Placement.place_whole({"w": 8}, range(2)) | Placement.sharded({"exp_avg/w": 8}, range(2))
    assert [zero_one.count_elements(r, "w") for r in range(2)] == [8, 8]
    assert by_rank(zero_one, "exp_avg/w") == {0: [0, 1, 2, 3], 1: [4, 5, 6, 7]}


def test_joined_replicas_hold_common_elements_once() -> None:
    assert Placement.place_whole(SIZES, [0, 1]) | Placement.place_whole(SIZES, [1, 2]) == Placement.place_whole(
        SIZES, range(3)
    )


def test_placements_are_values() -> None:
    one, other = Placement.place_whole(SIZES, [0, 1]), Placement.place_whole(dict(reversed(SIZES.items())), [1, 0])
    assert one == other and hash(one) == hash(other) and one != Placement.sharded(SIZES, [0, 1])
    assert Placement.sharded({"w": 6}, [3]) == Placement.place_whole({"w": 6}, [3]), "slices have one form"
    assert Placement.place_slices({"w": (3, 2)}, [3], 1) == Placement.place_whole({"w": 6}, [3])
    assert pickle.loads(pickle.dumps(one)) == one


@pytest.mark.parametrize(
    ("sizes", "held", "said"),
    [
        (
            {"w": 10},
            {0: {"w": (StridedSlice(0, 4),)}},
            "w: 6 elements have no rank; give them to one, or remove the tensor",
        ),
        ({"w": 10}, {}, "w: 10 elements have no rank"),
        (
            {"w": 4},
            {0: {"w": (StridedSlice(0, 4),), "v": (StridedSlice(0, 1),)}},
            "rank 0 holds 'v', which has no size; add it to",
        ),
        ({"w": 4}, {3: {"w": (StridedSlice(0, 5),)}}, "rank 3 holds elements 0 to 5 of w, which has 4"),
        ({"w": 9}, {3: {"w": (StridedSlice(-1, 5),)}}, "rank 3 holds elements -1 to 4 of w, which has 9"),
        (
            {"w": 4},
            {1: {"w": (StridedSlice(0, 3), StridedSlice(1, 3))}},
            "rank 1 holds 2 elements of w twice; its slices must not",
        ),
        ({"w": 9}, {1: {"w": (StridedSlice(0, 3, 2, 3),)}}, "a stretch is longer than the stride; take a stride of 3"),
    ],
)
def test_an_invalid_placement_raises_value_error(sizes: dict, held: dict, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        Placement(sizes, held)


def test_conflicting_sizes_and_wrong_numbers_of_shares_raise_value_error() -> None:
    with pytest.raises(ValueError, match="a has 6 elements in one and 7 in the other; a name stands for one tensor"):
        Placement.place_whole({"a": 6}, [0]) | Placement.place_whole({"a": 7}, [1])
    with pytest.raises(ValueError, match="2 shares for 3 ranks; give one number for each"):
        Placement.sharded({"a": 6}, range(3), shares=(1, 2))
