"""Tests that settings which exceed a device's memory are refused before a run, a change or a step."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import ended, live, run, weights
from tests.unit.test_zero_3 import many, seen
from workbench import KnobError, simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.host.memory.budget import OutOfMemory
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.run import require_memory
from workbench.settings import Change
from workbench.strategies import DDP, HSDP, DiLoCo, TorchDDP, ZeRO3, ZeROInfinity, ZeROOffload
from workbench.tasks import ByteGPT, Learner

pytestmark = pytest.mark.ranks

STAGES = [DDP(), ZeRO3(), ZeROOffload(), ZeROInfinity()]  # each needs less than the one before


def lesson(**rest: Any) -> Experiment:
    more = {"ranks": 2, "steps": 6, "eval_every": 0, "pace": 1.0, "bucket_mb": 0.1, "batch": 2, **rest}
    return Experiment(task=ByteGPT(layers=6), optimizer=AdamW(), **more)


def needs(e: Experiment) -> float:
    """Returns the peak MB of a rank's device, without a limit."""
    return max(seen(run(e)[0], "memory peak")) / 1e6


@pytest.mark.long
def test_predicted_memory_equals_measured_memory_and_falls_with_each_stage() -> None:
    found = []
    for strategy in STAGES:
        e = lesson(strategy=strategy)
        peak = needs(e)
        assert simulate(e).memory()[0].peak / 1e6 == pytest.approx(peak, rel=0.05)
        late = getattr(strategy, "outstanding", 0) * e.bucket_mb  # buckets that may wait on real ranks
        require_memory(replace(e, memory_mb=1.06 * peak + late))
        for less in (0.94 * peak, 0.97 * peak + 0.5 * late):
            with pytest.raises(KnobError, match="needs"):
                require_memory(replace(e, memory_mb=less))
        found.append(peak)
    assert found == sorted(found, reverse=True) and found[0] > 3 * found[-1]


@pytest.mark.parametrize(("fits", "memory_mb"), [(0, 33.0), (1, 24.0), (2, 18.0), (3, 12.0)])
def test_a_model_that_does_not_fit_trains_under_a_leaner_strategy(fits: int, memory_mb: float) -> None:
    for at, strategy in enumerate(STAGES):
        e = lesson(strategy=strategy, memory_mb=memory_mb)
        sessions = live(e)
        ended(sessions)
        if at >= fits:
            assert [s.error for s in sessions] == [None, None], (strategy, memory_mb)
        else:
            said = next(s.error["text"] for s in sessions if s.error and "needs" in s.error["text"])
            when = r"(in a step \(parameters [\d.]+, gradients|(or more )?while the model is evaluated \(parameters)"
            assert re.search(rf"memory_mb={memory_mb:g}: rank \d needs [\d.]+ MB {when}", said)


def test_a_change_that_needs_too_much_memory_is_refused_at_once() -> None:
    e = lesson(strategy=ZeROInfinity(), memory_mb=15.0)
    require_memory(e, "lr", 1e-4)
    require_memory(e, "batch", 3)
    for path, value in (("strategy", DDP()), ("batch", 16), ("memory_mb", 6.0)):
        with pytest.raises(KnobError, match=r"needs [\d.]+ MB"):
            require_memory(e, path, value)
    with pytest.raises(KnobError, match=r"rank \d needs .* between two steps .*what moves"):
        require_memory(lesson(strategy=ZeRO3(), memory_mb=22.5), "optimizer", AdamW(beta1=0.8))


@pytest.mark.parametrize(("now", "change", "silent", "named"), [
    ({"strategy": ZeRO3(), "memory_mb": 24.0}, {"strategy": DDP()}, "ZeRO3", "ZeROInfinity"),
    ({"strategy": ZeROInfinity(), "memory_mb": 15.0}, {"strategy": DDP()}, "ZeRO", "memory_mb="),
    ({"strategy": ZeROInfinity(), "memory_mb": 15.0}, {"strategy": ZeRO3()}, "ZeRO", "checkpoint"),
    ({"partition": Whole(checkpoint="units"), "batch": 24, "memory_mb": 60.0}, {"partition.checkpoint": "none"},
     "checkpoint", "ZeRO3 or ZeROInfinity"),
])  # fmt: skip
def test_advice_names_neither_settings_in_force_nor_the_refused_change(
    now: dict[str, Any], change: dict[str, Any], silent: str, named: str
) -> None:
    e = lesson(**now)
    require_memory(e)
    with pytest.raises(KnobError, match="needs") as refused:
        require_memory(e, change)
    advice = str(refused.value).partition("; take ")[2]
    assert silent not in advice and named in advice and "memory_mb" in advice, refused.value


@pytest.mark.parametrize(("strategy", "memory_mb", "change", "fitting"), [
    (ZeRO3(), 24.0, {"strategy": DDP()}, ["ZeROInfinity"]),
    (ZeROInfinity(), 15.0, {"strategy": DDP()}, []),
    (ZeRO3(), 22.5, {"optimizer": AdamW(beta1=0.8)}, []),  # under ZeRO-Infinity the switch takes as much
], ids=str)  # fmt: skip
def test_advice_for_a_switch_without_room_makes_it_fit(
    strategy: Any, memory_mb: float, change: dict[str, Any], fitting: list[str]
) -> None:
    """Between two steps neither a batch nor activations exist, so smaller ones would not help."""
    e = lesson(strategy=strategy, memory_mb=memory_mb)
    with pytest.raises(KnobError, match="between two steps") as refused:
        require_memory(e, change)
    advice = str(refused.value).partition("; take ")[2]
    assert not re.search("batch|bucket|checkpoint", advice), advice
    assert re.findall(r"ZeRO\w+", advice) == fitting
    for name in fitting:
        require_memory(e, change | {"strategy": name})
    (enough,) = re.findall(r"memory_mb=([\d.]+)$", advice)
    require_memory(replace(e, memory_mb=float(enough)), change)
    with pytest.raises(KnobError, match="between two steps"):
        require_memory(replace(e, memory_mb=0.9 * float(enough)), change)


@dataclass(frozen=True, kw_only=True)
class Eager(ByteGPT):
    """Passes all held-out windows through the model at once."""

    def build(self) -> Learner:
        return replace(super().build(), evaluate=_at_once)


def _at_once(model: nn.Module) -> float:
    seen = torch.arange(64 * 96).view(96, 64) % 256
    return float(model(seen).log_softmax(-1).mean())


PLACED = [{"strategy": DDP()}, {"strategy": ZeRO3()}, {"strategy": ZeROInfinity()}, {"partition": Pipeline()},
          {"partition": Tensor()}]  # fmt: skip


@pytest.mark.parametrize("placed", PLACED, ids=lambda placed: str(next(iter(placed.values()))))
def test_an_evaluation_that_does_not_fit_is_refused_before_it_starts(placed: dict[str, Any]) -> None:
    """The measured memory of evaluation equals the predicted one."""
    e = replace(lesson(eval_every=3, batch=4, **placed), task=Eager())
    sessions, model = run(e), simulate(e)
    for session in sessions:
        rows = model.samples[model.samples["rank"] == session.rank.id]
        said = [list(rows[rows.name == name].value)[-1] for name in ("memory evaluation", "memory peak")]
        late = 8e5  # the earlier buckets, which gloo may still hold
        assert seen(session, "memory evaluation")[-1] == pytest.approx(said[0], rel=0.02, abs=late)
        assert seen(session, "memory peak")[-1] == pytest.approx(said[1], rel=0.05)
    frugal = simulate(replace(e, task=ByteGPT())).samples
    limit = 1.05 * frugal[frugal.name == "memory peak"].value.max() / 1e6
    require_memory(replace(e, task=ByteGPT(), memory_mb=limit))
    assert limit < needs_at_all(sessions)
    with pytest.raises(KnobError, match=r"rank \d needs [\d.]+ MB while the model is evaluated \(.*evaluation"):
        require_memory(replace(e, memory_mb=limit))


def needs_at_all(sessions: list[Any]) -> float:
    """Returns the peak MB of the rank that needed most."""
    return max(max(seen(session, "memory peak")) for session in sessions) / 1e6


CAME: list[str] = []  # progress of an evaluation


@dataclass(frozen=True, kw_only=True)
class Told(Eager):
    """Like Eager, and notes its progress."""

    def build(self) -> Learner:
        def evaluate(model: nn.Module) -> float:
            CAME.append("begun")
            found = _at_once(model)
            CAME.append("over")
            return found

        return replace(super().build(), evaluate=evaluate)


@pytest.mark.parametrize("placed", [{"strategy": DDP()}, {"partition": Tensor()}], ids=str)
def test_an_unpredicted_evaluation_is_stopped_as_soon_as_it_exceeds_memory(placed: dict[str, Any]) -> None:
    e = replace(lesson(steps=2, **placed), task=Told())
    CAME.clear()
    (full,) = {max(seen(session, "memory peak")) for session in run(e)[:1]}
    assert "over" in CAME
    CAME.clear()
    sessions = live(replace(e, memory_mb=0.6 * full / 1e6))
    ended(sessions)
    (said, *_) = (s.error["text"] for s in sessions if s.error and "evaluated" in s.error["text"])
    found = re.match(r"memory_mb=[\d.]+: rank \d needs ([\d.]+) MB or more while the model is evaluated", said)
    assert "begun" in CAME and "over" not in CAME
    assert found and 0.59 * full < float(found[1]) * 1e6 < 0.9 * full, "it went no further"


@pytest.mark.parametrize(
    ("strategy", "ranks", "limit", "between"),
    [(ZeRO3(), 2, 23.2, 12.0), (ZeROInfinity(), 2, 11.5, 1.15), (ZeROInfinity(on="host"), 1, 11.5, 2.05),
     (HSDP(), 4, 23.2, 12.0)], ids=str,
)  # fmt: skip
def test_new_buckets_need_no_room_for_the_whole_model(strategy: Any, ranks: int, limit: float, between: float) -> None:
    """Assembled shards took 23.8 MB between two steps; a rank keeps 11.7 MB and moves buckets.

    A step takes up to 22.6 MB. Offloaded shards come to the device bucket by bucket, not all 11.7 MB at once.
    """
    changes = [Change(2, "bucket_mb", 0.05), Change(4, "bucket_mb", 0.1)]
    e = lesson(strategy=strategy, ranks=ranks, memory_mb=limit)
    require_memory(e, "bucket_mb", 0.05)
    sessions, model = run(e, *changes), simulate(e, changes=changes)
    peaks = model.samples[(model.samples.name == "memory peak") & (model.samples["rank"] == 0)].value
    for found in (seen(sessions[0], "memory peak"), list(peaks)):
        assert max(found) < limit * 1e6
        assert any(peak == pytest.approx(between * 1e6, rel=0.03) for peak in found), "between two steps"
    ours, plain = run(many(ranks, strategy=strategy), *changes), run(many(ranks, strategy=strategy))
    assert all(torch.equal(weights(one), weights(other)) for one, other in zip(ours, plain, strict=True))


@pytest.mark.long
def test_offloading_shards_assembles_no_model() -> None:
    e = lesson(strategy=ZeRO3(), memory_mb=24.0)
    for to in (ZeROInfinity(), ZeROInfinity(on="host"), ZeROOffload()):
        require_memory(e, "strategy", to)
        session = run(replace(e, steps=8), Change(3, "strategy", to))[0]
        assert max(seen(session, "memory peak")) < 24e6
        switch = [row for row in session.record if row[1] == "switch"]
        whole = 0 if isinstance(to, ZeROInfinity) else session.layout.byte_count // 2  # its parameters are whole
        assert [row[6] for row in switch] == [pytest.approx(whole, rel=0.01)]


def test_an_unpredicted_change_that_exceeds_memory_ends_the_run() -> None:
    """A planned change does not pass a lab's check. It ends the run with a reason."""
    e = lesson(strategy=ZeROInfinity(), memory_mb=14.0)
    with pytest.raises(OutOfMemory, match="needs"):
        simulate(e, changes=[Change(3, "strategy", DDP())])
    sessions = live(e, (Change(3, "strategy", DDP()),))
    ended(sessions)
    assert {s.phase for s in sessions} == {"failed"}
    assert any("between two steps" in s.error["text"] for s in sessions if s.error)


def test_settings_without_a_simulation_are_not_checked_in_advance() -> None:
    e = lesson(memory_mb=1.0)
    require_memory(e.set("strategy", TorchDDP()))
    with pytest.raises(KnobError, match="needs"):
        require_memory(e)


def test_memory_of_a_strategys_first_round_is_predicted_and_enforced() -> None:
    """DiLoCo has an outer momentum from its first round on, which the first step does not show."""
    e = lesson(strategy=DiLoCo(every=4), steps=12)
    peaks = seen(run(e)[0], "memory peak")
    limit = (peaks[1] + max(peaks)) / 2e6
    assert max(peaks) > 1.1 * peaks[1]
    with pytest.raises(KnobError, match="needs"):
        require_memory(replace(e, memory_mb=limit))
    sessions = live(replace(e, memory_mb=limit))
    ended(sessions)
    assert {s.phase for s in sessions} == {"failed"}


@pytest.mark.parametrize(("strategy", "ranks"), [(HSDP(), 4), (ZeRO3(), 2), (ZeROInfinity(on="host"), 2)], ids=str)
def test_memory_of_sharded_gradients_is_predicted(strategy: Any, ranks: int) -> None:
    """A bucket has memory from its first gradient on. Gathered parameters stay until the next exchange begins."""
    e = lesson(strategy=strategy, ranks=ranks, batch=8, steps=3, pace=60.0, bucket_mb=1.0,
               fabric=Fabric(link=Link(bandwidth=1000, latency=0.2)))  # fmt: skip
    peaks = seen(run(e)[0], "memory peak")
    assert max(peaks) == peaks[-1], "it is not the first step's"
    assert simulate(e).memory()[0].peak == pytest.approx(max(peaks), rel=0.02)


@pytest.mark.parametrize("partition", [Tensor(), Pipeline()], ids=lambda p: type(p).__name__)
@pytest.mark.parametrize("after", [0, 2])
def test_memory_of_the_first_move_into_a_partition_is_predicted_from_shapes(partition: Any, after: int) -> None:
    """At the start the optimizer has no state to move."""
    e = lesson(batch=4, steps=3)
    changes = [Change(after, "partition", partition)] if after else []
    e = e if after else replace(e, partition=partition)
    session, model = run(e, *changes)[0], simulate(e, changes=changes).samples
    foreseen = model[(model.name == "memory peak") & (model["rank"] == 0)].value
    # buckets that gloo still holds
    assert list(foreseen) == pytest.approx(seen(session, "memory peak"), rel=0.02, abs=8e5)


@pytest.mark.parametrize("more", [{}, {"strategy": ZeRO3()}, {"strategy": ZeROInfinity()}, {"partition": Tensor()},
                                  {"partition": Pipeline()}], ids=str)  # fmt: skip
def test_advice_in_a_refusal_suffices(more: dict[str, Any]) -> None:
    """The advice names no setting in force and no refused one, and its number suffices."""
    task = ByteGPT(layers=1, width=32, heads=4, context=32)
    e = Experiment(task=task, ranks=2, steps=2, eval_every=1, pace=5.0, **more)
    texts: list[str] = []
    memory_mb = 0.3
    while len(texts) < 8:
        try:
            simulate(e.set("memory_mb", memory_mb))
            break
        except OutOfMemory as refused:
            texts.append(str(refused).splitlines()[0])
        advice = texts[-1].partition("; take ")[2]
        for name in re.findall(r"ZeRO\w+", advice):
            assert e.set("strategy", name) and name != type(e.strategy).__name__
        assert "checkpoint" not in advice or e.set("partition.checkpoint", "units")
        assert ("smaller batch" in advice) == (" in a step (" in texts[-1])
        exact = re.search(r"memory_mb=([\d.]+)$", advice)
        floor = re.search(r"memory_mb above ([\d.]+); a step may need more$", advice)
        assert exact or floor, advice
        memory_mb = float(exact[1]) if exact else 2 * float(floor[1]) if floor else 0.0
    assert len(texts) < 8 and len([text for text in texts if "in a step" in text]) <= 1, texts
