"""Which boundary those go back to who are left of ranks that held parts, and which of them are to stay."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from workbench.experiment import Experiment
from workbench.host.elastic.reentry import fitting
from workbench.host.elastic.salvage import copies, first_to_stay, found, pieces
from workbench.host.loop.outliving import Outliving
from workbench.host.reconfigure.steering import Steering
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.rank import Rank
from workbench.settings import Change
from workbench.strategies import DDP, HSDP, LocalSGD, ZeRO1, ZeRO3
from workbench.tasks import ByteGPT


def setting(ranks: int = 4, **more: object) -> Experiment:
    return Experiment(**{"task": ByteGPT(), "ranks": ranks, "on_death": "go on", **more}).checked()


def since(alike: int | None, *steps: int) -> dict[int, int | None]:
    """Boundaries before `steps`, since step `alike` of which ranks differ."""
    return dict.fromkeys(steps, alike)


STAGES = setting(strategy=DDP(), partition=Pipeline())


@pytest.mark.parametrize(
    ("e", "remembers", "ways", "at", "each"),
    [
        (STAGES, True, 2, (0, 1, 0, 1), 2),
        (setting(strategy=HSDP()), True, 2, (0, 1, 0, 1), 2),
        (setting(strategy=ZeRO3()), False, 4, (0, 1, 2, 3), 1),
        (setting(strategy=ZeRO1()), True, 4, (0, 1, 2, 3), 1),
        (setting(strategy=ZeRO1()), False, 1, (0, 0, 0, 0), 4),  # all have the parameters, and there is nothing else
    ],
)
def test_who_has_which_piece(e: Experiment, remembers: bool, ways: int, at: tuple[int, ...], each: int) -> None:
    assert pieces(e, 4, remembers) == (ways, at) and copies(e, 4, remembers) == each


def test_the_newest_step_at_which_all_pieces_are_there_counts() -> None:
    """Stage 1 has ended step 7 on rank 3, and stage 0 of nobody who is left has."""
    there = {0: since(None, 5, 6), 2: since(None, 6, 7), 3: since(None, 7, 8)}
    assert found(STAGES, 4, True, there) == (7, ((2, 3),), {2: 7, 3: 7})


def test_two_replicas_that_each_lost_another_part_are_one() -> None:
    assert found(STAGES, 4, True, {1: since(6, 6), 2: since(6, 6)}) == (6, ((1, 2),), {1: 6, 2: 6})
    assert found(STAGES, 4, True, {0: since(6, 6), 2: since(6, 6)}) is None
    assert found(STAGES, 4, True, {1: since(6, 6), 2: since(7, 7)}) is None


def test_replicas_that_drift_apart_each_go_back_to_a_step_of_their_own() -> None:
    e = setting(6, strategy=LocalSGD(), partition=Pipeline())
    there = {0: since(4, 8, 9), 1: since(4, 9, 10), 2: since(4, 4, 5), 3: since(4, 4, 5), 4: since(20, 20)}
    assert found(e, 6, True, there) == (9, ((0, 1), (2, 3)), {0: 9, 1: 9, 2: 5, 3: 5})
    assert found(e, 6, True, {0: since(4, 8, 9), 3: since(4, 5), 4: since(0, 3)}) == (9, ((0, 3),), {0: 9, 3: 5})
    assert found(e, 6, True, {0: since(4, 8), 2: since(4, 8)}) is None


def test_a_replica_that_lacks_the_last_mean_takes_it_over() -> None:
    e = setting(6, strategy=LocalSGD(), partition=Pipeline())
    there = {**dict.fromkeys((0, 1), since(8, 8, 9)), **dict.fromkeys((2, 3), since(4, 6, 7)),
             **dict.fromkeys((4, 5), since(8, 8))}  # fmt: skip
    assert found(e, 6, True, there) == (9, ((0, 1), (4, 5)), {0: 9, 1: 9, 4: 8, 5: 8})
    there |= dict.fromkeys((4, 5), since(None, 8))
    assert found(e, 6, True, there) == (9, ((0, 1), (2, 3), (4, 5)), {0: 9, 1: 9, 2: 7, 3: 7, 4: 8, 5: 8})


def test_those_without_whom_a_piece_would_be_missing_stay() -> None:
    where = found(STAGES, 4, True, dict.fromkeys((0, 2, 3), since(6, 6)))
    assert where is not None
    assert first_to_stay(where, pieces(STAGES, 4, True).at, [0, 2, 3]) == [2, 3, 0]


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
def test_a_partition_that_takes_more_ranks_than_are_left_takes_fewer(
    way: Pipeline | Tensor, left: list[int], to: object, places: tuple[int, ...]
) -> None:
    e, stay = fitting(setting(strategy=DDP(), partition=way), left)
    assert (e.partition, stay, e.ranks) == (to, places, len(places))


def test_what_others_made_is_not_to_come_and_what_does_not_count_is_planned_again() -> None:
    one, two, three = (Change(at, "lr", 0.1 * at) for at in (1, 2, 3))
    run = SimpleNamespace(taken=[two], planned=[three], obeyed=1, _made=[], steering=Steering(None))
    Outliving.plan_again(run, 2)  # type: ignore[arg-type]
    assert (run.taken, run.planned) == ([], [three])
    run = SimpleNamespace(taken=[], planned=[three], obeyed=3, _made=[one, None, two], steering=Steering(None))
    Outliving.plan_again(run, 1)  # type: ignore[arg-type]
    assert run.planned == [two, three], "the one between was asked for, and who is behind asks again"


def test_a_policy_is_told_once_of_a_change_that_was_made_again() -> None:
    """A decision of two parts is one of those that were obeyed; before it one was refused, and after it one made."""
    one, parts, last = Change(1, "lr", 0.1), [Change(4, "lr", 0.2), Change(4, "bucket_mb", 1.0)], Change(5, "lr", 0.3)
    run = SimpleNamespace(taken=[], planned=[], obeyed=0, _made=[None] * 4, experiment=setting(), rank=Rank(0, 4, 0))
    run.steering = Steering(run)
    for made in ([one], [], parts, [last]):
        for change in made:
            assert asyncio.run(run.steering.heeding(change, asyncio.sleep(0, True)))
        run.obeyed += 1
    for counts, known in ((4, [one, *parts, last]), (3, [one, *parts]), (2, [one]), (1, [one]), (0, [])):
        Outliving.plan_again(run, counts)  # type: ignore[arg-type]
        assert run.steering.made == known, counts


def test_what_a_policy_has_brought_about_stays_though_a_rank_was_lost_before_its_look_was_over() -> None:
    run = SimpleNamespace(taken=[], planned=[], obeyed=3, _made=[None] * 3, experiment=setting(), rank=Rank(0, 4, 0))
    run.steering = Steering(run)
    part = Change(4, "bucket_mb", 1.0, by="AdaComm")
    assert asyncio.run(run.steering.heeding(part, asyncio.sleep(0, True)))
    Outliving.plan_again(run, 3)  # type: ignore[arg-type]
    assert run.steering.made == [part]


def test_who_knows_most_of_the_changes_tells_the_others_though_all_go_back_to_a_checkpoint() -> None:
    """Rank 0 had not made the last one when another was lost, and the rank that came knows none."""
    changes = [Change(1, "lr", 0.1), Change(4, "bucket_mb", 1.0, by="AdaComm", reason="it falls"), Change(5, "lr", 0.3)]
    told: dict[int, str] = {}

    def steering(rank: int, count: int) -> Steering:
        async def gather(mine: int) -> list[int]:
            assert mine == count
            return [2, 3, 0]

        async def tell(text: str, by: int) -> str:
            told.update({rank: text} if text else {})
            return told[by]

        run = SimpleNamespace(obeyed=0, experiment=setting(), rank=Rank(rank, 3, 0), gather=gather, told=tell)
        made = Steering(run)
        for change in changes[:count]:
            asyncio.run(made.heeding(change, asyncio.sleep(0, True)))
            run.obeyed += 1
        return made

    for one in (each := [steering(1, 3), steering(0, 2), steering(2, 0)]):
        asyncio.run(one.agree())
    assert set(told) == {1} and all(one.made == changes and one._held == {"lr": 0} for one in each)
    for one in each:
        one.undo(2)
        assert one.made == changes[:2]
