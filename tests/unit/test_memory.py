"""Tests the accounting of a rank's memory: equal numbers from both hosts, and known bounds."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import experiment, run
from tests.sim.virtual import stack
from widgets.views import all_views
from workbench import simulate
from workbench.analysis import measure_memory
from workbench.compressors import Dense, ErrorFeedback, PowerSGD, TopK
from workbench.engine import device
from workbench.engine.device import Chip
from workbench.experiment import Experiment
from workbench.fabric import Crash
from workbench.host.memory.buffers import BufferCounter
from workbench.host.memory.memory_account import CATEGORIES
from workbench.host.memory.storages import count_bytes, find_saved, find_storages
from workbench.optimizers import SGD, AdamW
from workbench.rank import Op, Rank
from workbench.record.timeline import Sample, Timeline
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, DiLoCo, Gossip, LocalSGD, SlowMo, Strategy, ZeRO3, ZeROInfinity
from workbench.tasks import ByteGPT, Digits

EVERY = [
    (DDP(), Dense()), (DDP(accumulate=2), Dense()), (LocalSGD(every=3), Dense()), (SlowMo(every=4), Dense()),
    (DDP(), TopK.usual()), (DDP(), PowerSGD.usual()), (LocalSGD(every=2), ErrorFeedback(of=TopK(density=0.1))),
    (Gossip(), Dense()),
]  # fmt: skip


def engine(session: Any) -> dict[str, float]:
    """Returns the last Sample of each category from the engine, and of the peak."""
    return {name: value for _, name, _, value in session.record.samples if name.startswith("memory ")}


def simulated(made: Run) -> dict[str, float]:
    """Returns the same numbers of rank 0 of a simulated run."""
    rows = made.timeline.samples.rows()
    return {
        str(name): float(value)
        for name, value, rank in zip(rows.name, rows.value, rows.rank, strict=True)
        if rank == 0 and str(name).startswith("memory ")
    }


def held(made: Run) -> dict[str, int]:
    """Returns rank 0's memory in its last steps."""
    return made.memory(last=4)[0].most


def sized(**settings: Any) -> Run:
    return simulate(Experiment(task=ByteGPT(), **{"ranks": 2, "steps": 8, "pace": 5.0, **settings}))


@pytest.mark.ranks
@pytest.mark.parametrize(("strategy", "compressor"), EVERY, ids=str)
def test_the_engine_and_the_simulator_report_the_same_memory(strategy: Strategy, compressor: Any) -> None:
    e = experiment(2, 9, strategy=strategy, compressor=compressor)
    said = engine(run(e)[0])
    assert [f"memory {name}" for name in CATEGORIES] == sorted(said.keys() - {"memory peak"}, key=_place)
    for real in (True, False):
        assert _in_steps(simulated(simulate(e.set("pace", 5.0), real=real))) == _in_steps(said)


def _in_steps(said: dict[str, float]) -> dict[str, float]:
    """Leaves out evaluations, whose sizes are only known for pure tasks; see test_budget."""
    return {name: value for name, value in said.items() if name != "memory evaluation"}


def _place(name: str) -> int:
    return CATEGORIES.index(name.removeprefix("memory "))


@pytest.mark.parametrize("task", [ByteGPT(), Digits()], ids=str)
def test_a_simulation_with_sizes_only_reports_the_memory_of_real_tensors(task: Any) -> None:
    """This includes attention, for which torch keeps other tensors on the meta device than on a CPU."""
    e = Experiment(task=task, ranks=2, steps=3, pace=5.0)
    sizes, real = simulated(simulate(e)), simulated(simulate(e, real=True))
    assert _in_steps(sizes) == _in_steps(real)
    assert sizes["memory evaluation"] == pytest.approx(real["memory evaluation"], rel=0.01)


def test_optimizer_state_has_the_known_size_of_each_optimizer() -> None:
    plain, momentum, adam = (held(sized(optimizer=o)) for o in (SGD(momentum=0.0), SGD(momentum=0.9), AdamW()))
    model = plain["parameters"]
    counters = 4 * sum(1 for _ in ByteGPT().build().model().parameters())
    assert model == 4 * sum(p.numel() for p in ByteGPT().build().model().parameters())
    assert (plain["optimizer state"], momentum["optimizer state"]) == (0, model)
    assert adam["optimizer state"] == 2 * model + counters


def test_a_batch_is_counted_and_grows_with_its_examples() -> None:
    """A batch has eight images of 8 x 8 floats, and their labels; the peak includes it."""
    one, more = (simulate(Experiment(task=Digits(), ranks=2, steps=3, pace=5.0, batch=batch)) for batch in (8, 4096))
    assert held(one)["batches"] == 8 * (64 * 4 + 8) and held(more)["batches"] == 512 * held(one)["batches"]
    beside = sum(held(more)[name] for name in CATEGORIES if name not in ("gradients", "activations", "batches"))
    assert more.memory()[0].peak >= beside + held(more)["activations"] + held(more)["batches"]


def test_strategy_and_compressor_state_is_counted() -> None:
    ddp, topk, outer, local = (held(sized(**settings)) for settings in (
        {}, {"compressor": TopK.usual()}, {"strategy": DiLoCo(every=4)}, {"strategy": LocalSGD(every=4)},
    ))  # fmt: skip
    model = ddp["parameters"]
    assert ddp["gradients"] == model and ddp["strategy state"] == ddp["compressor state"] == 0
    assert topk["compressor state"] == model, "one residual"
    assert outer["strategy state"] == 2 * model, "an anchor and an outer momentum"
    for same in ("parameters", "optimizer state", "activations"):
        assert local[same] == ddp[same]


def test_buffers_in_flight_are_a_collectives_inputs_and_outputs() -> None:
    """TopK gathers values and indices: its own and those of all ranks, one bucket after the other on the lane."""
    made = sized(compressor=TopK.usual(), ranks=4)
    sent = made.timeline.spans.rows()
    sent = sent[sent.equal("lane", "comm") & (sent.rank == 0)].nbytes // 3  # to each other rank
    assert held(sized())["buffers in flight"] == 0, "buckets themselves are gradients"
    assert held(made)["buffers in flight"] == 2 * (1 + 4) * sent.max()


def test_activations_grow_with_the_batch_also_live() -> None:
    few, many = (held(sized(batch=b))["activations"] for b in (4, 8))
    assert many == pytest.approx(2 * few, rel=0.001)
    turned = simulate(
        Experiment(task=ByteGPT(), ranks=2, steps=8, pace=5.0, batch=4), changes=[Change(4, "batch", 8)], real=False
    )
    assert held(turned)["activations"] == many
    assert turned.memory()[0].peak > sized(batch=4).memory()[0].peak


def test_a_strategy_that_shards_parameters_holds_fewer() -> None:
    """A rank holds a shard of everything, and one of eight buckets whole while it is in use."""
    e = experiment(4, 4, pace=5.0, bucket_mb=0.04, task=stack(8))
    whole, sharded = (simulated(simulate(e.set("strategy", s)))["memory parameters"] for s in (DDP(), ZeRO3()))
    assert sharded == whole * (1 / 4 + 1 / 8 * 3 / 4)


def test_forwards_under_way_at_once_add_up() -> None:
    class TwoOpen(Strategy):
        """A strategy that keeps the activations of two micro-batches at once."""

        exact: ClassVar[bool] = False

        async def step(self, rank: Rank, state: Any) -> None:
            for micro in (0, 1):
                await rank.forward(micro=micro)
            for micro in (1, 0):
                await rank.backward(0.5, micro=micro)
            await rank.update()

    once, twice = (experiment(2, 3, strategy=s, pace=5.0) for s in (LocalSGD(), TwoOpen()))
    for real in (True, False):
        first, second = (simulated(simulate(e, real=real)) for e in (once, twice))
        assert second["memory activations"] == pytest.approx(2 * first["memory activations"], rel=0.01)


def test_a_checkpoint_keeps_less_and_is_not_computed_again_to_find_out() -> None:
    ran = 0

    def inside(x: torch.Tensor) -> torch.Tensor:
        nonlocal ran
        ran += 1
        return x.tanh().tanh()

    x = torch.randn(1000, requires_grad=True)
    whole, short = inside(x).sum(), checkpoint(inside, x, use_reentrant=False).sum()
    assert count_bytes(find_saved([whole])) == 2 * 4000 and ran == 2
    assert count_bytes(find_saved([short])) <= 4000 and ran == 2
    short.backward()
    assert ran == 3 and find_saved([short]) == {}


def test_a_shared_storage_is_counted_once() -> None:
    flat = torch.zeros(100)
    assert count_bytes(find_storages({"a": flat[:50], "b": [flat[50:].view(5, 10)], "c": nn.Parameter(flat)})) == 400


class Still:
    """A run without any state except its rank."""

    rank = Rank(0, 2)
    layout = type("Layout", (), {"buckets": (), "lying": {}})


def test_a_payload_with_the_id_of_a_freed_bucket_counts_as_a_payload() -> None:
    """Python may reuse the id of a freed object."""
    buffers: Any = BufferCounter(Still())  # type: ignore[arg-type]
    room, payload = torch.zeros(4096), torch.zeros(4096)
    buffers.rooms = {id(room): weakref.ref(room), id(payload): weakref.ref(room)}
    child = object()
    buffers.note_request(child, Op("all_reduce", room, "sum", ""))
    assert buffers.now == 0
    buffers.note_request(child, Op("all_reduce", payload, "sum", ""))
    assert buffers.now == 4 * 4096


def test_a_payload_in_the_memory_of_a_freed_residual_counts_as_a_payload() -> None:
    """Torch may reuse freed memory."""
    buffers: Any = BufferCounter(Still())  # type: ignore[arg-type]
    residual = torch.zeros(4096)
    where, alive = residual.untyped_storage()._cdata, [True]
    buffers.known = {where: lambda: residual if alive else None}
    child = object()
    buffers.note_request(child, Op("all_reduce", residual, "sum", ""))
    assert buffers.now == 0
    alive.clear()
    buffers.note_request(child, Op("all_reduce", residual, "sum", ""))
    assert buffers.now == 4 * 4096
    buffers.note_end(child)
    assert buffers.now == 0 and buffers.take_peak(stepping=False) == 4 * 4096


def test_the_record_grows_only_when_something_changes() -> None:
    made = sized(steps=100)
    rows = made.timeline.samples.rows()
    many = [name for name, rank in zip(rows.name, rows.rank, strict=True) if rank == 0 and name.startswith("memory ")]
    assert len(many) <= 2 * len(CATEGORIES) + 2


@pytest.mark.ranks
def test_the_allocators_numbers_are_recorded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    class Counting(Chip):
        def allocated_bytes(self) -> int:
            return 7_000_000

        def peak_bytes(self) -> int:
            return 9_000_000

    assert not {name for name in engine(run(experiment(2, 3))[0]) if "allocated" in name}, "a CPU has none"
    monkeypatch.setitem(device.CHIPS, "cpu", Counting)
    said = engine(run(experiment(2, 3))[0])
    assert (said["memory allocated"], said["memory allocated peak"]) == (7_000_000, 9_000_000)


def test_a_sample_holds_until_the_next_and_the_largest_is_reported() -> None:
    tl = Timeline()
    told = [(0, 100), (5, 300), (6, 200), (9, 50)]
    tl.samples.add([Sample(0, step, "memory activations", float(step), float(value)) for step, value in told])
    tl.samples.add([Sample(0, 0, "memory peak", 0.0, 400.0), Sample(0, 0, "loss", 0.0, 1.0)])
    asked = {(0, None): 300, (6, None): 200, (7, 9): 200, (3, 5): 100, (9, None): 50}
    for (first, stop), most in asked.items():
        (found,) = measure_memory(tl, first, stop)
        parts = {"activations": most, "in passing": 400 - most}
        assert (found.most, found.peak, found.allocated) == (parts, 400, None)
    assert measure_memory(Timeline()) == []


def test_a_rank_that_was_lost_holds_nothing_from_then_on() -> None:
    e = Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), ranks=3, steps=6, pace=10, on_death="go on")
    run = simulate(e, changes=[Change(3, "fabric.faults", [Crash(rank=1)])])
    assert [[m.rank for m in measure_memory(run.timeline, first)] for first in (0, 2, 3, 5)] == [[0, 1, 2]] * 2 + [
        [0, 2]
    ] * 2


def test_a_peak_is_at_most_the_sum_of_its_parts_and_excludes_past_evaluations() -> None:
    """Backward holds more than the activations that forward has kept: gradients between two layers."""
    e = Experiment(task=ByteGPT(layers=1, width=32, heads=4, context=32), ranks=2, steps=4, pace=10)
    for every, evaluates in ((0, False), (2, True)):
        for found in simulate(e.set("eval_every", every), real=True).memory(last=2):
            assert 0 < found.most["in passing"] <= found.peak <= sum(found.most.values())
            assert bool(found.most["evaluation"]) == evaluates


def test_a_summary_names_the_peak_and_old_records_have_none() -> None:
    made = sized()
    assert made.summary()["memory_peak"] == max(m.peak for m in made.memory()) > 0
    assert Run({"ranks": 2}).summary()["memory_peak"] is None
    assert str(made.memory()[0]).startswith("rank 0: peak 2")


@pytest.mark.ranks
def test_an_all_gather_of_a_group_counts_a_payload_per_member() -> None:
    class Halves(DDP):
        """Four ranks in two groups of two. In the first group each rank gathers 1000 numbers on its own lane."""

        def dims(self, size: int) -> tuple[tuple[str, int], ...]:
            return ("half", 2), ("data", 2)

        async def step(self, rank: Rank, state: Any) -> None:
            await rank.forward()
            await rank.backward()
            group = rank.group("data")

            async def child() -> None:
                await group.all_gather(torch.zeros(1000, device=state[0].data.device), "few")

            await rank.wait(await rank.start(child(), lane="aside", name="few"))
            await rank.update()

        def init(self, rank: Rank, params: Any) -> Any:
            return params

    e = experiment(4, 3, strategy=Halves())
    for said in (engine(run(e)[0]), *(simulated(simulate(e.set("pace", 5.0), real=real)) for real in (True, False))):
        assert said["memory buffers in flight"] == 4000 + 2 * 4000


def test_the_view_shows_offloaded_memory_only_if_there_is_some() -> None:
    e = experiment(2, 40, task=ByteGPT(layers=1, width=16, heads=2, context=8), pace=2.0, strategy=ZeROInfinity())
    view = next(view for view in all_views().values() if view.name == "memory")()
    traces = view.figure(Run({"ranks": 2})).data
    away = [number for number, trace in enumerate(traces) if trace.name == "on disk"]
    for change, ranks in (((), [0, 1]), ((Change(10, "strategy", "ZeRO3"),), [])):
        found = type(view)().update(simulate(e, changes=change)).replace[away[0]]
        assert found["y"].tolist() == ranks and len(found["x"]) == len(ranks)
