"""Tests all ZeRO stages: bit-identical to one process, with the paper's bytes sent and stored, and switched live."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import ended, experiment, live, run, toy, weights
from tests.sim.insides import simulated
from tests.sim.virtual import comm
from workbench import simulate
from workbench.compressors import DGC, QSGD, Compressor, OneBit, PowerSGD, ScaleCom, TopK
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.memory.storages import count_bytes, find_optimizer_state
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.transfer import handover
from workbench.optimizers import LARS, SGD, Adam, AdamW
from workbench.rank import Rank, StrategyError
from workbench.settings import Change, KnobError
from workbench.sim.teach.laws import trained
from workbench.strategies import DDP, Strategy, ZeRO1, ZeRO2, ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

STAGES = [ZeRO1(), ZeRO2(), ZeRO3()]
stages = pytest.mark.parametrize("stage", STAGES, ids=["1", "2", "3"])
LAYERS = 0.01  # MB: the toy's parameters are in several buckets


def moments(session: Session) -> dict[str, torch.Tensor]:
    """Returns a rank's optimizer state by name."""
    return {name: x.clone() for name, x in read_slots(session.layout, session.optimizer).items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(x, other[name]) for name, x in one.items())


def _seeded(model: nn.Module) -> None:
    """Draws the same parameters in every run: ranks that are threads share torch's global generator."""
    rng = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = 0.1 * torch.randn(p.shape, generator=rng)


class Tied(nn.Module):
    """A model with a weight that is read twice, and a layer that backward computes again."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.middle, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64)
        self.out.weight = self.into.weight
        self.last = nn.Linear(64, 4)
        _seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda x: torch.tanh(self.middle(x)), self.into(x), use_reentrant=False)
        return self.last(self.out(y))


@stages
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9, nesterov=True)], ids=["AdamW", "SGD"])
def test_twenty_steps_are_bit_identical_to_summation_in_rank_order(stage: Strategy, ranks: int, optimizer: Any) -> None:
    """The simulator's all-reduce adds in the order of the ranks; gloo's ring does not for three or more ranks."""
    found = run(experiment(ranks, 20, strategy=stage, optimizer=optimizer, bucket_mb=LAYERS))
    for want in (trained(s, ranks, 20, optimizer=optimizer, bucket_mb=LAYERS)[1] for s in (DDP(), stage)):
        assert all(torch.equal(weights(s), x) for s, x in zip(found, want, strict=True))


@pytest.mark.parametrize("ranks", [8, 17, 40])
def test_many_ranks_sum_in_order_too(ranks: int) -> None:
    """torch sums eight or more rows in another order."""
    (ours, *_), (plain, *_) = (trained(s, ranks, 4, optimizer=AdamW(), bucket_mb=LAYERS)[1]
                               for s in (ZeRO1(), DDP()))  # fmt: skip
    assert torch.equal(ours, plain)


def test_a_rank_updates_only_its_share_and_the_rest_of_a_step_takes_as_long() -> None:
    for ranks in (2, 4):
        spans = simulate(experiment(ranks, 6, strategy=ZeRO1(), pace=40.0, bucket_mb=LAYERS)).spans
        last = spans[(spans["rank"] == 0) & (spans.step == 5)]
        took = last[last.name == "update"].t1.sum() - last[last.name == "update"].t0.sum()
        assert took == pytest.approx(0.1 * 0.040 / ranks, rel=0.01)
        whole = last[last.lane == "step"]
        assert (whole.t1 - whole.t0).item() == pytest.approx(0.036 + took, rel=0.01)


class ByBuckets(DDP):
    """DDP that updates bucket by bucket and does not declare clipping."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        async for bucket in rank.backward(1 / rank.size):
            await rank.wait(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        for bucket in await rank.params():
            await rank.update(bucket)


def test_whole_buckets_can_be_updated_one_by_one_but_not_with_clipping() -> None:
    e = experiment(2, 8, strategy=ByBuckets(), bucket_mb=LAYERS)
    for ours, plain in zip(run(e), run(e.set("strategy", DDP())), strict=True):
        assert torch.equal(weights(ours), weights(plain))
    for clipped in (e.set("clip", 0.1), e.set("clip", 0.1).set("pace", 5.0)):
        with pytest.raises((AssertionError, StrategyError), match="one bucket's gradients have no global norm"):
            run(clipped) if not clipped.pace else simulate(clipped, real=True)


@stages
@pytest.mark.parametrize("ranks", [2, 4])
def test_tied_weights_and_checkpointing_train_like_ddp(stage: Strategy, ranks: int) -> None:
    task = toy(model=Tied, data=lambda rank, ranks, seed: _pairs(rank), evaluate=None)
    rest: Any = {"task": task, "optimizer": AdamW(), "bucket_mb": LAYERS}
    _, plain = simulated(experiment(ranks, 20, strategy=DDP(), pace=5.0, **rest))
    for ours, want in zip(run(experiment(ranks, 20, strategy=stage, **rest)), plain, strict=True):
        assert torch.equal(weights(ours), weights(want))


def _pairs(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, 64, generator=rng), torch.randn(4, 4, generator=rng)) for _ in range(8)]


@stages
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_each_rank_stores_its_share_and_sends_as_much_as_ddp(stage: Strategy, ranks: int) -> None:
    sessions = run(experiment(ranks, 6, strategy=stage, optimizer=Adam(), bucket_mb=LAYERS))
    plain = run(experiment(ranks, 6, optimizer=Adam(), bucket_mb=LAYERS))
    whole = count_bytes(find_optimizer_state(plain[0].optimizer))
    kept = [count_bytes(find_optimizer_state(s.optimizer)) for s in sessions]
    counters = 4 * 2 * len(plain[0].layout.order) * ranks  # a step counter for every piece
    assert sum(kept) - counters <= whole <= sum(kept) and max(kept) <= whole / ranks + counters
    sent, usual = (sum(n for step, _, n in s[0].record.comm() if step == 5) for s in (sessions, plain))
    padded = 2 * (ranks - 1) * 4 * len(sessions[0].layout.buckets)
    assert usual <= sent <= usual + padded


@pytest.mark.long
def test_stage_two_stores_its_share_of_the_gradients_and_stage_one_all() -> None:
    held = {}
    for stage, ranks in itertools.product((DDP(), ZeRO1(), ZeRO2()), (2, 4)):
        e = Experiment(task=ByteGPT(layers=4), ranks=ranks, steps=6, eval_every=0, strategy=stage, optimizer=AdamW(),
                       bucket_mb=0.1, batch=2)  # fmt: skip
        live, model = run(e)[0].record, simulate(e.set("pace", 10.0), real=False).samples
        told = {name: value for _, name, _, value in live.samples}
        said = model[model["rank"] == 0].groupby("name", observed=True).value.last()
        psi = told["memory parameters"]
        held[type(stage), ranks] = [told[f"memory {what}"] / psi for what in ("gradients", "optimizer state")]
        for what in ("parameters", "optimizer state"):
            assert said[f"memory {what}"] == pytest.approx(told[f"memory {what}"], rel=0.01)
        assert said["memory gradients"] == pytest.approx(told["memory gradients"], rel=0.15)
    for ranks in (2, 4):
        assert held[DDP, ranks] == pytest.approx([1.0, 2.0], rel=0.01)
        assert held[ZeRO1, ranks] == pytest.approx([1.0, 2.0 / ranks], rel=0.02)
        gradients, state = held[ZeRO2, ranks]
        assert 1 / ranks <= gradients <= 1 / ranks + 0.08 and state == pytest.approx(2.0 / ranks, rel=0.02)


def test_fewer_simultaneous_exchanges_take_less_memory_and_change_nothing_else() -> None:
    most, sent, found = [], [], []
    for outstanding in (1, 2, 1024):
        stage = ZeRO2(outstanding=outstanding)
        e = Experiment(task=ByteGPT(layers=4), ranks=2, steps=4, eval_every=0, strategy=stage, optimizer=AdamW(),
                       bucket_mb=0.1, batch=2)  # fmt: skip
        record = run(e)[0].record
        most.append(max(value for _, name, _, value in record.samples if name == "memory buffers in flight"))
        sent.append(sorted(record.comm()))
        found.append(weights(run(experiment(2, 8, strategy=stage, optimizer=AdamW(), bucket_mb=LAYERS))[0]))
    assert most[0] < most[1] < most[2] and sent[0] == sent[1] == sent[2]
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9)], ids=["AdamW", "SGD"])
def test_live_switches_in_and_out_change_only_the_placement_of_state(ranks: int, optimizer: Any) -> None:
    cuts = [Change(9, "bucket_mb", 1.0), Change(16, "bucket_mb", LAYERS)]
    there = [Change(4, "strategy", "ZeRO1"), cuts[0], Change(12, "strategy", "ZeRO2"), cuts[1],
             Change(19, "strategy", "DDP"), Change(21, "strategy", "ZeRO2")]  # fmt: skip
    e = experiment(ranks, 24, optimizer=optimizer, bucket_mb=LAYERS)
    there_and_back = [*there, Change(23, "strategy", "DDP")]
    done, moved = trained(DDP(), ranks, 24, there_and_back, optimizer=optimizer, bucket_mb=LAYERS)
    assert [c.path for c in done.changes] == [*(c.path for c in there), "strategy"]
    _, plain = trained(DDP(), ranks, 24, cuts, optimizer=optimizer, bucket_mb=LAYERS)
    assert all(torch.equal(x, y) for x, y in zip(moved, plain, strict=True))
    sessions = run(e, *there)
    asked = [[row for row in rows if "move" in row[1] or "slots" in row[1]] for rows in (
        sessions[0].record.comm(), comm(simulate(e.set("pace", 5.0), changes=there), 0),
        comm(simulate(e.set("pace", 5.0), changes=there, real=False), 0))]  # fmt: skip
    assert asked[0] == asked[1] == asked[2] and {4, 9, 12, 16, 19, 21} >= {step for step, _, _ in asked[0]}
    if ranks == 2:  # two numbers have one sum
        back, usual = run(e, *there, Change(23, "strategy", "DDP")), run(e, *cuts)
        for one, other in zip(back, usual, strict=True):
            assert torch.equal(weights(one), weights(other)) and same(moments(one), moments(other))


@stages
def test_leaving_zero_sends_missing_state_and_entering_it_sends_nothing(stage: Strategy) -> None:
    e = experiment(4, 12, optimizer=SGD(momentum=0.9), bucket_mb=LAYERS)
    sessions = run(e, Change(4, "strategy", type(stage).__name__),
                   Change(8, "strategy", "DDP"))  # fmt: skip
    moved = [[(step, n) for step, what, n in s.record.comm() if "move" in what] for s in sessions]
    assert {step for rows in moved for step, _ in rows} == {8}
    lacked = 3 * count_bytes(find_optimizer_state(sessions[0].optimizer))  # each of four had a quarter
    assert sum(n for rows in moved for _, n in rows) == lacked


def test_state_corrupted_in_transfer_fails_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    carry = handover.move_state

    async def spoilt(rank: Rank, state: Any, *how: Any) -> Any:
        given = await carry(rank, state, *how)
        if rank.id == 1:
            next(x for x in given.values() if x.numel() > 1).view(-1)[0] += 1.0
        return given

    monkeypatch.setattr(handover, "move_state", spoilt)
    sessions = live(experiment(2, 8, optimizer=AdamW()), (Change(4, "strategy", "ZeRO1"),))
    ended(sessions)
    assert any("changed while ranks resharded" in s.error["text"] for s in sessions if s.error)


@stages
def test_the_gradient_is_clipped_as_under_ddp(stage: Strategy) -> None:
    clipped = {"optimizer": SGD(momentum=0.9), "bucket_mb": LAYERS, "clip": 0.05}
    ours, plain = run(experiment(2, 8, strategy=stage, **clipped)), run(experiment(2, 8, **clipped))
    norms = [[value for _, name, _, value in s[0].record.samples if name == "grad_norm"] for s in (ours, plain)]
    assert len(norms[0]) == 8 and norms[0] == pytest.approx(norms[1], rel=1e-4) and min(norms[0]) > 0.05
    torch.testing.assert_close(weights(ours[0]), weights(plain[0]), rtol=1e-5, atol=1e-7)
    assert torch.equal(weights(ours[0]), weights(ours[1]))


@stages
@pytest.mark.parametrize("of", [TopK, PowerSGD, OneBit, QSGD, ScaleCom], ids=lambda cls: str(cls.__name__))
def test_gradients_are_compressed_and_parameters_are_not(stage: Strategy, of: type[Compressor]) -> None:
    e = experiment(2, 10, compressor=of.usual(), optimizer=AdamW(), bucket_mb=LAYERS)
    ours, plain = run(e.set("strategy", stage)), run(e)
    assert torch.equal(weights(ours[0]), weights(plain[0])), "the shards of what DDP would have summed"
    names = {what.split()[0] for _, what, _ in ours[0].record.comm() if what != "all_reduce slots"}
    assert names == {what.split()[0] for _, what, _ in plain[0].record.comm()} | {"all_gather"}


def test_a_new_optimizer_takes_over_the_shards() -> None:
    changes = [Change(6, "optimizer", {"AdamW": {"beta1": 0.8}}), Change(10, "optimizer", {"SGD": {"momentum": 0.9}}),
               Change(15, "strategy", "DDP")]  # fmt: skip
    e = experiment(2, 18, optimizer=Adam(), bucket_mb=LAYERS)
    for ours, plain in zip(run(e.set("strategy", ZeRO1()), *changes), run(e, *changes[:2]), strict=True):
        assert torch.equal(weights(ours), weights(plain)) and same(moments(ours), moments(plain))


class Mine(torch.optim.SGD):
    """A user's optimizer that declares nothing."""


@stages
@pytest.mark.parametrize("own", [False, True], ids=["LARS", "own"])
def test_an_optimizer_that_cannot_be_divided_is_refused_with_the_reason(stage: Strategy, own: bool) -> None:
    name = type(stage).__name__
    if own:
        e = experiment(2, 6, task=toy(lambda params: Mine(params, 0.01)))
        sessions = live(e.set("strategy", stage))
        ended(sessions)
        assert all(s.error and "Mine is not known to step each element" in s.error["text"] for s in sessions)
    else:
        e = experiment(2, 6, optimizer=LARS())
        with pytest.raises(KnobError, match=rf"strategy={name}: it shards .* take optimizer=AdamW\(\) or SGD\(\)"):
            e.set("strategy", stage).checked()
    sessions = run(e, Change(3, "strategy", name))
    assert "shards the optimizer's state" in sessions[0].record.noted("refused")[0][3]
    assert isinstance(sessions[0].experiment.strategy, DDP)


class Scaled(torch.optim.SGD):
    """A user's optimizer that can be divided, with attributes of its own."""

    elementwise = True

    def __init__(self, params: Any) -> None:
        super().__init__(params, 0.01, momentum=0.9)
        self.scale = 2.0

    def step(self, closure: Any = None) -> Any:
        assert self.scale == 2.0
        return super().step(closure)


@stages
@pytest.mark.parametrize("own", [Scaled, partial(torch.optim.Adagrad, lr=0.01)], ids=["own", "Adagrad"])
def test_the_tasks_own_optimizer_is_divided_at_the_start_and_restored_at_the_end(stage: Strategy, own: Any) -> None:
    """Adagrad has its state from the start; a user's optimizer has state that torch does not know."""
    e = experiment(2, 12, task=toy(own), bucket_mb=LAYERS)
    for ours, plain in zip(run(e.set("strategy", stage), Change(8, "strategy", "DDP")), run(e), strict=True):
        assert torch.equal(weights(ours), weights(plain)) and same(moments(ours), moments(plain))


class Joined(nn.Module):
    """Two weights whose gradients autograd creates in one piece of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.empty(40, 64)), nn.Parameter(torch.empty(40, 64))
        _seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ torch.cat([self.a, self.b]).t())[:, :4]


@stages
def test_gradients_that_share_memory_are_released_one_by_one(stage: Strategy) -> None:
    task = toy(model=Joined, data=lambda rank, ranks, seed: _pairs(rank), evaluate=None)
    e = experiment(2, 6, task=task, bucket_mb=LAYERS)
    for ours, plain in zip(run(e.set("strategy", stage)), run(e), strict=True):
        assert torch.equal(weights(ours), weights(plain))


@stages
def test_compression_errors_are_measured_under_zero_too(stage: Strategy) -> None:
    e = experiment(2, 8, strategy=stage, compressor=TopK.usual(), bucket_mb=LAYERS)
    plain, measured = run(e), run(e.set("measure_every", 2))
    assert torch.equal(weights(plain[0]), weights(measured[0]))
    assert any(name.startswith("compression") or "error" in name for _, name, _, _ in measured[0].record.samples)


def test_a_switch_waits_for_momentum_that_is_still_being_returned() -> None:
    e = experiment(2, 10, compressor=DGC(), optimizer=SGD(momentum=0.9))
    off = Change(3, "compressor", "Dense")
    sessions = run(e, off, Change(3, "strategy", "ZeRO1"))
    assert "switch one step later" in sessions[0].record.noted("refused")[0][3]
    later = run(e, off, Change(5, "strategy", "ZeRO1"))
    assert isinstance(later[0].experiment.strategy, ZeRO1) and torch.equal(weights(later[0]), weights(sessions[0]))


def test_a_simulation_of_sizes_only_has_no_gradient_norm() -> None:
    e = experiment(2, 4, strategy=ZeRO1(), clip=0.1, pace=5.0)
    names = [set(simulate(e, real=real).samples.name) for real in (False, True)]
    assert "grad_norm" not in names[0] and "grad_norm" in names[1]


@stages
def test_a_compressor_that_stores_the_momentum_is_refused_with_the_reason(stage: Strategy) -> None:
    with pytest.raises(KnobError, match="compressor=DGC: it keeps the optimizer's whole momentum on every rank"):
        experiment(2, strategy=stage, compressor=DGC(), optimizer=SGD(momentum=0.9)).checked()


@stages
def test_zero_with_one_rank_equals_ddp(stage: Strategy) -> None:
    ours, plain = (run(experiment(1, 8, strategy=s, optimizer=AdamW()))[0] for s in (stage, DDP()))
    assert torch.equal(weights(ours), weights(plain)) and same(moments(ours), moments(plain))
