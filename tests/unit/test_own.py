"""Tests each rank's own state at a switch of partition: the ranks' sum stays the same for every element."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from tests.ranks import run
from tests.sim.insides import simulated
from tests.split import Small, small
from tests.split import spread as _spread
from tests.spread import local
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.compressors import DGC, Compressor, ErrorFeedback, PowerSGD, RandomK, ScaleCom, SignSGD, TopK, WarmUp
from workbench.experiment import Experiment
from workbench.host.placement.placement import Placement
from workbench.host.placement.replica_spread import find_spread, place_replica
from workbench.host.transfer import rank_state
from workbench.optimizers import SGD
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.rank import MOMENTUM
from workbench.settings import Change, members
from workbench.strategies import LocalSGD, QAdam

SHAPES = {name: tuple(p.shape) for name, p in Small().named_parameters()}
WALK: list[Partition] = [Whole(), Pipeline(micros=2), Tensor(), Whole()]
WAYS = [Whole(), Pipeline(micros=2), Pipeline(stages=4, micros=4), Tensor(), Tensor(ways=4),
        Pipeline(of=Tensor(), micros=2)]  # fmt: skip
PAIRS = [*pairwise(WAYS), (WAYS[2], WAYS[5]), (WAYS[4], WAYS[1])]
FEEDBACK = ErrorFeedback(of=TopK(density=0.05))
Look = tuple[Any, dict[str, dict[str, torch.Tensor]]]  # the layout of a rank's replica, and its buffers


def spread(ranks: int, steps: int = 6, **rest: Any) -> Experiment:
    return _spread(ranks, steps, **{"task": small(parts=parts, evaluate=None), "pace": 2.0, **rest})


class Looks:
    """The buffers of every rank just before and just after each switch of partition: [switch][rank]."""

    def __init__(self) -> None:
        self.before: list[dict[int, Look]] = []
        self.after: list[dict[int, Look]] = []

    @contextmanager
    def watching(self, steps: Sequence[int], without: bool = False) -> Iterator[None]:
        """Records the buffers at these steps. `without`: suppresses the carrying of state."""
        self.before, self.after = ([{} for _ in steps] for _ in range(2))
        carry = rank_state.migrate_rank_state

        async def noting(session: Any, was: Any, to: Any) -> None:
            at, memory = steps.index(session.rank.step), session.rank.memory
            self.before[at][session.rank.id] = was, _copied(memory.buffers)
            if without:
                memory.clear()
            else:
                await carry(session, was, to)
            self.after[at][session.rank.id] = to, _copied(memory.buffers)

        with patch.object(rank_state, "migrate_rank_state", noting):
            yield


def _copied(buffers: dict[str, dict[str, torch.Tensor]]) -> dict[str, dict[str, torch.Tensor]]:
    return {name: {n: x.detach().clone() for n, x in pieces.items()} for name, pieces in buffers.items()}


def dense(look: dict[int, Look], buffer: str, rank: int) -> dict[str, np.ndarray]:
    """Returns one rank's own values with whole parameters, by its Spread's places; NaN outside its part."""
    lies, buffers = look[rank]
    numel = {name: int(np.prod(shape)) for name, shape in SHAPES.items()}
    held = place_replica(tuple(numel.items()), lies, len(look)).slices_of_rank(rank)
    found = {name: np.full(n, np.nan) for name, n in numel.items()}
    for name, piece in buffers.get(buffer, {}).items():
        found[name][local(held[name])] = piece.double().numpy()
    return found


def summed(look: dict[int, Look], buffer: str) -> dict[str, np.ndarray]:
    """Returns the sum over ranks in double precision."""
    each = [dense(look, buffer, rank) for rank in look]
    return {name: np.nansum([one[name] for one in each], 0) for name in SHAPES}


def told(record: Any, name: str = "own") -> list[dict[str, Any]]:
    """Returns the details of a run's Marks with a name."""
    return [detail for _, _, detail in record.details(name)]


def turned(path: Sequence[Partition], every: int = 3) -> tuple[list[Change], list[int]]:
    steps = [every * (k + 1) for k in range(len(path) - 1)]
    return [Change(at, "partition", way) for at, way in zip(steps, path[1:], strict=True)], steps


def stays(looks: Looks, buffer: str, tolerance: float = 1e-6) -> None:
    """Checks that each switch keeps the ranks' sum. fp32 rounds when two shares become one."""
    for before, after in zip(looks.before, looks.after, strict=True):
        was, now = summed(before, buffer), summed(after, buffer)
        assert max(np.abs(x).max() for x in was.values()) > 1e-4
        for name, x in was.items():
            np.testing.assert_allclose(now[name], x, rtol=tolerance, atol=tolerance * np.abs(x).max())


CASES = [(FEEDBACK, ["residual"]), (DGC(density=0.05), ["velocity", MOMENTUM]), (ScaleCom(density=0.05), ["residual"])]


@pytest.mark.parametrize(("compressor", "buffers"), CASES, ids=["EF", "DGC", "ScaleCom"])
def test_the_ranks_total_residual_stays_through_every_partition(compressor: Compressor, buffers: list[str]) -> None:
    looks, (asked, steps) = Looks(), turned(WALK)
    with looks.watching(steps):
        record, _ = simulated(spread(4, 14, compressor=compressor, optimizer=SGD()), *asked)
    for buffer in buffers:
        stays(looks, buffer)
        assert not any(np.isnan(x).any() for r in range(4) for x in dense(looks.after[-1], buffer, r).values())
    assert not record.details("refused")
    losses = record.timeline.samples.rows()
    losses = losses.value[losses.equal("name", "loss")].tolist()
    assert np.isfinite(losses).all() and np.mean(losses[-8:]) < np.mean(losses[:8])


def test_a_rank_that_still_holds_an_element_keeps_its_own_value_exactly() -> None:
    """From two replicas of two stages to four whole ones: nothing is added, nothing is sent."""
    looks, (asked, steps) = Looks(), turned([Pipeline(micros=2), Whole()])
    with looks.watching(steps):
        record, _ = simulated(spread(4, 5, compressor=FEEDBACK, partition=Pipeline(micros=2)), *asked)
    for rank in range(4):
        was, now = (dense(look, "residual", rank) for look in (looks.before[0], looks.after[0]))
        for name in SHAPES:
            np.testing.assert_array_equal(np.where(np.isnan(was[name]), 0.0, was[name]), now[name])
    (said,) = told(record)
    assert said["nbytes"] == 0 and said["rules"] == {"residual": "sum"} and "moved with the parameters" in said["text"]


def test_shares_of_replicas_that_end_go_to_their_heirs() -> None:
    """From four whole replicas to two with two stages: each rank has its own and its neighbour's shares."""
    looks, (asked, steps) = Looks(), turned([Whole(), Pipeline(micros=2)])
    with looks.watching(steps):
        record, _ = simulated(spread(4, 5, compressor=FEEDBACK), *asked)
    was = [dense(looks.before[0], "residual", rank) for rank in range(4)]
    for rank in range(4):
        now, pair = dense(looks.after[0], "residual", rank), rank // 2 * 2
        for name, x in now.items():
            if not np.isnan(x).any():
                one, other = (np.float32(was[r][name]) for r in (pair, pair + 1))
                np.testing.assert_array_equal(np.float32(x), one + other)
    (said,) = told(record)
    assert said["nbytes"] == 4 * 2 * sum(int(np.prod(shape)) for shape in SHAPES.values())


@pytest.mark.ranks
@pytest.mark.parametrize(("compressor", "buffers"), CASES[:2], ids=["EF", "DGC"])
def test_real_ranks_carry_own_state_as_the_simulator_does(compressor: Compressor, buffers: list[str]) -> None:
    asked, steps = turned(WALK)
    e = spread(4, 11, compressor=compressor, optimizer=SGD())
    ours, theirs = Looks(), Looks()
    with ours.watching(steps):
        sessions = run(e, *asked)
    with theirs.watching(steps):
        record, _ = simulated(e, *asked)
    for buffer in buffers:
        stays(ours, buffer)
        assert ours.after[0].keys() == theirs.after[0].keys() == {0, 1, 2, 3}
    mine = [json.loads(m[3])["nbytes"] for m in sessions[0].record.noted("own")]
    sizes = [said["nbytes"] for said in told(simulate(e, changes=asked))]
    assert mine == [said["nbytes"] for said in told(record)] == sizes and sum(mine) > 0


@pytest.mark.parametrize("seed", range(6))
def test_the_ranks_total_stays_between_random_partitions(seed: int) -> None:
    rng = random.Random(seed)
    path = [rng.choice(WAYS)]
    while len(path) < 5:
        path.append(rng.choice([way for way in WAYS if way != path[-1]]))
    looks, (asked, steps) = Looks(), turned(path, 2)
    compressor, buffers = CASES[seed % 3]
    strategy = LocalSGD(every=1) if seed % 2 and compressor is FEEDBACK else spread(4).strategy
    with looks.watching(steps):
        e = spread(4, 2 * len(path), compressor=compressor, optimizer=SGD(), strategy=strategy, partition=path[0])
        simulated(e, *asked)
    for buffer in buffers:
        stays(looks, buffer)


def test_a_mean_is_shared_by_all_ranks_after_a_switch() -> None:
    """Signum averages a share of the gradient, so the sum of four shares becomes two shares of half the sum each."""
    looks, (asked, steps) = Looks(), turned([Whole(), Pipeline(micros=2), Whole()])
    with looks.watching(steps):
        record, _ = simulated(spread(4, 8, compressor=SignSGD(momentum=0.9), lr=1e-3), *asked)
    for before, after in zip(looks.before, looks.after, strict=True):
        was, each = summed(before, "sign_sgd"), [dense(after, "sign_sgd", rank) for rank in range(4)]
        for name, x in was.items():
            holding = [one[name] for one in each if not np.isnan(one[name]).any()]
            assert len(holding) == (2 if after is looks.after[0] else 4)
            for own_ in holding:
                np.testing.assert_allclose(own_, x / len(holding), rtol=1e-5, atol=1e-7)
    assert [said["rules"] for said in told(record)] == [{"sign_sgd": "mean"}] * 2


FORGETFUL = [PowerSGD(), RandomK(density=0.1, scaled=False), WarmUp(of=TopK(density=0.1), steps=1)]


@pytest.mark.parametrize("of", FORGETFUL, ids=lambda of: type(of).__name__)
def test_state_without_a_rule_restarts_on_all_ranks(of: Compressor) -> None:
    looks, (asked, steps) = Looks(), turned(WALK)
    with looks.watching(steps):
        record, _ = simulated(spread(4, 12, compressor=ErrorFeedback(of=of)), *asked)
    stays(looks, "residual")
    assert all("drop" in said["rules"].values() and "started again" in said["text"] for said in told(record))


def test_a_residual_that_is_being_bled_off_continues_after_a_switch() -> None:
    """A residual is bled off over six steps with a switch in between. It is sent on until nothing is owed."""
    feeding = ErrorFeedback(of=TopK(density=0.05), off="bleed", over=6)
    asked = [Change(4, "compressor", "Dense"), Change(6, "partition", Pipeline(micros=2))]
    looks = Looks()
    with looks.watching([6]):
        _, sessions = simulated(spread(4, 12, compressor=feeding), *asked)
    stays(looks, "residual")
    assert all("residual" not in s.rank.memory.buffers for s in sessions)


def test_the_residual_of_moments_is_dropped() -> None:
    e = spread(4, 8, strategy=QAdam(warmup=1), compressor=FEEDBACK)
    record, _ = simulated(e, Change(4, "partition", Pipeline(micros=2)))
    assert not record.details("refused")
    assert [said["unit"] for said in told(record, "residual") if "dropped" in said] == ["moments"] * 4


def test_a_switch_of_512_ranks_is_planned_quickly() -> None:
    """Sizes only, 512 ranks; the bytes are those of the moved halves."""
    e = spread(512, 3, compressor=FEEDBACK)
    (said,) = told(simulate(e, changes=[Change(2, "partition", Pipeline(micros=2))]))
    assert said["nbytes"] == 4 * 256 * sum(int(np.prod(shape)) for shape in SHAPES.values())


def test_without_carrying_the_residual_is_lost() -> None:
    looks, (asked, steps) = Looks(), turned([Whole(), Pipeline(micros=2)])
    with looks.watching(steps, without=True):
        simulated(spread(4, 5, compressor=FEEDBACK), *asked)
    with pytest.raises(AssertionError):
        stays(looks, "residual")


def test_every_residual_has_the_rule_sum() -> None:
    """A law of the family: only sums are accounted for."""
    for cls in members(Compressor).values():
        one = cls.usual()
        assert set(one.own.values()) <= {"sum", "mean", "keep", "drop"}
        assert not one.residual or one.own[one.residual] == "sum"


@pytest.mark.parametrize("ways", PAIRS)
def test_no_element_of_a_share_is_sent_if_it_may_stay(ways: tuple[Partition, Partition]) -> None:
    """Counts by element: a share moves only if its owner no longer holds the element."""
    e, model = spread(4, 3, partition=ways[0], compressor=FEEDBACK), Small()
    was, to = (find_spread(e.set("partition", way), model, e.task.build()) for way in ways)
    named = tuple((name, int(np.prod(shape))) for name, shape in SHAPES.items())
    before, after = (place_replica(named, way, 4) for way in (was, to))
    leaving = sum(len(elements(before, r, name) - elements(after, r, name)) for r in range(4) for name in SHAPES)
    (said,) = told(simulate(e, changes=[Change(2, "partition", ways[1])]))
    assert said["nbytes"] == 4 * leaving


def elements(lies: Placement, rank: int, name: str) -> set[int]:
    return set(local(lies.slices_of_rank(rank).get(name, ())))
