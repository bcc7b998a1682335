"""Tests ZeRO stage 3: parameters are present when the model reads them and freed otherwise."""

from __future__ import annotations

import threading
import weakref
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import ended, experiment, live, run, toy, weights
from tests.sim.virtual import comm
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.unmaterialized import UnmaterializedParameter
from workbench.host.sharding.read_order import foresee_trace
from workbench.host.sharding.unsharder import Unsharder
from workbench.optimizers import SGD, AdamW
from workbench.settings import Change
from workbench.sim.teach.laws import trained
from workbench.strategies import DDP, ZeRO2, ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

WIDTH = 64
SMALL = 0.01  # MB: every matrix is a bucket of its own


class Own(torch.autograd.Function):
    """A user's layer that stores its weight for backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Many(nn.Module):
    """Reads its parameters in every way: by modules and by hand, twice, again in backward, and not at all."""

    def __init__(self, turns: bool = False) -> None:
        super().__init__()
        self.into, self.attention = nn.Linear(WIDTH, WIDTH), nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.norm, self.cell = nn.LayerNorm(WIDTH), nn.GRU(WIDTH, WIDTH, batch_first=True)
        self.again = nn.Linear(WIDTH, WIDTH)
        self.stack = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.hand, self.unread = nn.Parameter(torch.empty(WIDTH, WIDTH)), nn.Parameter(torch.empty(WIDTH, WIDTH))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.out.weight = self.into.weight  # tied
        self.head, self.scale = nn.Linear(WIDTH, 4), nn.Parameter(torch.tensor(1.0))
        self.turns, self.steps = turns, 0
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = 0.08 * torch.randn(p.shape, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.steps += self.training
        layers = self.stack[::-1] if self.turns and self.steps % 3 == 0 else self.stack
        y = self.into(x)[:, None]
        y = self.norm(y + self.attention(y, y, y, need_weights=False)[0])
        y = self.cell(y)[0][:, 0] * self.frozen
        y = checkpoint(lambda y: torch.tanh(self.again(y)), y, use_reentrant=False, early_stop=False)
        for layer in layers:
            y = torch.relu(layer(y)) + y
        return self.head(self.out(Own.apply(y, self.hand))) * (1.0 + self.scale)


def batches(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(rank)
    return [(torch.randn(4, WIDTH, generator=rng), torch.randn(4, 4, generator=rng)) for _ in range(8)]


def held_out(model: nn.Module) -> float:
    x, y = batches(99, 1, 0)[0]
    return float(nn.functional.mse_loss(model(x), y) + nn.functional.mse_loss(model(x + 1), y))


def many(ranks: int, steps: int = 12, **rest: Any) -> Experiment:
    model = rest.pop("model", partial(Many, rest.pop("turns", False)))
    task = toy(model=model, data=batches, evaluate=held_out)
    return experiment(ranks, steps, task=task, **{"optimizer": AdamW(), "bucket_mb": SMALL, "lr": 1e-3, **rest})


def seen(session: Session, name: str) -> list[float]:
    return [value for _, what, _, value in session.record.samples if what == name]


@pytest.mark.parametrize("turns", [False, True], ids=["one order", "another order at times"])
def test_a_model_that_reads_parameters_in_any_way_trains_like_ddp(turns: bool) -> None:
    """An order other than the learned one is only slower."""
    e = many(2, eval_every=4, turns=turns)
    ours, plain = run(e.set("strategy", ZeRO3())), run(e)
    assert len(ours[0].layout.buckets) > 10
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(weights(one), weights(other))
    assert seen(ours[0], "held_out") == seen(plain[0], "held_out") and len(seen(ours[0], "held_out")) == 4


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_engine_and_simulator_send_and_store_the_same(ranks: int) -> None:
    e = Experiment(task=ByteGPT(layers=4), ranks=ranks, steps=6, eval_every=3, strategy=ZeRO3(), optimizer=AdamW(),
                   bucket_mb=0.1, batch=2)  # fmt: skip
    sessions, model = run(e), simulate(e.set("pace", 10.0))
    assert sessions[0].record.comm() == [tuple(row) for row in comm(model, 0)]
    held = model.samples[model.samples.name == "memory parameters"]
    for rank, s in enumerate(sessions):
        said = held[held["rank"] == rank].value.iloc[-1]
        assert seen(s, "memory parameters")[-1] == pytest.approx(said, rel=0.01)


@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_sent_and_stored_are_the_papers(ranks: int) -> None:
    task = ByteGPT(layers=8)
    e = Experiment(task=task, ranks=ranks, steps=5, eval_every=0, strategy=ZeRO3(), optimizer=AdamW(), bucket_mb=0.1,
                   batch=2)  # fmt: skip
    session = run(e)[0]
    psi, layout = session.layout.byte_count, session.layout
    sent = [sum(n for at, name, n in session.record.comm() if at == step and "slots" not in name) for step in range(5)]
    share = psi * (ranks - 1) / ranks
    largest = max(b.nbytes for b in layout.buckets)
    assert 3 * share - 2 * largest <= sent[3] <= 3 * share * 1.001 and len(set(sent)) == 1, "from the first step on"
    assert seen(session, "memory parameters")[-1] <= psi / ranks + 3 * largest
    assert seen(session, "memory optimizer state")[-1] == pytest.approx(2 * psi / ranks, rel=0.02)
    assert seen(session, "memory gradients")[-1] <= psi / ranks + 3 * largest


def test_released_parameters_are_freed_whatever_autograd_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[Any] = []
    most: list[int] = []
    opened = Unsharder._mark_whole

    def counting(self: Unsharder, index: int) -> None:
        opened(self, index)
        if self._run.rank.id == 0 and self.phase:
            alive.append(weakref.ref(self._parameter_layout.weights[index].untyped_storage()))
            most.append(sum(ref() is not None for ref in alive))

    monkeypatch.setattr(Unsharder, "_mark_whole", counting)
    e = Experiment(task=ByteGPT(layers=6), ranks=2, steps=4, eval_every=2, strategy=ZeRO3(), bucket_mb=0.05, batch=2)
    run(e)
    assert len(most) > 100 and max(most) <= 3, "what is read, what waits for gradients, the small ones"


class Stack(nn.Sequential):
    """Matrices, each a bucket of its own, and biases in one bucket."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 4))
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = 0.1 * torch.randn(p.shape, generator=rng)


def batch_by_batch(model: nn.Module) -> float:
    with torch.inference_mode():
        return sum(float(nn.functional.mse_loss(model(x), y)) for x, y in batches(99, 1, 0)[:3])


def twice(model: nn.Module, pair: Any) -> torch.Tensor:
    """Calls the model twice, but only once the first time."""
    x, y = pair
    model.calls = getattr(model, "calls", 0) + 1
    once = nn.functional.mse_loss(model(x), y)
    return once if model.calls < 3 else once + nn.functional.mse_loss(model(x + 1), y)


@pytest.mark.parametrize("loss", [None, twice], ids=["once", "twice"])
def test_a_model_can_be_called_several_times_within_one_pass(loss: Any) -> None:
    """One call reads a bucket that is freed and a bucket that the previous call left; neither may evict the other."""
    task = toy(model=Stack, data=batches, evaluate=batch_by_batch, **({"loss": loss} if loss else {}))
    e = experiment(2, 8, task=task, optimizer=AdamW(), bucket_mb=SMALL, eval_every=2, lr=1e-3)
    ours, plain = run(e.set("strategy", ZeRO3())), run(e)
    for one, other in zip(ours, plain, strict=True):
        assert torch.equal(weights(one), weights(other))
    assert seen(ours[0], "held_out") == seen(plain[0], "held_out")


class Odd(Stack):
    """A model that on rank 1 reads its layers in another order after some step."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        first, second = self[0], self[2]
        if self.calls > 2 and threading.current_thread().name == "rank 1 training":
            first, second = second, first
        return self[4](torch.relu(second(torch.relu(first(x)))))


def test_ranks_that_read_in_different_orders_end_as_under_ddp() -> None:
    e = experiment(2, 6, task=toy(model=Odd, data=batches, evaluate=None), bucket_mb=SMALL, lr=1e-3)
    ours, plain = run(e.set("strategy", ZeRO3())), run(e)
    for one, other in zip(ours, plain, strict=True):
        torch.testing.assert_close(weights(one), weights(other))


class Strange(nn.Module):
    """A model for which autograd stores a sparse matrix and the conjugate of a complex weight: no plain views."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.turn = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.empty(2, WIDTH))
        self.out = nn.Linear(WIDTH, 4)
        rng = torch.Generator().manual_seed(0)
        for p in self.parameters():
            p.data = 0.1 * torch.randn(p.shape, generator=rng)
        self.few = torch.eye(4).to_sparse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.view_as_complex(self.turn.t().contiguous())
        y = torch.sparse.mm(self.few, self.into(x)).to(torch.complex64) * turn.conj()
        return self.out(y.real + y.imag)


def test_stored_tensors_that_are_not_plain_views_stay_unchanged() -> None:
    task = toy(model=Strange, data=batches, evaluate=None)
    e = experiment(2, 8, task=task, optimizer=AdamW(), bucket_mb=SMALL, lr=1e-3)
    for one, other in zip(run(e.set("strategy", ZeRO3())), run(e), strict=True):
        assert torch.equal(weights(one), weights(other))


def test_an_evaluation_gathers_the_shards_on_every_rank() -> None:
    away: list[int] = []

    def evaluate(model: nn.Module) -> float:
        loss = held_out(model)
        away.append(sum(isinstance(p, UnmaterializedParameter) for p in model.stack.parameters()))
        return loss

    task = toy(model=Many, data=batches, evaluate=evaluate)
    e = experiment(2, 6, task=task, optimizer=AdamW(), bucket_mb=SMALL, eval_every=3, strategy=ZeRO3())
    sessions = run(e)
    assert len(seen(sessions[0], "held_out")) == 3 and not seen(sessions[1], "held_out")
    gathered = {(row[0], row[1]) for row in sessions[1].record if row[2].startswith("all_gather params")}
    steps = {(step, "comm") for step in range(6)}
    assert gathered == {*steps, *((at, "measuring") for at in (0, 3, 6))}
    assert away == [3] * 6, "three of four matrices are gone; the last one is still here, and so are all biases"


@pytest.mark.parametrize("prefetch", [0, 1, 64])
def test_prefetch_does_not_change_the_result(prefetch: int) -> None:
    ours, plain = run(many(2, strategy=ZeRO3(prefetch=prefetch))), run(many(2, strategy=ZeRO2()))
    assert torch.equal(weights(ours[0]), weights(plain[0]))
    asked = sorted(n for step, _, n in ours[0].record.comm() if step == 5)
    assert asked == sorted(n for step, _, n in run(many(2, strategy=ZeRO3()))[0].record.comm() if step == 5)


@pytest.mark.parametrize("strategy", [ZeRO3(), ZeRO2(outstanding=1)], ids=str)
def test_waiting_for_a_gather_is_not_recorded_as_computing(strategy: ZeRO2) -> None:
    e = Experiment(task=ByteGPT(layers=4), ranks=2, steps=6, eval_every=0, strategy=strategy, bucket_mb=0.1, batch=2)
    rows = [row for row in run(e)[0].record if row[0] == 4]
    computed, waits = ([row[4:6] for row in rows if row[1] == lane] for lane in ("compute", "wait"))
    assert len(computed) > 3 and len(waits) > 10
    for t0, t1 in waits:
        over = sum(max(0.0, min(t1, end) - max(t0, began)) for began, end in computed)
        assert over < 2e-4, "a wait that is shorter is not worth a break"


def test_prefetch_takes_memory() -> None:
    most = []
    for prefetch in (0, 1, 4):
        e = Experiment(task=ByteGPT(layers=6), ranks=2, steps=4, eval_every=0, strategy=ZeRO3(prefetch=prefetch),
                       bucket_mb=0.05, batch=2)  # fmt: skip
        most.append(seen(run(e)[0], "memory buffers in flight")[-1])
    assert most[0] < most[1] < most[2]


def test_the_error_names_a_parameter_read_between_two_passes() -> None:
    sessions = live(many(2, strategy=ZeRO3()))
    ended(sessions)
    with pytest.raises(RuntimeError, match=r"parameter head.weight is read between two passes, .* \(ZeRO2\)"):
        sessions[0].model.head.weight.sum()
    assert "not on this rank" in repr(sessions[0].model.head.weight)


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("optimizer", [AdamW(), SGD(momentum=0.9)], ids=["AdamW", "SGD"])
def test_live_switches_to_and_from_every_stage_preserve_parameters(ranks: int, optimizer: Any) -> None:
    cuts = [Change(9, "bucket_mb", 0.05), Change(16, "bucket_mb", SMALL),
            Change(18, "optimizer", {"SGD": {"momentum": 0.5}})]  # fmt: skip
    there = [Change(4, "strategy", "ZeRO3"), cuts[0], Change(12, "strategy", "ZeRO1"), Change(14, "strategy", "ZeRO3"),
             *cuts[1:], Change(20, "strategy.prefetch", 3), Change(22, "strategy", "ZeRO2"),
             Change(24, "strategy", "ZeRO3")]  # fmt: skip
    e = many(ranks, 28, optimizer=optimizer, eval_every=2)
    sessions = run(e, *there)
    assert not sessions[0].record.noted("refused") and len(sessions[0].record.noted("change")) == len(there)
    if ranks == 2:
        plain = run(e, *cuts)
        assert torch.equal(weights(sessions[0]), weights(plain[0]))
        assert seen(sessions[0], "held_out") == seen(plain[0], "held_out")
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)
    _, ours = trained(DDP(), ranks, 28, there, optimizer=optimizer, bucket_mb=SMALL)
    _, plain_sim = trained(DDP(), ranks, 28, cuts, optimizer=optimizer, bucket_mb=SMALL)
    assert all(torch.equal(x, y) for x, y in zip(ours, plain_sim, strict=True))


@pytest.mark.parametrize("target", ["LocalSGD", "DiLoCo"])
def test_zero_3_for_some_steps_leaves_the_later_run_bit_identical_to_zero_2(target: str) -> None:
    ours, plain = (run(many(3, 22, optimizer=SGD(momentum=0.9), eval_every=5), Change(3, "strategy", stage),
                       Change(8, "strategy", target), Change(13, "strategy", stage), Change(18, "strategy", "DDP"))
                   for stage in ("ZeRO3", "ZeRO2"))  # fmt: skip
    assert torch.equal(weights(ours[0]), weights(plain[0]))  # the mean of three equal numbers may have another last bit
    assert seen(ours[0], "held_out") == pytest.approx(seen(plain[0], "held_out"), rel=1e-6)


@pytest.mark.parametrize("target", ["LocalSGD", "DiLoCo", "Gossip", "AsyncServer", "TorchDDP", "BackupWorkers"])
def test_it_can_be_entered_from_and_left_to_every_kind_of_strategy(target: str) -> None:
    changes = [Change(3, "strategy", "ZeRO3"), Change(8, "strategy", target), Change(13, "strategy", "ZeRO3"),
               Change(18, "strategy", "DDP")]  # fmt: skip
    sessions = run(many(3, 22, optimizer=SGD(momentum=0.9), eval_every=5), *changes)
    assert len(sessions[0].record.noted("change")) == 4
    assert all(torch.equal(weights(s), weights(sessions[0])) for s in sessions)


def test_a_layout_keeps_a_ranks_shard_and_allocates_the_rest() -> None:
    layout = ParameterLayout(nn.Linear(6, 3), 1.0)
    bucket = layout.list_params()[0]
    values = bucket.data.clone()
    shard = layout.hold_bucket(bucket.shard(1, 2))
    assert torch.equal(shard.data, values[11:]) and layout.held == 4 * 10
    assert torch.isnan(layout.list_params()[0].data).all()
    shard.data += 1.0
    whole = layout.hold_bucket(bucket.like(torch.cat([values[:11], shard.data])))
    assert torch.equal(whole.data[11:], values[11:] + 1.0) and layout.held == 4 * 21
    assert layout.order[0].param.data.data_ptr() == layout.list_params()[0].data[:3].data_ptr()


def test_prefetch_hides_gathers_on_an_emulated_link() -> None:
    """Runs in the simulator, where the link and the pace determine the time."""
    e = Experiment(task=ByteGPT(layers=8), ranks=4, steps=5, eval_every=0, bucket_mb=0.2, pace=60.0,
                   fabric=Fabric(link=Link(bandwidth=2000.0)))  # fmt: skip
    took = {}
    for strategy in (ZeRO3(prefetch=0), ZeRO3(), DDP()):
        spans = simulate(e.set("strategy", strategy)).spans
        last = spans[(spans["rank"] == 0) & (spans.step == 4) & (spans.lane == "step")]
        took[str(strategy)] = float((last.t1 - last.t0).iloc[0])
    late, ahead, _ = took.values()
    assert ahead < late


class Shown(nn.Module):
    """A model that looks at a value, so that its reads cannot be predicted."""

    def __init__(self) -> None:
        super().__init__()
        rng = torch.Generator().manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        for p in self.parameters():
            p.data = 0.1 * torch.randn(p.shape, generator=rng)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x)) + x
        return self.head(x) * (1.0 if float(x.detach().sum()) < 1e9 else 0.5)


@pytest.mark.parametrize(("model", "first"), [(Many, False), (Shown, True)])
def test_the_first_step_stores_shards_too_unless_the_model_looks_at_values(model: Any, first: bool) -> None:
    task = toy(model=model, data=batches, evaluate=None)
    e = experiment(2, 6, task=task, optimizer=AdamW(), bucket_mb=SMALL, lr=1e-3)
    ours, plain = run(e.set("strategy", ZeRO3())), run(e)
    psi = ours[0].layout.byte_count
    assert (max(seen(ours[0], "memory parameters")) >= psi) is first
    assert torch.equal(weights(ours[0]), weights(plain[0]))


def test_prediction_leaves_a_shared_model_module_unchanged() -> None:
    """The reads of a step are predicted on a copy of the model without its tensors."""
    one = Many()
    before = [p.detach().clone() for p in one.parameters()]
    trial = foresee_trace(toy(model=lambda: one, data=batches).build(), many(1))
    assert trial is not None and len(trial.gradient_order) > 20
    assert all(torch.equal(p, was) for p, was in zip(one.parameters(), before, strict=True))
