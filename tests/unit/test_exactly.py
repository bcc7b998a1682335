"""Tests exact figures of the inspector: bandwidths of collectives, critical path, and overlap."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.unit import synthetic
from widgets.views import all_views
from workbench import Experiment, simulate
from workbench.analysis import by_collective, critical_path, last_steps, measure_overlap
from workbench.analysis.stragglers.path import describe_path, path_shares
from workbench.fabric import Fabric, Link, Slow
from workbench.record.timeline import Span, Timeline
from workbench.run import Run
from workbench.strategies import DDP, HSDP, LocalSGD, ZeRO3

BASE = Experiment(ranks=4, steps=8, pace=20.0, bucket_mb=0.4)


def ran(strategy: object, mbit: float, times: float = 1.5) -> Run:
    """Returns a run in which rank 2's backward takes `times` as long."""
    faults = (Slow(rank=2, factor=times, phase="backward"),)
    fabric = Fabric(link=Link(bandwidth=mbit), faults=faults)
    return simulate(replace(BASE, strategy=strategy, fabric=fabric))


@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), HSDP(), LocalSGD(every=4)], ids=lambda s: type(s).__name__)
def test_the_bus_bandwidth_is_the_links_for_any_collective_and_lateness(strategy: object) -> None:
    """Rings fill every port in both directions: on a Link of 100 Mbit/s each carries 100, as in nccl-tests."""
    found = ran(strategy, mbit=100.0, times=3.0).collectives()
    assert len(found) and found.waiting.max() > 1e-3, "somebody had to wait"
    np.testing.assert_allclose(found.busbw, 100.0, rtol=0.01)
    np.testing.assert_allclose(found.worst_busbw, 100.0, rtol=0.01)


def test_a_table_of_collectives_by_hand() -> None:
    """Two all-reduces of 1,000 bytes on 4 ranks take 2 s and 4 s from the last arrival."""
    tl = Timeline()
    for rank in range(4):
        for k, (last, end) in enumerate(((5.0, 7.0), (11.0, 15.0))):
            came = last - (3 - rank)
            tl.spans.add([Span(rank, k, "comm", "all_reduce bucket 0", came, came, end, 1500),
                          Span(rank, k, "step", "DDP", 10.0 * k, 10.0 * k, end, 0)])  # fmt: skip
    (row,) = by_collective(tl, 0, 2)
    assert (row.operation, row.bucket, row.group, row.ranks, row.times) == ("all_reduce", "bucket 0", "", 4, 2)
    assert (row.nbytes, row.sent, row.seconds, row.slowest) == (1000.0, 1500.0, 3.0, 4.0)
    assert row.algbw == pytest.approx(8e-3 * (1 / 2 + 1 / 4) / 2) and row.worst_algbw == pytest.approx(8e-3 / 4)
    assert row.busbw == pytest.approx(1.5 * row.algbw) and row.worst_busbw == pytest.approx(1.5 * row.worst_algbw)
    assert row.waiting == pytest.approx(1.5) and row.longest == 3.0
    none = Timeline()
    assert by_collective(none, 0, 0) == [] and critical_path(none, 0, 0) == [] and describe_path([]) == ""


@pytest.mark.parametrize("mbit", [0.0, 150.0, 2000.0])
@pytest.mark.parametrize("strategy", [DDP(), ZeRO3(), LocalSGD(every=4)], ids=lambda s: type(s).__name__)
def test_a_longer_phase_on_the_critical_path_lengthens_the_step_equally(strategy: object, mbit: float) -> None:
    """A phase on the path that grows by 0.1 % lengthens the simulated run by the same time."""
    run = ran(strategy, mbit)
    more = 1e-3
    longer = ran(strategy, mbit, 1.5 * (1 + more))
    first, stop = last_steps(run.timeline)
    on_path = path_shares(critical_path(run.timeline, first, stop)).get((2, "backward"), 0.0) * (stop - first)
    grown = float(longer.spans.t1.max() - run.spans.t1.max())
    assert grown == pytest.approx(more * on_path, rel=0.02, abs=1e-9)


def test_pieces_of_a_path_are_contiguous_and_inside_their_spans() -> None:
    run = synthetic.run(steps=60, changes=(), slow=(1, "backward", 1.4))
    steps, compute = run.spans[run.spans.lane == "step"], run.spans[run.spans.lane == "compute"]
    found = run.critical_path(20)
    for step, path in found.groupby("step"):
        assert path.end.max() == steps[steps.step == step].t1.max()
        np.testing.assert_allclose(path.begin.to_numpy()[1:], path.end.to_numpy()[:-1], atol=1e-9)
        first = path.iloc[0]
        begun = steps[(steps.step == step) & (steps["rank"] == first["rank"])].t0.iloc[0]
        assert first.begin == pytest.approx(begun, abs=1e-6)
    for row in found[found.cause.isin(["forward", "backward"])].itertuples():
        its = compute[(compute["rank"] == row.rank) & (compute.step == row.step) & (compute.name == row.cause)].iloc[0]
        assert its.t0 - 1e-9 <= row.begin <= row.end <= its.t1 + 1e-9
    text = describe_path(critical_path(run.timeline, *last_steps(run.timeline, 20)))
    assert "the network" in text and "rank 1's backward" in text


def test_a_slow_port_is_on_the_path_with_its_rank() -> None:
    run = synthetic.run(steps=60, changes=(), slow=(3, "link", 1.5))
    (rank, cause), _ = next(iter(path_shares(critical_path(run.timeline, 40, 60)).items()))
    assert (rank, cause) == (3, "network")


@pytest.mark.parametrize("seed", range(20))
def test_overlap_equals_a_count_of_every_tick(seed: int) -> None:
    """Compares random intervals on whole milliseconds, which overlap and touch, with a count of each millisecond."""
    rng = np.random.default_rng(seed)
    ticks, tl = 200, Timeline()
    comm = np.zeros((2, ticks), bool)
    phases = {name: np.zeros((2, ticks), bool) for name in ("forward", "backward", "update")}
    for rank in range(2):
        for _ in range(rng.integers(0, 12)):
            a, b = sorted(rng.integers(0, ticks, 2))
            comm[rank, a:b] = True
            tl.spans.add([Span(rank, 0, "comm", "all_reduce bucket 0", a, a, b, 1)])
        at = 0
        while (at := at + int(rng.integers(0, 20))) < ticks - 25:
            name, lasts = str(rng.choice(list(phases))), int(rng.integers(1, 25))
            phases[name][rank, at : at + lasts] = True
            tl.spans.add([Span(rank, 0, "compute", name, at, at, at + lasts, 0)])
            at += lasts
        tl.spans.add([Span(rank, 0, "step", "DDP", 0, 0, ticks, 0)])
    found, computed = measure_overlap(tl, 0, 1), np.logical_or.reduce(list(phases.values()))
    assert found.communication.tolist() == comm.sum(axis=1).tolist()
    assert found.hidden.tolist() == (comm & computed).sum(axis=1).tolist()
    assert found.exposed.tolist() == (comm & ~computed).sum(axis=1).tolist()
    for name, of in phases.items():
        assert found.behind[name].tolist() == (comm & of).sum(axis=1).tolist()


def test_a_path_is_marked_on_the_timeline_except_in_a_riddle() -> None:
    run = synthetic.run(steps=30, changes=())
    timeline = next(kind for kind in all_views().values() if kind.name == "timeline")
    boxes = timeline().update(run).replace
    last = max(boxes)
    steps = sorted(set(boxes[last]["step"].tolist()))
    assert boxes[last]["x0"].tolist() == [p.begin for p in critical_path(run.timeline, steps[0], steps[-1] + 1)]
    assert set(boxes[last]["rank"].tolist()) <= set(range(4))
    run.secret = "A riddle is running."
    assert not len(timeline().update(run).replace[last]["x0"])
