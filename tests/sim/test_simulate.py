"""Tests the simulator alone: the time that passes, its records and its refusals."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from tests.ranks import experiment, toy
from tests.sim.virtual import comm, paced, rows, same, samples, seconds, stack
from workbench import Costs, ParameterServer, simulate
from workbench.analysis import before_after, break_down, find_straggler
from workbench.compressors import Cast, TopK
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Freeze, Link, Noisy, Slow
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change, KnobError
from workbench.sim import AlphaBeta, Duration
from workbench.strategies import DDP, LocalSGD, TorchDDP
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

CHANGES = (
    Change(2, "bucket_mb", 0.02), Change(3, "strategy", LocalSGD(every=2)), Change(5, "compressor", TopK.usual()),
    Change(6, "fabric.link.bandwidth", 50.0), Change(7, "strategy", DDP()), Change(8, "lr", 0.05),
)  # fmt: skip


@pytest.mark.parametrize("real", [False, True], ids=["sizes", "tensors"])
def test_rank_0_waits_for_nobody_when_ranks_agree_on_the_order_of_gradients(real: bool) -> None:
    """Rank 0 sums and answers, so it is ready first. The last rank has its answer three messages later."""
    e = experiment(4, 6, pace=10.0, bucket_mb=1.0, fabric=Fabric(algorithm=ParameterServer(), link=Link(latency=50)))
    steps = simulate(e, real=real).spans.query("lane == 'step'")
    ends, begins = (steps.pivot(index="rank", columns="step", values=at) for at in ("t1", "t0"))
    assert begins[1][0] == ends[0][0] < ends[0][3] - 0.1
    assert (ends[2] - ends[1]).to_list() == pytest.approx((ends[5] - ends[4]).to_list(), abs=2e-3)


@pytest.mark.parametrize(("mbit", "bound"), [(10_000.0, "compute"), (20.0, "wire")])
def test_ddp_takes_the_time_of_its_bound(mbit: float, bound: str) -> None:
    """With equal buckets, the last one is exposed if compute is the bound; if the link is, all but the first wait."""
    p, layers, width, pace = 4, 8, 100, 20.0
    run = simulate(paced(p, 4, pace, mbit, task=stack(layers, width)))
    sizes = run.details("buckets")[-1][2]["nbytes"]
    assert sizes == [4 * width * width] * layers
    one = 2 * (p - 1) / p * sizes[0] * 8e-6 / mbit
    backward, rest = 0.6 * pace * 1e-3, 0.4 * pace * 1e-3
    expected = rest + max(backward + one, backward / layers + layers * one)
    assert (backward / layers > one) == (bound == "compute")
    np.testing.assert_allclose(seconds(run)[1:], expected, rtol=1e-9)


def test_latency_is_paid_per_message() -> None:
    plain, late = (simulate(paced(4, 3, 10.0, 20.0, latency=ms, task=stack())) for ms in (0.0, 1.0))
    assert seconds(late)[-1] - seconds(plain)[-1] == pytest.approx(8 * 2 * 3 * 1e-3)


def test_gradients_are_ready_in_proportion_to_parameters() -> None:
    run = simulate(paced(2, 2, 10.0, 1e6, task=stack(5)))
    ready = rows(run, "comm", 0)
    ready = ready.asked[ready.step == 1] - seconds(run)[0]
    np.testing.assert_allclose(ready, 3e-3 + 6e-3 * np.arange(1, 6) / 5, rtol=1e-9)


@pytest.mark.parametrize("real", [False, True])
def test_two_simulations_are_bit_identical(real: bool) -> None:
    e = paced(4, 10, faults=(Noisy(spread=0.5),), jitter=0.3, eval_every=4)
    runs = [simulate(e, changes=CHANGES, real=real) for _ in range(2)]
    assert same(*runs)
    assert len(samples(runs[0], "loss")) == (40 if real else 0)
    assert (len(samples(runs[0], "held_out")) > 0) == real


@pytest.mark.parametrize("real", [False, True])
def test_a_run_replays_from_its_own_changes(real: bool) -> None:
    first = simulate(paced(3, 10), changes=CHANGES, real=real)
    assert [c.path for c in first.changes] == [c.path for c in CHANGES]
    again = simulate(first.experiment, changes=first.changes, real=real)
    assert same(first, again)
    assert len(rows(first, "switch", 0)) == 2


def test_sizes_and_tensors_take_the_same_time() -> None:
    e = paced(3, 10, faults=(Slow(rank=1, factor=2.0),))
    sizes, tensors = (simulate(e, changes=CHANGES, real=real) for real in (False, True))
    assert comm(sizes, 2) == comm(tensors, 2)
    np.testing.assert_array_equal(rows(sizes, "comm").t1, rows(tensors, "comm").t1)


def test_a_change_that_cannot_be_simulated_is_refused_in_the_record_and_the_run_goes_on() -> None:
    run = simulate(paced(2, 4), changes=[Change(2, "strategy", TorchDDP())])
    [(_, _, detail)] = run.details("refused")
    assert "wall clock" in detail["reason"]
    assert run.state == "done" and not run.changes


@pytest.mark.parametrize(("change", "words"), [
    (Change(1, "bucket_mb", -1.0), "bucket_mb=-1.0: must be"),
    (Change(1, "seed", 2), "seed=2: cannot change while a run is live; give it to the experiment"),
    (Change(1, "every", 2), "no such knob here"),
])  # fmt: skip
def test_an_invalid_planned_change_is_refused_before_the_start_as_by_a_lab(change: Change, words: str) -> None:
    with pytest.raises(KnobError, match=words):
        simulate(paced(2, 4), changes=[change])


@dataclass(frozen=True, kw_only=True)
class LeavingDDP(DDP):
    """A DDP that ends the process in its second step."""

    async def step(self, rank: Rank, state: Any) -> None:
        if rank.step == 1:
            raise SystemExit("enough")
        await super().step(rank, state)


@dataclass(frozen=True, kw_only=True)
class LeavingCast(Cast):
    """A Cast that ends the process when it compresses."""

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Any:
        raise SystemExit("enough")


def leaving(*_: Any) -> Any:
    """Ends the process instead of returning an optimizer."""
    raise SystemExit("enough")


@dataclass(frozen=True, kw_only=True)
class LeavingTask(ByteGPT):
    """A task that ends the process instead of being built."""

    def build(self) -> Any:
        raise SystemExit("enough")


@pytest.mark.parametrize("member", [
    {"strategy": LeavingDDP()}, {"compressor": LeavingCast(to="bf16")}, {"task": LeavingTask()},
    {"task": toy(optimizer=leaving)},
], ids=["strategy", "compressor", "task", "its optimizer"])  # fmt: skip
def test_a_member_of_a_family_does_not_end_the_process_that_asked(member: dict[str, Any]) -> None:
    said = r"SystemExit\('enough'\) was raised (on virtual rank \d|before the first step).*must not end the process"
    with pytest.raises(RuntimeError, match=said):
        simulate(paced(2, 4, **member), real=True)


def test_a_slow_rank_stretches_every_step_of_ddp() -> None:
    healthy, slow = (
        simulate(paced(3, 4, 10.0, 1e6, faults=f)) for f in ((), (Slow(rank=2, factor=3.0, phase="forward"),))
    )
    np.testing.assert_allclose(seconds(slow)[1:] - seconds(healthy)[1:], 2 * 3e-3, rtol=1e-3)
    compute = rows(slow, "compute", 2, "forward")
    np.testing.assert_allclose(compute.t1 - compute.t0, 9e-3)


def test_a_slow_port_makes_its_collectives_longer_and_is_recorded_with_its_rank() -> None:
    run = simulate(paced(3, 3, faults=(Slow(rank=1, factor=4.0, phase="link"),)))
    port = [rows(run, "port", r) for r in range(3)]
    busy = [float((p.t1 - p.t0)[0]) for p in port]
    assert busy[1] == pytest.approx(4 * busy[0]) and busy[0] == busy[2]


def test_a_frozen_rank_delays_the_other_ranks_once() -> None:
    run = simulate(paced(3, 5), changes=[Change(2, "faults", (Freeze(rank=1, seconds=1.5),))])
    assert seconds(run, 0).argmax() == 2
    assert seconds(run, 0)[2] == pytest.approx(seconds(run, 0)[3] + 1.5)
    assert run.details("fault", 1)


def test_noise_differs_from_rank_to_rank_and_step_to_step() -> None:
    run = simulate(paced(4, 5, faults=(Noisy(spread=0.5),), strategy=LocalSGD(every=5)))
    forward = rows(run, "compute", name="forward")
    assert len({round(float(d), 12) for d in forward.t1 - forward.t0}) == 20


def test_local_sgd_lets_ranks_drift_apart_between_meetings() -> None:
    run = simulate(paced(3, 8, 10.0, 1e6, faults=(Slow(rank=0, factor=2.0),), strategy=LocalSGD(every=8)))
    assert seconds(run, 1)[3] == pytest.approx(10e-3, rel=1e-3) and seconds(run, 0)[3] == pytest.approx(20e-3, rel=1e-3)


def test_real_tensors_of_sixteen_ranks_learn() -> None:
    e = Experiment(task=ByteGPT(layers=1, width=32, heads=2, context=16), ranks=16, steps=8, pace=20, eval_every=4)
    run = simulate(e, real=True)
    held = samples(run, "held_out")
    assert held[0] == pytest.approx(np.log(256), rel=0.01) and held[-1] < held[0] - 0.2
    assert np.all(samples(run, "drift") < 1e-6)


def test_a_thousand_ranks_share_one_model_of_any_size() -> None:
    e = Experiment(task=ByteGPT(layers=48, width=4096, heads=64), ranks=1000, steps=1, pace=20, bucket_mb=1024)
    before = psutil.Process().memory_info().rss
    run = simulate(e)
    assert run.details("start")[0][2]["nbytes"] > 30e9
    assert psutil.Process().memory_info().rss - before < 1e9
    assert run.summary()["ranks"] == 1000 and run.state == "done"


def test_the_callers_random_numbers_threads_and_collector_stay() -> None:
    torch.manual_seed(3)
    wanted, often = torch.rand(4), gc.get_threshold()
    torch.manual_seed(3)
    simulate(paced(2, 2), real=True)
    assert torch.equal(torch.rand(4), wanted)
    assert gc.get_threshold() == often and torch.is_grad_enabled()


def test_torch_ddp_is_refused_because_it_needs_the_wall_clock() -> None:
    with pytest.raises(KnobError, match=r"TorchDDP: only torch itself can run its exchange.*simulate DDP"):
        simulate(paced(strategy=TorchDDP()))


def test_a_simulation_without_pace_or_costs_is_refused() -> None:
    with pytest.raises(KnobError, match=r"pace=0: the duration of compute is unknown.*Costs.measured"):
        simulate(experiment(2, 4))
    assert simulate(experiment(2, 4), costs=Costs(forward=0.01)).state == "done"


def test_a_simulation_without_an_end_is_refused() -> None:
    with pytest.raises(KnobError, match="steps=0"):
        simulate(paced(2, 0))


def test_too_many_ranks_for_real_tensors_are_refused_with_the_number_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    room = type("room", (), {"available": 50_000_000})
    monkeypatch.setattr(psutil, "virtual_memory", lambda: room)
    e = Experiment(task=ByteGPT(), ranks=64, steps=1, pace=1)
    with pytest.raises(KnobError, match=r"ranks=64: .*take at most (\d+) ranks") as refusal:
        simulate(e, real=True)
    fit = int(str(refusal.value).split("at most ")[1].split()[0])
    assert 0 < fit < 64
    assert simulate(Experiment(task=ByteGPT(), ranks=fit, steps=1, pace=1, eval_every=0), real=True).state == "done"


def test_costs_measured_from_a_simulated_run_equal_its_costs() -> None:
    given = Costs(
        forward=(0.010, 0.012, 0.011), backward=0.02, update=0.002, wire=AlphaBeta(1e-4, 1e-8),
        between=0.001, evaluate=0.05,
        codec={"ErrorFeedback(TopK)": (2e-7, 1e-7, 3e-7)},
    )  # fmt: skip
    for compressor in (None, TopK.usual()):
        e = experiment(3, 20, eval_every=5, **({"compressor": compressor} if compressor else {}))
        found = Costs.measured(simulate(e, costs=given))
        for phase in ("forward", "backward", "update"):
            expected = [d.seconds for d in getattr(given, phase)] * (3 if phase != "forward" else 1)
            assert [d.seconds for d in getattr(found, phase)] == pytest.approx(expected)
        assert found.wire == pytest.approx(given.wire, rel=1e-6)
        assert (found.between, found.evaluate) == pytest.approx((0.001, 0.05))
        assert found.codec == ({k: pytest.approx(v) for k, v in given.codec.items()} if compressor else {})


def test_costs_measured_on_a_link_include_late_collectives_and_the_spread_of_a_phase() -> None:
    given = Costs(forward=Duration(0.01, 0.1), backward=0.02, update=0.002, late=3e-4)
    e = experiment(2, 200, fabric=Fabric(link=Link(bandwidth=500.0, latency=0.1)))
    found = Costs.measured(simulate(e, costs=given))
    assert found.late == pytest.approx(3e-4, rel=1e-6)
    assert found.forward[1].spread == pytest.approx(0.1, rel=0.25)


def test_measured_costs_exclude_the_effect_of_faults() -> None:
    e = paced(3, 20, faults=(Slow(rank=1, factor=2.0), Noisy(spread=0.4)))
    found = Costs.measured(simulate(e))
    assert [d.seconds for d in found.backward] == pytest.approx([6e-3] * 3)


def test_negative_costs_raise_value_error() -> None:
    with pytest.raises(ValueError, match="forward=-1"):
        Costs(forward=-1.0)


def test_every_analysis_reads_a_simulated_run() -> None:
    slow = Slow(rank=1, factor=2.0)
    run = simulate(paced(4, 40, faults=(slow,)), changes=[Change(20, "strategy", "LocalSGD")], real=True)
    verdict = find_straggler(run.timeline)
    assert verdict is not None and verdict.rank == 1 and verdict.side == "compute"
    assert before_after(run.timeline, 20).text == "strategy = LocalSGD"
    parts = break_down(run.timeline, 5, 15)
    np.testing.assert_allclose(parts.compute + parts.exposed + parts.other, parts.seconds)
    assert run.summary()["state"] == "done" and "Slow(rank=1" in run.as_python()
