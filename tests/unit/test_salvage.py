"""Tests which boundary the survivors of a partitioned run go back to, and which of them stay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from workbench.experiment import Experiment
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.elastic.leaving import replan_changes
from workbench.host.elastic.recovery_sources import count_copies, find_sources, map_pieces, sort_by_need
from workbench.host.elastic.reentry import choose_survivors
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.rank import Rank
from workbench.settings import Change
from workbench.strategies import DDP, HSDP, LocalSGD, ZeRO1, ZeRO3
from workbench.tasks import ByteGPT


def setting(ranks: int = 4, **more: object) -> Experiment:
    return Experiment(**{"task": ByteGPT(), "ranks": ranks, "on_death": "go on", **more}).checked()


def since(alike: int | None, *steps: int) -> dict[int, int | None]:
    """Returns boundaries before `steps`; ranks have differed since step `alike`."""
    return dict.fromkeys(steps, alike)


STAGES = setting(strategy=DDP(), partition=Pipeline())


@pytest.mark.parametrize(
    ("e", "remembers", "ways", "at", "each"),
    [
        (STAGES, True, 2, (0, 1, 0, 1), 2),
        (setting(strategy=HSDP()), True, 2, (0, 1, 0, 1), 2),
        (setting(strategy=ZeRO3()), False, 4, (0, 1, 2, 3), 1),
        (setting(strategy=ZeRO1()), True, 4, (0, 1, 2, 3), 1),
        (setting(strategy=ZeRO1()), False, 1, (0, 0, 0, 0), 4),  # all ranks have the parameters, which are everything
    ],
)
def test_each_rank_has_its_piece(e: Experiment, remembers: bool, ways: int, at: tuple[int, ...], each: int) -> None:
    assert map_pieces(e, 4, remembers) == (ways, at) and count_copies(e, 4, remembers) == each


def test_the_newest_step_with_all_pieces_is_found() -> None:
    """Stage 1 has ended step 7 on rank 3, but stage 0 on no survivor."""
    there = {0: since(None, 5, 6), 2: since(None, 6, 7), 3: since(None, 7, 8)}
    assert find_sources(STAGES, 4, True, there) == (7, ((2, 3),), {2: 7, 3: 7})


def test_two_replicas_with_different_lost_parts_make_one() -> None:
    assert find_sources(STAGES, 4, True, {1: since(6, 6), 2: since(6, 6)}) == (6, ((1, 2),), {1: 6, 2: 6})
    assert find_sources(STAGES, 4, True, {0: since(6, 6), 2: since(6, 6)}) is None
    assert find_sources(STAGES, 4, True, {1: since(6, 6), 2: since(7, 7)}) is None


def test_drifting_replicas_each_go_back_to_their_own_step() -> None:
    e = setting(6, strategy=LocalSGD(), partition=Pipeline())
    there = {0: since(4, 8, 9), 1: since(4, 9, 10), 2: since(4, 4, 5), 3: since(4, 4, 5), 4: since(20, 20)}
    assert find_sources(e, 6, True, there) == (9, ((0, 1), (2, 3)), {0: 9, 1: 9, 2: 5, 3: 5})
    assert find_sources(e, 6, True, {0: since(4, 8, 9), 3: since(4, 5), 4: since(0, 3)}) == (9, ((0, 3),), {0: 9, 3: 5})
    assert find_sources(e, 6, True, {0: since(4, 8), 2: since(4, 8)}) is None


def test_a_replica_without_the_last_mean_takes_it_over() -> None:
    e = setting(6, strategy=LocalSGD(), partition=Pipeline())
    there = {**dict.fromkeys((0, 1), since(8, 8, 9)), **dict.fromkeys((2, 3), since(4, 6, 7)),
             **dict.fromkeys((4, 5), since(8, 8))}  # fmt: skip
    assert find_sources(e, 6, True, there) == (9, ((0, 1), (4, 5)), {0: 9, 1: 9, 4: 8, 5: 8})
    there |= dict.fromkeys((4, 5), since(None, 8))
    assert find_sources(e, 6, True, there) == (9, ((0, 1), (2, 3), (4, 5)), {0: 9, 1: 9, 2: 7, 3: 7, 4: 8, 5: 8})


def test_ranks_with_the_only_copy_of_a_piece_stay() -> None:
    where = find_sources(STAGES, 4, True, dict.fromkeys((0, 2, 3), since(6, 6)))
    assert where is not None
    assert sort_by_need(where, map_pieces(STAGES, 4, True).at, [0, 2, 3]) == [2, 3, 0]


@pytest.mark.parametrize(
    ("way", "left", "to", "places"),
    [
        (Pipeline(), [2, 3, 0], Pipeline(), (2, 3)),
        (Pipeline(stages=4), [0, 1, 3], Pipeline(stages=3), (0, 1, 3)),
        (Pipeline(stages=4, cuts=(1, 2, 3)), [3, 1], Pipeline(stages=2), (1, 3)),
        (Pipeline(of=Tensor()), [0, 2, 3], Tensor(), (0, 2)),
        (Tensor(ways=4, checkpoint="units"), [1], Whole(checkpoint="units"), (1,)),
    ],
)
def test_a_partition_shrinks_to_the_ranks_that_are_left(
    way: Pipeline | Tensor, left: list[int], to: object, places: tuple[int, ...]
) -> None:
    e, stay = choose_survivors(setting(strategy=DDP(), partition=way), left)
    assert (e.partition, stay, e.ranks) == (to, places, len(places))


def test_made_changes_are_not_repeated_and_undone_changes_are_planned_again() -> None:
    one, two, three = (Change(at, "lr", 0.1 * at) for at in (1, 2, 3))
    queue = ChangeQueue([two, three], 1)
    queue.take_changes(1)
    assert not queue.undo_changes(2)
    assert (queue.taken, queue.planned) == ([], [three])
    queue = ChangeQueue([three])
    for change in (one, None, two):
        queue.count_obeyed(change)
    assert queue.undo_changes(1)
    assert queue.planned == [two, three], "the one between was asked for, and who is behind asks again"


def test_a_policy_sees_a_repeated_change_once() -> None:
    """One of the obeyed changes is a decision of two parts; a refused one precedes it, an applied one follows."""
    one, parts, last = Change(1, "lr", 0.1), [Change(4, "lr", 0.2), Change(4, "bucket_mb", 1.0)], Change(5, "lr", 0.3)
    run = SimpleNamespace(queue=ChangeQueue(), experiment=setting(), rank=Rank(0, 4, 0))
    run.policy_runner = PolicyRunner(run)
    for made in ([one], [], parts, [last]):
        for change in made:
            assert asyncio.run(run.policy_runner.follow_change(change, asyncio.sleep(0, True)))
        run.queue.count_obeyed()
    for counts, known in ((4, [one, *parts, last]), (3, [one, *parts]), (2, [one]), (1, [one]), (0, [])):
        replan_changes(run, counts)  # type: ignore[arg-type]
        assert run.policy_runner.made == known, counts


def test_a_policys_applied_change_stays_if_a_rank_is_lost_during_the_look() -> None:
    run = SimpleNamespace(queue=ChangeQueue(obeyed=3), experiment=setting(), rank=Rank(0, 4, 0))
    run.policy_runner = PolicyRunner(run)
    part = Change(4, "bucket_mb", 1.0, by="AdaComm")
    assert asyncio.run(run.policy_runner.follow_change(part, asyncio.sleep(0, True)))
    replan_changes(run, 3)  # type: ignore[arg-type]
    assert run.policy_runner.made == [part]


def test_after_a_checkpoint_the_rank_with_most_changes_informs_the_others() -> None:
    """Rank 0 had not applied the last change when another rank was lost, and the new rank knows none."""
    changes = [Change(1, "lr", 0.1), Change(4, "bucket_mb", 1.0, by="AdaComm", reason="it falls"), Change(5, "lr", 0.3)]
    told: dict[int, str] = {}

    def steering(rank: int, count: int) -> PolicyRunner:
        async def gather(mine: int) -> list[int]:
            assert mine == count
            return [2, 3, 0]

        async def tell(text: str, by: int) -> str:
            told.update({rank: text} if text else {})
            return told[by]

        run = SimpleNamespace(
            queue=ChangeQueue(), experiment=setting(), rank=Rank(rank, 3, 0), gather=gather, broadcast_text=tell
        )
        made = PolicyRunner(run)
        for change in changes[:count]:
            asyncio.run(made.follow_change(change, asyncio.sleep(0, True)))
            run.queue.count_obeyed()
        return made

    for one in (each := [steering(1, 3), steering(0, 2), steering(2, 0)]):
        asyncio.run(one.agree_on_changes())
    assert set(told) == {1} and all(one.made == changes and one._held == {"lr": 0} for one in each)
    for one in each:
        one.undo_changes(2)
        assert one.made == changes[:2]
