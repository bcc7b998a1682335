"""Tests that an epoch uses no example twice when ranks join, leave or die, with any batch size.

The model's only parameter counts the uses of each example in completed steps.
"""

from __future__ import annotations

import time
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import ended, live, run
from tests.unit.test_membership import lost
from tests.unit.test_resizing import Crowd
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.memory.batches import BatchReader
from workbench.rank import Rank
from workbench.record.checkpoints import Checkpoint, list_checkpoints
from workbench.settings import Change, KnobError
from workbench.sim.run.resuming import plan_resume
from workbench.strategies import (
    BMUF,
    DDP,
    AsyncServer,
    DiLoCo,
    HierarchicalLocalSGD,
    LocalSGD,
    PostLocalSGD,
    SlowMo,
    Strategy,  # fmt: skip
    ZeRO3,
)
from workbench.tasks import Task, shuffled

EXAMPLES = 101  # a prime, so that no division is even


class Counts(nn.Module):
    """Counts the uses of each example in its only parameter."""

    def __init__(self, examples: int) -> None:
        super().__init__()
        self.times = nn.Parameter(torch.zeros(examples))


def counting(examples: int = EXAMPLES, **more: Any) -> Task:
    """A rank's gradient is -ranks for each of its examples, so the mean at rate 1 counts each example once."""
    parts: dict[str, Any] = {
        "model": lambda: Counts(examples),
        "data": lambda rank, ranks, seed, batch, used: (
            (index, ranks) for index in shuffled(examples, rank, ranks, batch, seed, used)),
        "loss": lambda model, batch: -model.times[batch[0]].sum() * batch[1],
        "optimizer": lambda params: torch.optim.SGD(params, lr=1.0),
        "evaluate": lambda model: {"loss": 0.0, "apart": float(model.times.max() - model.times.min()),
                                   "used": float(model.times.sum())},
    }  # fmt: skip
    return Task(**{**parts, **more})


def setting(strategy: Strategy, **more: Any) -> Experiment:
    rest = {"task": counting(), "batch": 3, "ranks": 2, "steps": 0, "eval_every": 0, "seed": 3}
    return Experiment(strategy=strategy, **{**rest, **more}).checked()


def used(s: Session) -> torch.Tensor:
    """Returns how often each example was used. Counts are integers up to rounding."""
    times = s.model.times.detach()
    torch.testing.assert_close(times, times.round(), rtol=0, atol=1e-3)
    return times.round()


def each_once_in_an_epoch(s: Session) -> None:
    """Checks that exactly the examples up to the current position were used, once per finished or begun epoch."""
    times, n = used(s), s.training.batches.used
    assert n > 0 and times.sum() == n and times.max() - times.min() <= 1
    begun = torch.cat(list(islice(shuffled(EXAMPLES, 0, 1, 1, s.experiment.seed), n)))[n - n % EXAMPLES :]
    assert sorted(begun.tolist()) == (times > n // EXAMPLES).nonzero()[:, 0].tolist()


@pytest.mark.parametrize("ranks", [1, 3, 4, 150])
@pytest.mark.parametrize("before", [0, 40, 101, 250])
def test_ranks_share_the_remaining_examples_once(ranks: int, before: int) -> None:
    line = torch.cat(list(islice(shuffled(EXAMPLES, 0, 1, 1, 5), before + 6 * ranks)))[before:]
    hands = [torch.cat(list(islice(shuffled(EXAMPLES, rank, ranks, 2, 5, before), 3))) for rank in range(ranks)]
    assert torch.equal(torch.stack(hands, 1).flatten(), line)


def test_peeked_examples_do_not_count_as_used() -> None:
    def data(rank: int, ranks: int, batch: int, seed: int, used: int) -> Any:
        return shuffled(1000, rank, ranks, batch, seed, used)

    batches = BatchReader(data, 1, 2, "cpu", indexed=True)
    batches.restart_reading(4, 0, 0, 10)
    batches.next_batch()
    batches.peek_batch(2)
    assert batches.used == 10 + 4 * 2
    batches.note_boundary(1)
    batches.next_batch()
    assert batches.list_boundaries(1) == [(1, 18)] and batches.list_boundaries(2) == [(1, 18), (2, 26)]
    batches.select_client(0, 3)
    batches.next_batch()
    assert batches.used == 10 + 4 * 2 * 3
    batches.restart_reading(5, 0, 2, 50)
    assert batches.used == 50 and batches.list_boundaries(2) == [(1, 18), (2, 50)]


def test_data_with_used_require_a_batch_size() -> None:
    with pytest.raises(KnobError, match="batch=0: this task's data takes `used`, which counts examples"):
        setting(DDP(), batch=0)
    with pytest.raises(KnobError, match=r"let it take \(rank, ranks, seed, batch, used\)"):
        setting(DDP(), task=counting(data=lambda rank, ranks, seed, used: []))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=2), ZeRO3()], ids=lambda s: type(s).__name__)
def test_two_then_four_then_three_ranks_use_each_example_once(strategy: Strategy) -> None:
    with Crowd(setting(strategy)) as crowd:
        crowd.reach(7)
        crowd.resize(0, 1, 2, 3)
        crowd.reach(crowd.first.rank.step + 9)
        crowd.resize(1, 2, 3)
        crowd.reach(crowd.first.rank.step + 9)
        crowd.first.request({"kind": "pause", "id": "p"})
        crowd.paused()
        crowd.resize(2)  # then the model is whole, and every update is made
        crowd.paused()
        each_once_in_an_epoch(crowd.first)


@pytest.mark.ranks
@pytest.mark.parametrize("victim", [0, 2], ids="rank {}".format)
def test_the_other_ranks_use_a_dead_ranks_examples(victim: int) -> None:
    left, _ = lost(setting(DDP(), ranks=4, steps=60, on_death="go on"), victim, at=21)
    each_once_in_an_epoch(left[0])
    assert len({s.training.batches.used for s in left}) == 1


@pytest.mark.ranks
def test_other_ranks_use_the_unshared_examples_of_a_lost_rank() -> None:
    e = setting(LocalSGD(every=4), ranks=4, steps=24, task=counting(1000), on_death="go on")
    left, _ = lost(e, 1)
    times = torch.stack([s.model.times.detach() for s in left]).mean(0)  # their last steps may be within a round
    assert 0 < times.max() < 1.5, "none twice: 1, or 4/3 of what only those who are left had when they took the mean"
    assert times.count_nonzero() <= left[0].training.batches.used <= 24 * 4 * 3


AVERAGED = [LocalSGD(every=4), PostLocalSGD(every=4, warmup=1), HierarchicalLocalSGD(every=4, group_every=2),
            DiLoCo(every=4, outer_lr=1.0, outer_momentum=0.0), BMUF(every=4, eta=0.0),
            SlowMo(every=4, beta=0.0)]  # fmt: skip


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", AVERAGED, ids=lambda s: type(s).__name__)
def test_a_mean_finished_by_one_rank_counts_for_all(strategy: Strategy, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other ranks lose their peers in the step that ends in the mean, and rank 0 has ended that step."""
    sessions: list[Session] = []
    last, step = 7 + getattr(strategy, "warmup", 0), type(strategy).step

    async def step_until_cut(self: Any, rank: Rank, state: Any) -> None:
        await step(self, rank, state)
        if rank.step != last or not rank.id or sessions[0].generation_number > 1:
            return
        until = time.monotonic() + 0.5  # rank 0 makes one more step if it need not meet the other ranks for it
        while sessions[0].rank.step <= last or (sessions[0].rank.step == last + 1 and time.monotonic() < until):
            time.sleep(0.001)
        sessions[rank.id].cut_connections()
        await rank.all_reduce(torch.zeros(1), "sum", "none")

    monkeypatch.setattr(type(strategy), "step", step_until_cut)
    sessions += live(setting(strategy, ranks=4, steps=16, task=counting(1000), on_death="go on"))
    ended(sessions)
    for s in sessions:
        assert s.error is None, s.error["traceback"]
        assert len(s.record.noted("members")) == (s.rank.id == 0)
    times = torch.stack([used(s) for s in sessions]).mean(0)
    line = torch.cat(list(islice(shuffled(1000, 0, 1, 1, 3), 4 * 3 * (last + 1))))
    assert (times[line] == 1).all(), "the mean that rank 0 has taken has all steps before"
    assert times.max() == 1 and times.sum() > len(line)


@pytest.mark.ranks
def test_a_new_batch_size_continues_at_the_same_position() -> None:
    changes = Change(7, "batch", 5), Change(30, "batch", 2)
    for s in run(setting(DDP(), ranks=3, steps=50), *changes):
        each_once_in_an_epoch(s)
        assert s.training.batches.used == 3 * (7 * 3 + 23 * 5 + 20 * 2)


def test_a_new_batch_size_continues_at_the_same_position_on_virtual_ranks() -> None:
    e = setting(DDP(), ranks=3, steps=50, eval_every=50, pace=1.0)
    rows = simulate(e, changes=[Change(7, "batch", 5), Change(30, "batch", 2)], real=True).samples
    last = {name: rows[rows.name == f"held_out:{name}"].value.iloc[-1] for name in ("apart", "used")}
    assert last == {"apart": 1, "used": 3 * (7 * 3 + 23 * 5 + 20 * 2)}


@pytest.mark.ranks
def test_a_mark_warns_of_repeated_examples_without_an_index() -> None:
    def data(rank: int, ranks: int, seed: int) -> Any:
        return [(torch.tensor([rank]), ranks)]

    with Crowd(setting(DDP(), task=counting(data=data), batch=0)) as crowd:
        crowd.reach(3)
        crowd.resize(0, 1, 2)
        crowd.until(lambda: crowd.said("data"))  # the generation forms after its ranks have met
        said = crowd.said("data")
        assert len(said) == 1 and said[0]["text"].endswith("so examples may repeat or be skipped")


@pytest.mark.ranks
def test_losing_a_rank_without_a_common_step_is_marked() -> None:
    left, _ = lost(setting(AsyncServer(), ranks=3, steps=60, on_death="go on"), 2)
    assert sum(len(s.record.noted("data")) for s in left) == 1


@pytest.mark.ranks
def test_a_checkpoint_resumes_at_the_same_position_on_other_numbers_of_ranks(tmp_path: Path) -> None:
    e = setting(DDP(), ranks=3, steps=20, save_every=12, pace=1.0)
    simulate(e, real=True, checkpoints=tmp_path / "made")
    made = Checkpoint.open(next(path for path in list_checkpoints(tmp_path / "made") if path.name.endswith("12")))
    for ranks in (3, 2, 4):
        goes = plan_resume(made, Experiment(**{**vars(e), "ranks": ranks, "steps": 30, "save_every": 0}))
        sessions = live(goes.experiment, goes.changes, resume=str(goes.prepare_checkpoint(tmp_path / f"for {ranks}")))
        ended(sessions, 60)
        for s in sessions:
            assert s.error is None, s.error["traceback"]
            each_once_in_an_epoch(s)
            assert s.training.batches.used == 3 * 3 * 12 + 3 * ranks * 18


@pytest.mark.parametrize("used", [-1, 10**6 * 7 + 1, 2**62])
def test_an_impossible_number_of_used_examples_is_refused(used: int) -> None:
    """A forged checkpoint may contain such a number."""
    with pytest.raises(ValueError, match=f"used={used}: must be from 0 to 1,000,000 epochs of 7 examples"):
        next(shuffled(7, 0, 1, 1, 0, used))
