"""Runs every strategy on the virtual clock, alone and in every ordered pair with another."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from torch import nn

from tests.laws.claims import ADOPTS, ROUNDS
from tests.ranks import make_fitting, shipped
from tests.sim.virtual import paced, rows, same, samples
from tests.thinned import thinned
from workbench import simulate
from workbench.analysis import before_after, measure_memory
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Noisy, Slow
from workbench.host.placement.canonical_state import hash_model_state
from workbench.partitions import Pipeline, Whole
from workbench.settings import Change
from workbench.sim.rank.session import Session
from workbench.strategies import DDP, AsyncModelAverage, AsyncServer, LocalSGD, Strategy
from workbench.tasks import Digits, Task

pytestmark = pytest.mark.ranks

ALL = {n: cls for n, cls in shipped(Strategy).items() if not cls.opaque}


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[Session]:
    """Returns a list that collects the ranks of every simulation of a test."""
    made: list[Session] = []
    init = Session.__init__

    def kept(self: Session, *args: object) -> None:
        init(self, *args)
        made.append(self)

    monkeypatch.setattr(Session, "__init__", kept)
    return made


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_each_strategy_runs_with_sizes_and_with_tensors_in_the_same_time(name: str, ranks: int) -> None:
    e = paced(ranks, 9, strategy=make_fitting(ALL[name], ranks), faults=(Noisy(spread=1.0),), eval_every=3)
    sizes, tensors = simulate(e), simulate(e, real=True)
    assert sizes.state == tensors.state == "done"
    trainers = sum(e.strategy.trains(rank, ranks) for rank in range(ranks))
    assert len(rows(sizes, "step")) == 9 * trainers == len(samples(tensors, "loss"))
    assert rows(sizes, "step").t1.tolist() == rows(tensors, "step").t1.tolist()
    assert same(simulate(e, real=True), tensors)


@pytest.mark.parametrize(("before", "after"), thinned(permutations(ALL, 2), of=16, long=32))
def test_all_ordered_pairs_leave_equal_parameters_and_no_held_out_loss_behind(
    before: str, after: str, sessions: list[Session]
) -> None:
    """With hardly any learning, a switch keeps the held-out loss of the canonical state."""
    e = paced(4, 14, strategy=ALL[before](), faults=(Noisy(spread=0.5),), eval_every=1)
    still = [Change(0 if before in ADOPTS | ROUNDS else 5, "lr", 1e-9), Change(8, "strategy", after)]
    run = simulate(e, changes=still, real=True)
    assert run.state == "done" and len(rows(run, "switch", 0)) == 1
    assert {c.path for c in run.changes} == {"lr", "strategy"}
    held = dict(zip(*_held_out(run), strict=True))
    if ALL[before].lockstep and ALL[after].lockstep:
        assert [held[s] for s in range(6, 15)] == pytest.approx([held[5]] * 9, abs=1e-6)
    assert held[max(held)] == pytest.approx(held[max(held) - 1], abs=1e-4)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1 or ALL[after].periodic


def test_a_change_of_strategy_records_the_bytes_and_the_link_time_of_its_hand_over() -> None:
    e = paced(4, 14, strategy=LocalSGD(every=5), eval_every=0)
    run = simulate(e, changes=[Change(7, "strategy", "DDP"), Change(9, "bucket_mb", 2.0)])
    (step, _, handed), (_, _, set_) = run.details("change")
    spans = run.timeline.spans.rows()
    spans = spans[spans.equal("lane", "switch")]
    assert handed["nbytes"] == spans.nbytes.sum() > 0 and set_["nbytes"] == set_["seconds"] == 0
    assert handed["seconds"] == pytest.approx(float(spans.t1[0] - spans.t0[0])) and handed["seconds"] > 0
    card = before_after(run.timeline, step)
    assert (card.nbytes, card.seconds) == (handed["nbytes"], handed["seconds"])


def _held_out(run: object) -> tuple[list[int], list[float]]:
    found = run.timeline.samples.rows()  # type: ignore[attr-defined]
    found = found[found.equal("name", "held_out")]
    return found.step.tolist(), found.value.tolist()


@pytest.mark.parametrize("strategy", [AsyncModelAverage(every_ms=500.0, warmup=0), AsyncServer()], ids=str)
def test_ranks_that_meet_late_apply_all_changes_that_they_have_passed(strategy: Strategy) -> None:
    """Rank 0 calls the meeting in its step 5, when the other ranks have already made their last step."""
    slow = Fabric(faults=(Slow(rank=0, factor=20.0),))
    e = Experiment(task=Digits(), strategy=strategy, ranks=3, steps=25, pace=2.0, eval_every=0, fabric=slow)
    changes = [Change(5, "strategy", DDP()), Change(21, "bucket_mb", 0.05), Change(24, "strategy", LocalSGD())]
    made = [detail["path"] for _, _, detail in simulate(e, changes=changes).details("change")]
    assert made == ["strategy", "bucket_mb", "strategy"]


def test_data_of_fixed_batch_size_keeps_equal_activations_with_and_without_values() -> None:
    """A micro-batch is a part of the given batch; the data is not asked for a smaller one."""

    def model() -> nn.Module:
        return nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(4)))

    task = Task(model=model, data=lambda rank, ranks, seed: [torch.ones(16, 32)],
                loss=lambda m, x: m(x).square().mean(),
                optimizer=lambda params: torch.optim.AdamW(params, 1e-3))  # fmt: skip
    way = Pipeline(stages=2, micros=4)
    for first, changes in ((way, []), (Whole(), [Change(3, "partition", way)])):
        e = Experiment(task=task, ranks=2, steps=6, pace=2.0, eval_every=0, partition=first)
        real, sizes = (simulate(e, changes=changes, real=real).timeline for real in (True, False))
        found = [[(m.most, m.peak) for m in measure_memory(tl, 4)] for tl in (real, sizes)]
        kept = 2 * 2 * 4 * 32 * 4  # inputs and outputs of two layers: 4 rows of 32 numbers each
        assert found[0] == found[1] and found[0][0][0]["activations"] == kept
