"""Tests that a short collective on a shaped Link lasts at least as long as its real transfer."""

from dataclasses import replace

import numpy as np
import pytest

from workbench import Experiment, simulate
from workbench.compressors import Dense, TopK
from workbench.fabric import Fabric, Link
from workbench.record.timeline import Timeline
from workbench.sim import AlphaBeta, Costs
from workbench.tasks import ByteGPT

TASK = ByteGPT(layers=1, width=32, heads=2, context=16)


def transfer(link: Link, wire: AlphaBeta) -> float:
    """Returns the seconds of DDP's first collective."""
    e = Experiment(task=TASK, ranks=4, steps=1, eval_every=0, fabric=Fabric(link=link))
    spans = simulate(e, costs=Costs(forward=0.01, backward=0.02, wire=wire)).timeline.spans.rows()
    comm = spans[spans.equal("lane", "comm")]
    return float(comm.t1[0] - comm.t0[0])


def test_a_short_collective_takes_the_time_of_the_bare_wire() -> None:
    bare = transfer(Link(), AlphaBeta(0.001, 0.0))
    shaped = transfer(Link(bandwidth=100_000.0), AlphaBeta(0.001, 0.0))
    assert shaped == pytest.approx(bare, rel=0.02)


def test_the_bare_wire_adds_nothing_on_a_slow_link() -> None:
    link = Link(bandwidth=10.0, latency=1.0)
    assert transfer(link, AlphaBeta(0.001, 0.0)) == transfer(link, AlphaBeta())


def test_merged_costs_keep_the_known_bare_wire() -> None:
    wire = AlphaBeta(0.001, 1e-9)
    assert (Costs() | Costs(wire=wire)).wire == wire
    assert (Costs(wire=wire) | Costs(wire=AlphaBeta(1.0, 1.0))).wire == wire


def test_the_time_of_short_collectives_is_measured_on_the_link() -> None:
    """0.1 % of the values hardly use the Link. Whole buckets on a slow Link show how late they end."""
    link = Fabric(link=Link(bandwidth=1000.0, latency=0.01))
    e = Experiment(task=TASK, ranks=4, steps=12, eval_every=0, fabric=link, compressor=TopK(density=0.001))
    paid = Costs(forward=0.01, backward=0.02, linked=AlphaBeta(0.0016))
    found = Costs.measured(simulate(e, costs=paid))
    assert found.linked.message == pytest.approx(0.0016, rel=0.05)
    assert found.late == 0.0
    long = replace(e, compressor=Dense(), fabric=Fabric(link=Link(bandwidth=10.0, latency=0.01)))
    late = Costs.measured(simulate(long, costs=replace(paid, linked=AlphaBeta(), late=0.001)))
    assert late.late == pytest.approx(0.001, rel=0.05)
    assert late.linked == AlphaBeta()


def test_collectives_queued_behind_a_stall_count_it_once() -> None:
    """A stop or a busy machine blocked the connection after a step's gathers had begun, so they ended one after
    another.
    """
    link, stall = Fabric(link=Link(bandwidth=1000.0, latency=0.01)), 0.5
    e = Experiment(task=TASK, ranks=2, steps=12, eval_every=0, fabric=link, compressor=TopK(density=0.001),
                   bucket_mb=0.02)  # fmt: skip
    run = simulate(e, costs=Costs(forward=0.01, backward=0.02, linked=AlphaBeta(0.0016)))
    rows = run.timeline.spans.rows()
    held = rows.equal("lane", "comm") & (rows.step == e.steps - 1)
    end = rows.t1.copy()
    end[held] = end[held].max() + stall + 1e-3 * np.unique(end[held], return_inverse=True)[1]
    stalled = Timeline()
    stalled.spans.extend(rows.replaced(t1=end).columns)
    stalled.samples.extend(run.timeline.samples.rows().columns)
    stalled.marks.extend(run.timeline.marks.rows().columns)
    before = Costs.measured(run).linked.message
    run.timeline = stalled
    each = int((rows.equal("lane", "comm") & (rows.rank == 0) & (rows.step >= 2)).sum())
    assert held.sum() > 4
    assert (Costs.measured(run).linked.message - before) * each == pytest.approx(stall, rel=0.1)
