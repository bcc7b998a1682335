"""Tests activation checkpointing: recomputation is bit-identical, on every host and live."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from tests.agree import crosses_alike, memory_alike, sampled, spans_alike
from tests.piped import seen
from tests.ranks import experiment, run, toy
from tests.sim.insides import parameters, simulated
from tests.split import Small, alone, near, small, spread, together
from tests.unit.test_tensor import parts
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric.pace import SHARES
from workbench.partitions import Partition, Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, Interleaved, ZeroBubble
from workbench.settings import Change, KnobError
from workbench.sim import Costs
from workbench.strategies import DDP, KFAC, LocalSGD, Newton, Strategy, TorchDDP, ZeRO2, ZeRO3
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks
TASK = small(parts=parts)
UNITS, SECOND, CORE = Whole(checkpoint="units"), Whole(checkpoint="units", checkpoint_every=2), Whole(
    checkpoint="attention")  # fmt: skip
EVERY = [UNITS, SECOND, CORE]


def named(way: Partition) -> str:
    return f"{way.recompute[0]} {way.recompute[1]}"


@pytest.mark.parametrize("way", EVERY, ids=named)
def test_parameters_are_bit_identical_with_dropout(way: Partition) -> None:
    """Uses the simulator, because a rank has its own random numbers there."""
    e = spread(2, 5, task=small(model=lambda: Small(dropout=0.4), parts=parts, evaluate=None), pace=1.0)
    (_, kept), (record, again) = (simulated(e.set("partition", each)) for each in (Whole(), way))
    assert torch.equal(parameters(kept), parameters(again))
    assert record.details("checkpoint")[0][2]["units"] == (1 if way is SECOND else 2)


@pytest.mark.parametrize("way", EVERY, ids=named)
def test_the_engine_learns_what_one_process_learns(way: Partition) -> None:
    e = spread(2, task=TASK, partition=way, eval_every=3)
    sessions, plain = run(e), run(e.set("partition", Whole()))
    near({p.name: p.param.data for p in sessions[0].layout.order}, alone(e, 2))
    assert torch.equal(parameters(sessions), parameters(plain))
    assert seen(sessions[0], "held_out") == seen(plain[0], "held_out")


def test_running_statistics_count_a_batch_once() -> None:
    def normed() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3)],
                             nn.Linear(8, 4))  # fmt: skip

    e = experiment(2, 6, task=toy(model=normed, evaluate=None), pace=1.0)
    (_, kept), (_, again) = (simulated(e.set("partition", each)) for each in (Whole(), UNITS))
    for s, t in zip(kept, again, strict=True):
        one, other = s.model.state_dict(), t.model.state_dict()
        assert one["0.1.num_batches_tracked"] == 6 and all(torch.equal(x, other[name]) for name, x in one.items())


class Counting(nn.Module):
    calls: ClassVar[Counter[str]] = Counter()

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name, self.linear = name, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_meta and type(x) is not FakeTensor:  # a forward on meta or fake tensors computes nothing
            Counting.calls[self.name] += 1
        return torch.tanh(self.linear(x))


@pytest.mark.parametrize(("way", "want"), [(UNITS, (2, 2, 2, 2)), (SECOND, (2, 1, 2, 1))], ids=["all", "every second"])
def test_the_requested_units_are_computed_twice(way: Partition, want: tuple[int, ...]) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*map(Counting, "abcd"), nn.Linear(8, 4))

    Counting.calls.clear()
    simulate(experiment(1, 3, task=toy(model=model, evaluate=None), partition=way, pace=1.0), real=True)
    assert tuple(Counting.calls[name] / 3 for name in "abcd") == want


@pytest.mark.parametrize("way", [Whole(), *EVERY], ids=named)
def test_memory_of_activations_is_the_same_on_all_hosts(way: Partition) -> None:
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    e = Experiment(task=task, ranks=2, steps=5, pace=4.0, bucket_mb=0.05, eval_every=0, partition=way)
    memory_alike(e, run(e))


def test_only_the_inputs_of_a_unit_are_kept() -> None:
    """Two more blocks store two more inputs of (8, 16, 32) floats. It keeps queries, keys, values and outputs."""
    kept = {}
    for way in (Whole(), UNITS, CORE):
        found = []
        for layers in (2, 4):
            task = ByteGPT(layers=layers, width=32, context=16, heads=2)
            e = Experiment(task=task, ranks=1, steps=3, pace=1.0, eval_every=0, partition=way)
            found.append(sampled(simulate(e), "memory activations", 0)[-1])
        kept[way] = (found[1] - found[0]) / 2
    assert kept[UNITS] == 4 * 8 * 16 * 32
    assert kept[Whole()] > 10 * kept[UNITS]
    assert kept[Whole()] - kept[CORE] == 4 * 8 * 2 * 16, "a fused kernel keeps a logarithm for each row of scores"


def test_unfused_attention_keeps_no_scores_when_checkpointed() -> None:
    """With dropout torch has no fused kernel for a CPU: it keeps several numbers for each pair of positions."""

    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(q, k, v, dropout_p=0.2))

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        rng = torch.Generator().manual_seed(rank)
        return [(torch.randn(2, 50, 8, generator=rng), torch.randn(2, 50, 8, generator=rng))] * 4

    def model() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(Dropped(), Dropped())

    e = experiment(1, 4, task=toy(model=model, data=data, evaluate=None), pace=1.0)
    runs = [simulated(e.set("partition", way)) for way in (Whole(), CORE)]
    assert torch.equal(*(parameters(sessions) for _, sessions in runs))
    whole, core = (sampled(record, "memory activations", 0)[-1] for record, _ in runs)
    assert whole - core > 2 * 2 * 4 * 2 * 50 * 50 and core < 0.5 * whole
    assert sampled(simulate(e.set("partition", CORE)), "memory activations", 0)[-1] == core


def test_a_backward_lasts_longer_by_its_recomputation() -> None:
    """Each of 3 units is a pair of equal matrices. Backward recomputes the first one only, because nothing reads the
    output of the second.
    """

    def model() -> nn.Module:
        torch.manual_seed(2)
        return nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in range(3)])

    def data(rank: int, ranks: int, seed: int) -> list[Any]:
        return [(torch.ones(4, 8), torch.zeros(4, 8))] * 4

    e = experiment(2, 6, task=toy(model=model, data=data, evaluate=None), pace=100.0)
    for way, again in ((Whole(), 0.0), (UNITS, 0.5), (SECOND, 1 / 3)):
        for real in (True, False):
            spans = simulate(e.set("partition", way), real=real).spans
            mine = spans[(spans["rank"] == 0) & (spans.step == 3) & (spans.name == "backward")]
            lasted = float((mine.t1 - mine.t0).sum())
            assert lasted == pytest.approx(0.1 * (SHARES["backward"] + again * SHARES["forward"]), rel=1e-6)
    paced = run(e.set("partition", UNITS))[0].record
    each = [row for row in paced if row[1] == "compute" and row[2] == "backward"]
    lasted = min(sum(row[5] - row[4] for row in each if row[0] == step) for step in range(1, 6))  # the least disturbed
    assert 0.99 * 0.075 < lasted < 1.5 * 0.075
    costs = Costs(forward=0.3, backward=0.6)
    spans = simulate(e.set("pace", 0.0).set("partition", UNITS), costs=costs).spans
    mine = spans[(spans["rank"] == 0) & (spans.step == 3) & (spans.name == "backward")]
    assert float((mine.t1 - mine.t0).sum()) == pytest.approx(0.6 + 0.5 * 0.3)


def test_costs_are_not_measured_from_steps_with_recomputation() -> None:
    e = experiment(2, 12, task=toy(model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))), pace=50.0)
    turned = simulate(e, changes=[Change(6, "checkpoint", "units")])
    assert Costs.measured(turned).backward[0].seconds == pytest.approx(0.03)
    with pytest.raises(ValueError, match="in no step all ranks computed the whole model once"):
        Costs.measured(simulate(e.set("checkpoint", "units")))


def test_live_changes_of_checkpointing_change_no_result() -> None:
    e = spread(2, 12, task=TASK, pace=2.0)
    asked = [("checkpoint", "units"), ("checkpoint_every", 2), ("checkpoint", "attention"), ("checkpoint", "none")]
    changes = [Change(2 * k + 2, *each) for k, each in enumerate(asked)]
    sessions, plain = run(e, *changes), run(e)
    assert not sessions[0].record.noted("refused") and not sessions[0].record.noted("partition")
    assert seen(sessions[0], "loss") == seen(plain[0], "loss")
    real, sizes = (simulate(e, changes=changes, real=real) for real in (True, False))
    spans_alike(real, sizes)
    crosses_alike(real, sessions)
    kept = seen(sessions[0], "memory activations")
    assert kept == sampled(real, "memory activations", 0) == sampled(sizes, "memory activations", 0)
    assert kept[1] < kept[2] < kept[3] <= kept[0], "all, units, every second, attention; the last change is no news"
    assert [d["units"] for *_, d in real.details("checkpoint")] == [2, 1, 1, 0]


TOGETHER: list[tuple[int, Partition]] = [
    (2, Tensor(checkpoint="units")), (2, Tensor(checkpoint="units", sequence=True)),
    (2, Tensor(checkpoint="attention")),
    (2, Pipeline(micros=2, of=UNITS)), (2, Pipeline(micros=4, schedule=GPipe(), of=UNITS)),
    (2, Pipeline(micros=2, schedule=Interleaved(chunks=2), of=SECOND)),
    (4, Pipeline(micros=2, of=Tensor(checkpoint="units"))),
    (4, Pipeline(micros=2, of=Tensor(checkpoint="units", sequence=True))),
]  # fmt: skip


@pytest.mark.parametrize(("ranks", "way"), TOGETHER, ids=[f"{n} {way}"[:90] for n, way in TOGETHER])
def test_checkpointing_works_with_every_partition(ranks: int, way: Partition) -> None:
    """Ranks learn what one process learns, and simulations equal the engine: a unit's collectives run again."""
    e = spread(ranks, task=TASK, partition=way, eval_every=3, pace=4.0)
    sessions, real, sizes = run(e), simulate(e, real=True), simulate(e)
    near(together(sessions), alone(e, 1))
    for rank, s in enumerate(sessions):
        assert sampled(real, "loss", rank) == seen(s, "loss") and sampled(real, "held_out", rank) == seen(s, "held_out")
    crosses_alike(real, sessions)
    spans_alike(real, sizes)


SPREAD = [Tensor(checkpoint="units"), Pipeline(micros=4, of=UNITS), Pipeline(micros=4, of=Tensor(checkpoint="units"))]


@pytest.mark.parametrize("way", SPREAD, ids=["slices", "stages", "both"])
def test_memory_of_activations_in_partitions_is_the_same_on_all_hosts(way: Partition) -> None:
    task = ByteGPT(layers=4, width=32, context=16, heads=2)
    e = Experiment(task=task, ranks=way.size, steps=5, pace=4.0, bucket_mb=0.05, eval_every=0, partition=way)
    memory_alike(e, run(e), held=0.02 if way == SPREAD[-1] else 0.0)  # one micro-batch's gradient is 1.1 % of the peak


def test_collectives_inside_a_unit_run_again() -> None:
    """Of a block's two all-reduces, backward repeats the first one only, because nothing reads the second."""
    task = ByteGPT(layers=3, width=16, heads=2, context=8)
    said = []
    for way in (Tensor(), Tensor(checkpoint="units"), Tensor(checkpoint="attention")):
        e = Experiment(task=task, ranks=2, steps=2, eval_every=0, partition=way, pace=1.0)
        spans = simulate(e).spans
        mine = spans[(spans["rank"] == 0) & (spans.lane == "comm") & (spans.step == 1)]
        said.append(Counter(mine.name[mine.name.str.contains("activation blocks")].str.split(".").str[-1]))
    plain, units, core = said
    assert plain == core and sum(plain.values()) == 2 * 3
    assert sum(units.values()) == 3 * 3


STRATEGIES = [ZeRO3(), ZeRO2(), LocalSGD(every=2), DDP(), KFAC(), Newton(iterations=3)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=str)
def test_checkpointing_works_with_strategies(strategy: Strategy) -> None:
    """ZeRO-3 gathers parameters again for the recomputation, and the step is notified of each read again.

    Newton passes through a kept graph several times.
    """
    e = spread(2, 12, task=TASK, strategy=strategy, pace=4.0, bucket_mb=0.01)
    changes = [Change(4, "checkpoint", "units"), Change(8, "checkpoint", "none")]
    sessions, plain = run(e, *changes), run(e)
    assert not sessions[0].record.noted("refused")
    assert torch.equal(parameters(sessions), parameters(plain))
    real, sizes = (simulate(e, changes=changes, real=real) for real in (True, False))
    assert sampled(real, "loss", 0) == seen(sessions[0], "loss")
    crosses_alike(real, sessions)
    spans_alike(real, sizes)


def test_torch_ddp_gives_the_same_result_with_checkpointing() -> None:
    e = spread(2, 6, task=TASK, strategy=TorchDDP())
    sessions, plain = run(e.set("partition", UNITS)), run(e)
    assert torch.equal(parameters(sessions), parameters(plain))


def test_switching_partitions_keeps_checkpointing() -> None:
    ways: list[Partition] = [UNITS, Tensor(checkpoint="units"), Pipeline(micros=2, of=UNITS), Tensor(), UNITS, Whole()]
    changes = [Change(2 * k + 2, "partition", way) for k, way in enumerate(ways)]
    e = spread(2, 16, task=TASK, pace=2.0)
    sessions, real = run(e, *changes), simulate(e, changes=changes, real=True)
    assert not sessions[0].record.noted("refused")
    assert seen(sessions[0], "loss") == pytest.approx(sampled(real, "loss", 0), rel=1e-6)
    assert all("forward" not in module.__dict__ for module in sessions[0].model.modules()), "all is as it was"


class Writing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.tanh_())


REFUSED: list[tuple[Any, Partition, str]] = [
    (lambda: nn.Bilinear(8, 8, 4), UNITS, "checkpoint=units: the units of the model are not known"),
    (lambda: nn.Sequential(nn.Linear(8, 8), Writing(), nn.Linear(8, 4)), UNITS,
     "checkpoint=units: in a trial on one batch, a unit cannot be computed again"),
    (lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), CORE,
     "checkpoint=attention: no unit of the model calls scaled_dot_product_attention"),
]  # fmt: skip


@pytest.mark.parametrize(("model", "way", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_models_that_cannot_be_recomputed_are_refused_with_a_reason(model: Any, way: Partition, words: str) -> None:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return model()

    def loss(net: nn.Module, pair: Any) -> torch.Tensor:
        x, y = pair
        return F.mse_loss(net(x, x) if isinstance(net, nn.Bilinear) else net(x), y)

    e = experiment(2, 6, task=toy(model=made, loss=loss, evaluate=None), pace=1.0)
    with pytest.raises(KnobError, match=re.escape(words)):
        simulate(e.set("partition", way))
    sessions = run(e, Change(3, "partition", way))
    ((*_, refused),) = sessions[0].record.noted("refused")
    assert words in refused and all(s.phase == "done" for s in sessions)


def test_zero_bubble_is_refused_with_checkpointing() -> None:
    with pytest.raises(KnobError, match=re.escape("schedule=ZeroBubble: each half of a backward would recompute")):
        Experiment(partition=Pipeline(schedule=ZeroBubble(), of=UNITS)).checked()
