"""Tests the plan of a move: the fewest bytes, evenly from their owners, and the same plan on every rank."""

from __future__ import annotations

import random
import re
import time
import tracemalloc
from itertools import combinations

import numpy as np
import pytest

from tests.spread import RANKS, SIZES, WIDTHS, Step, demands, elements, has, held, least, placement, walk
from workbench.host.placement.placement import Placement
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.placement.transfer_plan import level_loads, plan_transfers

STEPS = [step for seed in range(2) for step in walk(seed, 40) if not step.lost]


def moved(was: Placement, to: Placement, width: int = 1, alive: range = range(6)) -> float:
    """Returns the sent elements of a move, relative to the model."""
    return (
        sum(plan_transfers(was, to, alive, dict.fromkeys(to.sizes, width)).nbytes.values())
        / sum(to.sizes.values())
        / width
    )


def test_only_missing_elements_are_sent_once_each_by_an_owner() -> None:
    for step in STEPS:
        todo = plan_transfers(step.was, step.to, step.alive, WIDTHS)
        got = {(r, n): np.zeros(size, dtype=int) for r in range(RANKS) for n, size in SIZES.items()}
        for t in todo.all_transfers:
            assert t.source != t.to
            assert has(step, t.source, t.name)[elements(t.slice)].all()
            got[t.to, t.name][elements(t.slice)] += 1
        for (r, n), times in got.items():
            assert (times == (held(step.to, r, n) & ~has(step, r, n))).all()
        assert sum(todo.nbytes.values()) == least(step) == sum(todo.count_sent_bytes(r) for r in range(RANKS))


def optimum(step: Step) -> float:
    """Returns the smallest possible maximum of a sender: the largest load that some set of owners must send alone."""
    wanted = {owners: sum(widths) for owners, widths in demands(step).items()}
    groups = (set(g) for n in range(1, RANKS + 1) for g in combinations(range(RANKS), n))
    return max(sum(n for owners, n in wanted.items() if group >= {*owners}) / len(group) for group in groups)


def greedy(step: Step) -> int:
    """Returns the largest sender's load if each element comes from the least loaded owner, fewest owners first."""
    sent = dict.fromkeys(range(RANKS), 0)
    wanted = demands(step)
    for owners in sorted(wanted, key=lambda group: (len(group), group)):
        for width in wanted[owners]:
            sent[min(owners, key=sent.__getitem__)] += width
    return max(sent.values())


def test_the_choice_of_senders_is_optimal_up_to_one_element() -> None:
    nested, slack = 0, max(WIDTHS.values()) + 1
    for step in STEPS:
        todo, wanted = plan_transfers(step.was, step.to, step.alive, WIDTHS), demands(step)
        fullest = max(todo.count_sent_bytes(r) for r in range(RANKS))
        assert fullest <= greedy(step) + slack
        if all({*a} <= {*b} or {*b} <= {*a} or not {*a} & {*b} for a, b in combinations(wanted, 2)):
            nested += bool(wanted)
            assert fullest <= optimum(step) + slack
    assert nested > len(STEPS) / 2


def test_a_joining_rank_takes_equally_from_each_replica() -> None:
    sizes = {"large": 1000, "small": 7}
    todo = plan_transfers(
        Placement.place_whole(sizes, range(3)),
        Placement.place_whole(sizes, range(4)),
        range(4),
        {"large": 4, "small": 8},
    )
    sent = [todo.count_sent_bytes(r) for r in range(4)]
    assert sum(sent) == 4056 and sent[3] == 0 and max(sent) - min(sent[:3]) <= 8
    assert len(todo.all_transfers) == 4, "cut no more often than there are owners"


def test_loads_are_levelled() -> None:
    rng = random.Random(1)
    for _ in range(300):
        loads, amount = [rng.randint(0, 20) for _ in range(rng.randint(1, 6))], rng.randint(0, 60)
        given = list(loads)
        for _ in range(amount):
            given[given.index(min(given))] += 1
        after = [load + share for load, share in zip(loads, level_loads(loads, amount), strict=True)]
        assert sorted(after) == sorted(given)


def test_the_plan_does_not_depend_on_the_order_of_mappings() -> None:
    firsts = [plan_transfers(step.was, step.to, step.alive, WIDTHS) for step in STEPS[:20]]  # more than the cache holds
    for step, first in zip(STEPS[:20], firsts, strict=True):
        turned = [Placement(dict(reversed(p.sizes.items())), {r: dict(reversed(h.items())) for r, h in p.held.items()})
                  for p in (step.was, step.to)]  # fmt: skip
        other = plan_transfers(*turned, tuple(reversed(step.alive)), dict(reversed(WIDTHS.items())))
        assert other is not first and other.all_transfers == first.all_transfers
        assert other.list_lengths(tuple(range(RANKS))) == first.list_lengths(tuple(range(RANKS)))


def test_well_known_moves_have_their_known_cost() -> None:
    shapes = {f"{i}.{name}": shape for i in range(4) for name, shape in {"qkv": (3, 8, 64), "out": (8, 8)}.items()}
    sizes = {"w": 1200}
    whole, zero, three = (Placement.place_whole(sizes, range(4)), Placement.sharded(sizes, range(4)),
                          Placement.sharded(sizes, range(3)))  # fmt: skip
    assert moved(whole, zero) == 0
    assert moved(zero, whole) == 3
    assert moved(three, Placement.place_whole(sizes, range(3))) == 2
    assert moved(three, zero) == 0.5 == moved(zero, three), "a joining or leaving rank shifts every border"
    columns = Placement.place_slices(shapes, range(4), 1)
    assert moved(columns, Placement.place_slices(shapes, range(4), 0)) == pytest.approx(0.75, abs=0.1)


def test_elements_without_an_owner_are_named() -> None:
    sizes = {"blocks.3.qkv.weight": 19072, "norm": 4}
    was = Placement.sharded({"blocks.3.qkv.weight": 19072}, range(4)) | Placement.place_whole({"norm": 4}, range(4))
    to = Placement.place_whole(sizes, range(3))
    with pytest.raises(LookupError, match=r"^blocks.3.qkv.weight: 4768 elements have no owner left$"):
        plan_transfers(was, to, range(3), dict.fromkeys(sizes, 4))
    many = {f"layer {i}": 10 for i in range(9)}
    said = ("layer 0: 10 elements have no owner left; layer 1: 10 elements have no owner left; layer 2: 10 elements "
            "have no owner left; and so have elements of 6 more tensors")  # fmt: skip
    with pytest.raises(LookupError, match=re.escape(said)):
        plan_transfers(Placement.place_whole(many, [5]), Placement.place_whole(many, [1]), [1], dict.fromkeys(many, 4))


def test_a_tensor_without_a_place_or_with_another_size_is_named() -> None:
    one, other = Placement.place_whole({"w": 4}, [0]), Placement.place_whole({"w": 5}, [0])
    with pytest.raises(ValueError, match="w has 4 elements before the move and 5 after it"):
        plan_transfers(one, other, [0], {"w": 4})
    with pytest.raises(LookupError, match="v: 2 elements have no owner left"):
        plan_transfers(one, Placement.place_whole({"v": 2}, [0]), [0], {"v": 4})


def test_lost_elements_are_counted_exactly() -> None:
    refused = [step for step in walk(3, 30) if step.lost]
    assert len(refused) > 5
    for step in refused:
        with pytest.raises(LookupError) as caught:
            plan_transfers(step.was, step.to, step.alive, WIDTHS)
        named = dict(re.findall(r"(\S+): (\d+) elements have", str(caught.value)))
        assert named == {n: str(k) for n, k in list(step.lost.items())[:3]}


def test_a_plan_for_a_matrix_takes_as_many_transfers_as_there_are_pairs() -> None:
    n = 4096
    columns, whole = Placement.place_slices({"w": (n, n)}, range(4), 1), Placement.place_whole({"w": n * n}, range(4))
    assert plan_transfers(whole, columns, range(4), {"w": 2}).all_transfers == []
    todo = plan_transfers(columns, whole, range(4), {"w": 2})
    assert len(todo.all_transfers) == 12 and todo.between[1, 0][0].slice == StridedSlice(n // 4, n // 4, n, n)


def test_planning_a_matrix_takes_well_under_a_millisecond_and_no_memory_per_element() -> None:
    n = 4096
    columns, zero = Placement.place_slices({"w": (n, n)}, range(4), 1), Placement.sharded({"w": n * n}, range(3))
    for was, to in [(columns, zero), (zero, columns)]:
        quickest = 1.0
        for width in range(3, 53):  # processor time, the least of many: a busy machine does not count
            began = time.process_time()
            plan_transfers(was, to, range(4), {"w": width})  # each width is new, so no plan comes from the cache
            quickest = min(quickest, time.process_time() - began)
        tracemalloc.start()
        plan_transfers(was, to, range(4), {"w": 2})
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert quickest < 0.9e-3 and peak < 100_000


def test_random_placements_cover_the_usual_kinds() -> None:
    rng = random.Random(5)
    made = [placement(rng) for _ in range(100)]
    assert {len(p.holding_ranks) for p in made} == set(range(1, RANKS + 1))
    assert any(
        s.times > 1 for p in made for r in p.holding_ranks for slices in p.slices_of_rank(r).values() for s in slices
    )
