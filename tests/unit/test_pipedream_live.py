"""Tests PipeDream and PipeDream-2BW with live requests and compressed activations, and their refusals."""

from __future__ import annotations

import re
import threading
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.piped import batches, deep, dream, loss, piped, seen, twice
from tests.ranks import ended, live, run, toy
from tests.sim.insides import simulated
from tests.waiting import until
from workbench import simulate
from workbench.compressors import Cast, TopK
from workbench.experiment import Experiment
from workbench.partitions import Pipeline, Tensor
from workbench.partitions.schedules import PipeDream
from workbench.settings import Change, KnobError
from workbench.strategies import DDP

pytestmark = pytest.mark.ranks


@pytest.mark.parametrize("codec", [Cast(to="fp16"), TopK(density=0.3)], ids=str)
@pytest.mark.parametrize("way", [dream(3), twice(3, 4)], ids=["PipeDream", "2BW"])
def test_activations_are_sent_compressed(way: Pipeline, codec: Any) -> None:
    """TopK's choice is kept until the gradient arrives, steps later and through a drain."""
    e = piped(3, 12, partition=replace(way, activations=codec), pace=1.0)
    changes = [Change(6, "lr", 5e-3)]
    sessions = run(e, *changes)
    rows = simulate(e, changes=changes, real=True).timeline.samples.rows()
    mine = rows.value[rows.equal("name", "loss") & (rows.rank == 0)].tolist()
    assert mine == seen(sessions[0], "loss") and min(mine[6:]) < mine[0]


REFUSED = [
    ({"partition": Pipeline(schedule=PipeDream())}, "micros=4: PipeDream updates after every batch"),
    ({"partition": twice(4, 2)}, "take micros=4 or more, or schedule=OneFOneB()"),
    ({"partition": dream(2, of=Tensor())}, "schedule=PipeDream: it keeps older weights only if each stage is on one"),
    ({"partition": dream(2), "strategy": DDP(accumulate=2)}, "accumulate=2: PipeDream updates after every batch"),
    ({"partition": twice(2, 4), "strategy": DDP(accumulate=2)}, "take accumulate=1 and a larger batch"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[:20] for _, words in REFUSED])
def test_incompatible_settings_raise_knob_error(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=re.escape(words)):
        replace(Experiment(ranks=4), **given).checked()


def at_once(sessions: list[Any]) -> float:
    """Returns how many stages compute at a time on average, from the first stage's sixth step to its last."""
    ends = [row[5] for row in sessions[0].record if row[1] == "step"]
    first, last = ends[5], ends[-2]
    passes = [row for s in sessions for row in s.record if row[1] == "compute" and row[2].startswith(("fo", "ba"))]
    return sum(max(0.0, min(row[5], last) - max(row[4], first)) for row in passes) / (last - first)


def test_on_real_ranks_the_stages_compute_at_the_same_time() -> None:
    """With three stages and a flush per minibatch, only one stage computes at a time."""
    ways = dream(3), Pipeline(stages=3, micros=1)
    full, flushed = (at_once(run(piped(3, 18, partition=way, pace=120.0))) for way in ways)
    assert flushed <= 1.02 and full > 1.5


@pytest.mark.parametrize("way", [dream(4), twice(4, 4)], ids=["PipeDream", "2BW"])
def test_it_can_be_changed_paused_and_stopped_at_any_time(way: Pipeline) -> None:
    """Requests take effect a few steps later, on all stages before the same step."""
    sessions = live(piped(4, 0, partition=way, pace=20.0))
    asked = [("lr", 1e-3), ("schedule", "OneFOneB"), ("schedule", type(way.schedule).__name__), ("partition", "Whole"),
             ("partition", way), ("bucket_mb", 0.02)]  # fmt: skip
    for number, (path, value) in enumerate(asked):
        step = sessions[0].rank.step
        until(lambda step=step: sessions[0].rank.step > step + 6)
        request = Change(0, path, value, id=f"c{number}").plain()
        sessions[0].request({"kind": "change", "at_step": 0, **request})
        until(lambda number=number: len(sessions[0].record.noted("change")) > number)
    sessions[0].request({"kind": "pause", "id": "p"})
    until(lambda: sessions[0].phase == "paused")
    sessions[0].request({"kind": "step", "id": "s", "n": 3})
    until(lambda: sessions[0].phase == "paused")
    sessions[0].request({"kind": "resume", "id": "r"})
    step = sessions[0].rank.step
    until(lambda: sessions[0].rank.step > step + 6)
    sessions[0].request({"kind": "stop", "id": "d"})
    ended(sessions)
    assert all(s.phase == "stopped" and s.error is None for s in sessions)
    assert not sessions[0].record.noted("refused") and len({s.rank.step for s in sessions}) == 1


@pytest.mark.parametrize("way", [dream(2), twice(2, 4)], ids=["PipeDream", "2BW"])
def test_discarded_forwards_leave_no_trace_in_buffers(way: Pipeline) -> None:
    """A norm has seen each micro-batch once, although some went forward twice, on both hosts."""

    def normed() -> nn.Module:
        model = deep()
        return nn.Sequential(model[0], nn.BatchNorm1d(12), *model[1:])

    e = piped(2, 11, partition=way, pace=1.0, task=toy(model=normed, data=batches, loss=loss, evaluate=None))
    changes = [Change(3, "bucket_mb", 0.02), Change(7, "lr", 1e-3)]
    sessions = run(e, *changes)
    norm = sessions[0].training.model[1]
    assert int(norm.num_batches_tracked) == 11 * way.micros
    others = simulated(e, *changes)[1]
    assert torch.equal(others[0].model[1].running_mean, norm.running_mean)


def test_batches_out_of_order_raise_strategy_error() -> None:
    """A minibatch that went forward must be the next to go back."""

    async def step(self: Any, rank: Any, state: Any) -> None:
        await rank.forward()
        await rank.forward(micro=1)
        await rank.backward(micro=1)
        await rank.backward()
        await rank.update()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DDP, "step", step)
        sessions = live(piped(2, 4, partition=dream(2)))
        ended(sessions)
    assert any("is not the next one: under schedule=PipeDream" in s.error["text"] for s in sessions if s.error)


@pytest.mark.parametrize("way", [dream(2), twice(2, 4)], ids=["PipeDream", "2BW"])
def test_gradients_are_clipped_by_the_norm_of_the_whole_replica(way: Pipeline) -> None:
    """All stages meet in each step for it; both hosts record the same norms."""
    e = piped(4, 10, partition=way, clip=0.5, pace=1.0)
    sessions = run(e, Change(6, "clip", 0.2))
    norms = [seen(s, "grad_norm") for s in sessions]
    assert norms == [norms[0]] * 4 and len(norms[0]) == 10 and max(norms[0]) > 0.5
    rows = simulate(e, changes=[Change(6, "clip", 0.2)], real=True).timeline.samples.rows()
    for rank in range(4):
        assert rows.value[rows.equal("name", "grad_norm") & (rows.rank == rank)].tolist() == norms[0]


class Scratch(nn.Module):
    """A layer that scales by a buffer, which it writes in place and reads in its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("s", torch.ones(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.s.copy_(1.0 + 0.5 * x.detach().abs().mean(0))
        return x * self.s


@pytest.mark.parametrize("way", [dream(2), twice(2, 2)], ids=lambda way: type(way.schedule).__name__)
def test_a_buffer_overwritten_by_a_later_forward_raises_an_error_in_backward(way: Pipeline) -> None:
    """Torch reports this itself under a schedule with flushes."""

    def model() -> nn.Module:
        parts = list(deep())
        return nn.Sequential(parts[0], Scratch(), *parts[1:])

    task = toy(model=model, data=batches, loss=loss, evaluate=None)
    e = replace(piped(2, 6, partition=way), task=task)
    sessions = live(e)
    ended(sessions)
    said = [s.error["text"] for s in sessions if s.error and not s.error["consequence"]]
    assert said and all("changed in place after its forward" in text for text in said)


@pytest.mark.parametrize("stage", [0, 2])
def test_when_one_stage_fails_the_other_stages_leave(stage: int) -> None:
    def failing(model: nn.Module, pair: Any) -> torch.Tensor:
        name = threading.current_thread().name
        calls[name] = calls.get(name, 0) + 1
        if name == f"rank {stage} training" and calls[name] > 8:
            raise ValueError("on purpose")
        return loss(model, pair)

    calls: dict[str, int] = {}
    task = toy(model=deep, data=batches, loss=failing, evaluate=None)
    sessions = live(piped(3, 0, partition=dream(3), task=task))
    ended(sessions)
    assert "on purpose" in sessions[stage].error["text"]
