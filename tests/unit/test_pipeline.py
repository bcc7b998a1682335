"""Tests pipelines on real ranks: each stage computes its part, and the whole learns as one rank would."""

from __future__ import annotations

import json
import math
import threading
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from tests.agree import memory_alike
from tests.piped import DEPTH, WIDTH, alone, assembled, batches, deep, held_out, loss, piped, same, seen
from tests.ranks import ended, live, make_fitting, run, shipped, toy
from tests.waiting import until
from workbench import simulate
from workbench.compressors import E3M0, QSGD, Cast, Compressor, Dense, ErrorFeedback, PowerSGD, TopK
from workbench.experiment import Experiment, partition_rules
from workbench.fabric import Fabric, Link
from workbench.host.placement.stage_cuts import cut_model
from workbench.optimizers import SGD, AdamW, Optimizer
from workbench.partitions import Pipeline, Whole
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, Schedule, ZeroBubble
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, Strategy
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

GPT = ByteGPT(layers=6, width=32, context=16, heads=2)


@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB(), ZeroBubble()], ids=str)
@pytest.mark.parametrize(("ranks", "stages", "micros"), [(2, 2, 4), (3, 3, 2), (4, 2, 4), (2, 2, 1), (4, 4, 8)])
def test_a_pipeline_is_bit_identical_to_one_process_with_the_same_micro_batches(
    schedule: Schedule, ranks: int, stages: int, micros: int
) -> None:
    e = piped(ranks, partition=Pipeline(stages=stages, micros=micros, schedule=schedule))
    sessions = run(e)
    same(sessions, stages, alone(e, (6, ranks // stages, micros)))
    assert all(0 < len(s.layout.order) < 2 * DEPTH + 2 for s in sessions)
    assert [seen(s, "loss") for s in sessions[:stages]] == [seen(sessions[0], "loss")] * stages


SHAPES = [(2, 2, 4, 2), (2, 2, 4, 3), (4, 2, 8, 3), (2, 2, 8, 2)]


@pytest.mark.parametrize(("ranks", "stages", "micros", "chunks"), SHAPES)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=1)], ids=["DDP", "LocalSGD"])
def test_several_pieces_per_stage_are_bit_identical_to_one_process(
    strategy: Strategy, ranks: int, stages: int, micros: int, chunks: int
) -> None:
    way = Pipeline(stages=stages, micros=micros, schedule=Interleaved(chunks=chunks))
    e = piped(ranks, partition=way, strategy=strategy, eval_every=2, optimizer=SGD(momentum=0.0))
    sessions = run(e)
    want = alone(e, (6, ranks // stages, micros))
    if isinstance(strategy, DDP):
        same(sessions, stages, want)
    for name, x in assembled(sessions, stages).items():
        torch.testing.assert_close(x, want[name].detach(), rtol=1e-5, atol=1e-6)
    whole = run(e.set("partition", Pipeline(stages=stages, micros=micros)))
    assert seen(sessions[0], "held_out") == seen(whole[0], "held_out")


@pytest.mark.parametrize("optimizer", [AdamW(), SGD()], ids=["AdamW", "SGD"])
def test_a_live_switch_to_a_pipeline_and_back_loses_nothing(optimizer: Optimizer) -> None:
    """From whole to two stages and back: parameters and moments stay bit-identical."""
    e = piped(2, 12, eval_every=2, optimizer=optimizer)
    sessions = run(e, Change(4, "partition", Pipeline()), Change(8, "partition", Whole()))
    same(sessions, 1, alone(e, (4, 2, 1), (4, 1, 4), (4, 2, 1)))
    assert not sessions[0].record.noted("refused")


def test_a_switch_moves_only_missing_parts() -> None:
    """From two stages to four, then whole on each of four: the move sends the fewest bytes, as in its Mark."""
    e = piped(4, 12)
    ways = [Pipeline(), Pipeline(stages=4), Whole()]
    sessions = run(e, *[Change(3 * (k + 1), "partition", way) for k, way in enumerate(ways)])
    marks = [json.loads(m[3]) for m in sessions[0].record.noted("partition")]
    assert [m["stages"] for m in marks] == [2, 4, 1]
    want = deep().state_dict()
    whole = 4 * (3 * sum(x.numel() for x in want.values()) + len(want))  # parameters, AdamW's moments, and its counters
    halves, fourths = (cut_model(e.set("partition", way), deep(), e.task.build()).names for way in ways[:2])
    lacks = [name for r in range(4) for name in fourths[r] - halves[r % 2]]
    some = sum(4 * (3 * want[name].numel() + 1) for name in lacks)
    assert lacks and [m["nbytes"] for m in marks] == [0, some, 3 * whole]
    assert all(m["seconds"] > 0 for m in marks)
    for name, x in alone(e, (3, 4, 1), (3, 2, 4), (3, 1, 4), (3, 4, 1)).items():  # gloo sums in another order
        torch.testing.assert_close(assembled(sessions, 1)[name], x.detach(), rtol=1e-4, atol=1e-5)


def test_a_partition_mark_has_the_duration_of_the_move() -> None:
    """On the virtual clock over a slow Link, switching back takes the bytes' time, the first switch nearly none."""
    slow = Fabric(link=Link(bandwidth=1.0))
    changes = Change(3, "partition", Pipeline()), Change(6, "partition", Whole())
    found = simulate(piped(2, 9, pace=2.0, fabric=slow), changes=changes)
    into, out = (detail for _, _, detail in found.details("partition"))
    spans = found.spans[(found.spans.lane == "switch") & (found.spans["rank"] == 0)]
    assert into["nbytes"] == 0 < into["seconds"] < 0.1 * out["seconds"], "ranks agree on what there is to move"
    assert 4e-6 * out["nbytes"] <= out["seconds"] <= 8e-6 * out["nbytes"], "two ports, each with its own half"
    assert out["seconds"] <= (spans.t1 - spans.t0).iloc[-1]


def test_the_held_out_loss_is_that_of_the_whole_model() -> None:
    e = piped(4, 6, eval_every=3)
    whole, cut = run(piped(2, 6, eval_every=3)), run(e.set("partition", Pipeline(micros=1)))
    assert seen(cut[0], "held_out") == seen(whole[0], "held_out") and len(seen(cut[0], "held_out")) == 3
    assert not any(seen(s, "held_out") for s in cut[1:])
    assert seen(cut[0], "drift") == [0.0] * 3


def test_a_replica_is_clipped_as_a_whole() -> None:
    e = piped(4, clip=0.5, partition=Pipeline(), optimizer=SGD(momentum=0.0), pace=2.0)
    sessions = run(e)
    rows = simulate(e, real=True).timeline.samples.rows()
    for rank, s in enumerate(sessions):
        assert rows.value[rows.equal("name", "grad_norm") & (rows.rank == rank)].tolist() == seen(s, "grad_norm")
    want = alone(e, (6, 2, 4), longest=0.5)
    for name, x in assembled(sessions, 2).items():
        torch.testing.assert_close(x, want[name], rtol=1e-5, atol=1e-7)
    norms = [seen(s, "grad_norm") for s in sessions]
    assert norms == [norms[0]] * 4 and max(norms[0]) > 0.5


PIPED = piped(4, partition=Pipeline())
PARTED = [name for name, cls in shipped(Strategy).items()
          if partition_rules.explain_refusal(replace(PIPED, strategy=make_fitting(cls, 2))) is None]  # fmt: skip


def test_at_least_15_strategies_support_pipelines() -> None:
    assert len(PARTED) >= 15 and {"DDP", "LocalSGD", "DiLoCo", "StreamingDiLoCo", "SlowMo", "Gossip"} <= set(PARTED)


OF_WHAT_IT_HOLDS = {"StreamingDiLoCo", "LowPrecisionDecentralized"}  # their fragments and scales depend on buckets


@pytest.mark.parametrize("name", sorted({*PARTED} - OF_WHAT_IT_HOLDS))
def test_a_strategy_does_the_same_between_pipelines_as_between_whole_replicas(name: str) -> None:
    """Two replicas of two stages with one micro-batch give exactly the result of two whole ranks."""
    strategy = make_fitting(shipped(Strategy)[name], 2)
    e = piped(4, 10, strategy=strategy, partition=Pipeline(micros=1))
    cut, whole = run(e), run(piped(2, 10, strategy=strategy))
    for replica in range(2):
        found = assembled(cut, 2, replica)
        for place in whole[replica].layout.order:
            torch.testing.assert_close(found[place.name], place.param.data, rtol=0, atol=0)


@pytest.mark.parametrize("name", PARTED)
def test_partition_changes_work_under_every_strategy(name: str) -> None:
    """Makes one change after the other under the strategy. Replicas are equal after the switch to DDP."""
    strategy = make_fitting(shipped(Strategy)[name], 2)
    e = piped(4, 18, strategy=strategy)
    ways = [Pipeline(), Whole(), Pipeline(schedule=Interleaved(), micros=2)]
    changes = [Change(4 * (k + 1), "partition", way) for k, way in enumerate(ways)]
    sessions = run(e, *changes, Change(16, "strategy", "DDP"))
    assert not sessions[0].record.noted("refused")
    first, second = (assembled(sessions, 2, replica) for replica in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert len(sessions[0].record.noted("partition")) == 3


@pytest.mark.parametrize("name", ["SlowMo", "DiLoCo", "BMUF"])
def test_an_outer_momentum_moves_with_its_parameters(name: str) -> None:
    """Pieces change at the ends of rounds. The result is as without the change; a new momentum would be far off."""
    strategy = replace(shipped(Strategy)[name](), every=2)
    e = piped(4, 12, strategy=strategy, partition=Pipeline(micros=2), optimizer=SGD(momentum=0.0))
    turned = run(e, Change(4, "schedule", Interleaved()), Change(8, "schedule", OneFOneB()))
    plain = run(e)
    assert len(turned[0].record.noted("partition")) == 3
    for name_, x in assembled(plain, 2).items():  # SlowMo's momentum has other units, which rounds
        torch.testing.assert_close(assembled(turned, 2)[name_], x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("compressor", [ErrorFeedback(of=TopK(density=0.1)), QSGD(), PowerSGD()], ids=str)
def test_gradients_between_replicas_of_stages_are_compressed(compressor: Compressor) -> None:
    e = piped(4, 9, compressor=compressor, partition=Pipeline())
    sessions = run(e, Change(5, "partition", Whole()), Change(7, "partition", Pipeline()))
    dense, less = (sum(n for _, name, n in s.record.comm() if name.startswith(("all_", "reduce")))
                   for s in (run(e.set("compressor", Dense()))[0], sessions[0]))  # fmt: skip
    assert less != dense and not sessions[0].record.noted("refused")
    first, second = (assembled(sessions, 2, replica) for replica in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


CODECS = [(Cast(to="fp16"), 2), (QSGD(), 7.84), (E3M0(), 8), (TopK(density=0.1), 5)]


@pytest.mark.parametrize(("codec", "less"), CODECS, ids=[str(codec) for codec, _ in CODECS])
def test_activations_and_gradients_between_stages_are_compressed(codec: Compressor, less: int) -> None:
    """Fewer bytes both ways; engine and simulator agree exactly; the codec can change live."""
    e = piped(2, 6, pace=2.0, bucket_mb=1.0, task=toy(model=wide, data=broad, loss=loss, evaluate=None))
    e = e.set("partition", Pipeline(activations=codec, gradients=Dense() if isinstance(codec, TopK) else codec))
    changes = [Change(3, "activations", Dense()), Change(4, "gradients", Dense())]
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused")
    for rank, what in ((0, "activation"), (1, "gradient")):
        sent = {step: sum(n for k, name, n in sessions[rank].record.comm() if k == step and f"send {what}" in name)
                for step in (2, 5)}  # fmt: skip
        fewer = 10 * (1 if rank else 0.5) if isinstance(codec, TopK) else less  # gradients need no indices
        assert sent[5] / sent[2] == pytest.approx(fewer, rel=0.05)
    simulated = simulate(e, changes=changes, real=True).timeline.samples.rows()
    mine = simulated.value[simulated.equal("name", "loss") & (simulated.rank == 0)].tolist()
    if not isinstance(codec, QSGD):  # ranks as threads share torch's random numbers, but draw these from their own
        assert mine == seen(sessions[0], "loss")
    assert all(math.isfinite(x) for x in mine) and mine[-1] < mine[0]


def wide() -> nn.Module:
    """Returns two layers with large activations between them."""
    rng = torch.Generator().manual_seed(3)
    model = nn.Sequential(nn.Linear(WIDTH, 200), nn.Sequential(nn.Tanh(), nn.Linear(200, 4)))
    for p in model.parameters():
        p.data = 0.2 * torch.randn(p.shape, generator=rng)
    return model


def broad(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(32, WIDTH, generator=rng), torch.randn(32, 4, generator=rng))] * 4


@pytest.mark.parametrize("masked", [True, False])
def test_the_gradient_of_top_k_activations_equals_autograds(masked: bool) -> None:
    """Compares with autograd in one process, through the same choice, or past it."""
    way = Pipeline(micros=1, activations=TopK(density=0.1), mask=masked)
    task = toy(model=wide, data=broad, loss=loss, evaluate=None)
    sessions = run(piped(2, 1, task=task, partition=way, optimizer=SGD(momentum=0.0)))
    model, (x, y) = wide(), broad(0, 1, 0)[0]
    between = model[0](x)
    kept = torch.zeros_like(between).view(-1)
    chosen = TopK(density=0.1).encode(between.detach())[1].long()
    kept[chosen] = between.detach().view(-1)[chosen]
    came = kept.view(between.shape).requires_grad_()
    nn.functional.mse_loss(model[1](came), y).backward()
    grad = torch.zeros_like(kept)
    grad[chosen] = came.grad.view(-1)[chosen]
    between.backward(grad.view(between.shape) if masked else came.grad)
    for name, p in model.named_parameters():
        torch.testing.assert_close(assembled(sessions, 2)[name], p.detach() - 1e-2 * p.grad, rtol=1e-5, atol=1e-7)


def test_all_other_settings_change_live_under_a_pipeline() -> None:
    e = piped(4, 20, partition=Pipeline(), eval_every=5)
    asked = [("bucket_mb", 0.1), ("micros", 8), ("schedule", "GPipe"), ("optimizer", SGD()), ("lr", 1e-3),
             ("clip", 1.0), ("strategy", LocalSGD(every=2)), ("strategy", "DDP")]  # fmt: skip
    sessions = run(e, *[Change(2 * (k + 1), path, value) for k, (path, value) in enumerate(asked)])
    assert not sessions[0].record.noted("refused")
    assert len(sessions[0].record.noted("change")) == len(asked)
    first, second = (assembled(sessions, 2, replica) for replica in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_engine_and_the_simulator_are_bit_identical() -> None:
    e = piped(4, 13, eval_every=3, pace=4.0, partition=Pipeline())
    changes = [Change(3, "schedule", GPipe()), Change(5, "stages", 4), Change(7, "partition", Pipeline(micros=8)),
               Change(8, "schedule", ZeroBubble()), Change(9, "schedule", Interleaved(chunks=3)),
               Change(11, "schedule", OneFOneB())]  # fmt: skip
    sessions = run(e, *changes)
    simulated = simulate(e, changes=changes, real=True)
    rows = simulated.timeline.samples.rows()
    for name in ("loss", "held_out"):
        for rank in range(4):
            mine = rows.value[rows.equal("name", name) & (rows.rank == rank)].tolist()
            assert mine == seen(sessions[rank], name)
    sizes = simulate(e, changes=changes)
    for each in (simulated, sizes):
        spans = each.timeline.spans.rows()
        for rank, s in enumerate(sessions):
            ours = Counter(s.record.comm())
            here = (spans.rank == rank) & spans.equal("lane", "comm")
            sent = [getattr(spans, column)[here].tolist() for column in ("step", "name", "nbytes")]
            assert ours == Counter(zip(*sent, strict=True))


@pytest.mark.parametrize("stage", range(3))
def test_when_a_stage_fails_the_other_stages_leave(stage: int) -> None:
    def failing(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        name = threading.current_thread().name
        calls[name] = calls.get(name, 0) + 1
        if name == f"rank {stage} training" and calls[name] > 9:
            raise ValueError("on purpose")
        return loss(model, pair)

    calls: dict[str, int] = {}
    task = toy(model=deep, data=batches, loss=failing, evaluate=None)
    sessions = live(piped(3, 0, partition=Pipeline(stages=3), task=task))
    ended(sessions)
    assert "on purpose" in sessions[stage].error["text"]
    assert all(s.error is None or s.error["consequence"] for s in sessions if s is not sessions[stage])


def test_when_evaluation_fails_on_one_stage_the_other_stages_leave() -> None:
    def failing(model: nn.Module) -> float:
        if threading.current_thread().name == "rank 0 training":
            raise ValueError("on purpose")
        return held_out(model)

    task = toy(model=deep, data=batches, loss=loss, evaluate=failing)
    sessions = live(piped(3, 4, partition=Pipeline(stages=3), task=task))
    ended(sessions)
    assert "on purpose" in sessions[0].error["text"]


def test_a_pipeline_can_be_paused_and_stopped() -> None:
    sessions = live(piped(4, 0, partition=Pipeline(), pace=20.0))
    until(lambda: sessions[0].rank.step > 3)
    sessions[0].request({"kind": "pause", "id": "a"})
    until(lambda: sessions[0].phase == "paused")
    sessions[0].request({"kind": "change", "at_step": 0, "path": "partition", "value": "Whole", "id": "b"})
    sessions[0].request({"kind": "resume", "id": "c"})
    until(lambda: bool(sessions[0].record.noted("partition")[1:]))
    sessions[0].request({"kind": "stop", "id": "d"})
    ended(sessions)
    assert all(s.phase == "stopped" and s.error is None for s in sessions)


def test_a_step_is_equally_long_on_every_stage_including_waits_for_the_first() -> None:
    """Later stages learn of a step when the first one begins it. Until then they wait within their step."""
    ours = run(piped(3, 8, partition=Pipeline(stages=3, micros=1), pace=150.0))
    took = [[t1 - t0 for step, lane, _, _, t0, t1, _ in s.record if lane == "step" and step > 2] for s in ours]
    assert all(sum(each) == pytest.approx(sum(took[0]), rel=0.15) for each in took)
    stood = [sum(t1 - t0 for _, _, name, _, t0, t1, _ in s.record if name == "next step") for s in ours]
    assert stood[2] > max(0.02, 10 * stood[0]), "a busy machine lets the first stage wait a moment, too"


@pytest.mark.parametrize(("stages", "chunks"), [(2, 3), (4, 2)])
def test_memory_of_several_pieces_per_stage_is_right_with_sizes_only(stages: int, chunks: int) -> None:
    way = Pipeline(stages=stages, micros=4, schedule=Interleaved(chunks=chunks))
    e = Experiment(task=GPT, ranks=stages, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0, partition=way)
    memory_alike(e, run(e), peak=0.001)


def test_a_stage_holds_its_part_and_as_many_activations_as_are_in_flight() -> None:
    """Engine and simulator report the same in every category; with sizes only the peak is within 5 %."""
    e = Experiment(task=GPT, ranks=4, steps=5, pace=8.0, bucket_mb=0.05, eval_every=0)
    e = e.set("partition", Pipeline(stages=4, micros=8))
    ours = run(e)
    memory_alike(e, ours)
    for session in ours:
        here = {what: value for _, what, _, value in session.record.samples}
        assert here["memory gradients"] == here["memory parameters"], "kept once, though eight micro-batches add up"
    first, last = (seen(s, "memory activations")[-1] for s in (ours[1], ours[2]))
    whole = run(e.set("partition", Pipeline(stages=4, micros=8, schedule=GPipe())))
    most = seen(whole[1], "memory activations")[-1]
    assert first / most == pytest.approx(3 / 8, rel=0.01) and last / most == pytest.approx(2 / 8, rel=0.01)
