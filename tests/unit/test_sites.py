"""Tests sites on both hosts: traffic inside one uses its Link, traffic that leaves it the slower Link."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.piped import piped
from tests.ranks import experiment, run
from tests.sim.virtual import rows
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Freeze, Link, Slow
from workbench.fabric.load import idle
from workbench.partitions import Pipeline
from workbench.settings import Change
from workbench.strategies import DDP, HierarchicalLocalSGD

FAST, SLOW = Link(bandwidth=80.0, latency=1.0), Link(bandwidth=8.0, latency=4.0)  # 10 bytes and 1 byte per microsecond


def sites(of: int, link: Link = FAST, between: Link = SLOW, **rest: Any) -> Fabric:
    """Returns a fabric with sites of `of` ranks."""
    return Fabric(link=link, site=of, between_bandwidth=between.bandwidth, between_latency=between.latency, **rest)


def ports(simulated: Any, rank: int) -> dict[tuple[int, str], float]:
    """Returns the seconds for which a rank's port was busy, by step and name."""
    found = rows(simulated, "port", rank)
    return dict(zip(zip(found.step, found.name, strict=True), found.t1 - found.t0, strict=True))


@pytest.mark.parametrize(
    ("link", "between", "far"),
    [
        (FAST, SLOW, SLOW),
        (SLOW, FAST, SLOW),
        (Link(bandwidth=80.0, jitter=0.5), Link(latency=3.0), Link(bandwidth=80.0, latency=3.0, jitter=0.5)),
        (Link(), Link(bandwidth=5.0), Link(bandwidth=5.0)),
        (FAST, Link(), FAST),
    ],
)
def test_traffic_that_leaves_a_site_has_the_slower_links_speed(link: Link, between: Link, far: Link) -> None:
    fabric = sites(4, link, between)
    assert fabric.path((4, 5, 7)) == link and fabric.path(range(4)) == link
    assert fabric.path((3, 4)) == far and fabric.path((1, 5, 9)) == far


def test_without_sites_the_link_between_them_is_unused() -> None:
    assert sites(0).path(range(64)) == FAST
    assert not sites(0, Link()).shaped and sites(2, Link()).shaped


def test_a_collective_in_one_site_uses_its_link_and_across_sites_the_slow_one() -> None:
    """A ring of n ranks sends 2 (n-1) messages in turn, and 2 (n-1)/n of the bytes."""
    fabric = sites(4)
    run = simulate(experiment(8, 4, pace=10.0, bucket_mb=25.0, fabric=fabric,
                              strategy=HierarchicalLocalSGD(every=4, group=4, group_every=2)))  # fmt: skip
    took, nbytes = ports(run, 5), 4 * next(detail["parameters"] for _, _, detail in run.details("start"))
    inside = [v for (_, name), v in took.items() if "in within" in name]
    across = [v for (_, name), v in took.items() if "in within" not in name]
    assert inside and across
    assert inside == pytest.approx([6e-3 + 1.5 * nbytes / 10e6] * len(inside))
    assert across == pytest.approx([14 * 4e-3 + 1.75 * nbytes / 1e6] * len(across))


def test_on_real_ranks_ports_are_busy_as_long_as_on_the_virtual_clock() -> None:
    """Two replicas of two stages. A site is a replica, so activations stay inside and gradients leave it."""
    e = piped(4, 3, partition=Pipeline(stages=2, micros=2), pace=3.0, fabric=sites(2))
    simulated = simulate(e, real=True)
    for s in run(e):
        real = {(r[0], r[2]): r[5] - r[4] for r in s.record if r[1] == "port"}
        virtual = ports(simulated, s.rank.id)
        assert set(real) == set(virtual) and len(real) >= 3
        for key, seconds in real.items():
            assert seconds == pytest.approx(virtual[key], rel=1e-6)
        sent = {(r[0], r[2]): r[5] - r[4] for r in s.record if r[1] == "comm" and r[2].startswith("send ")}
        assert sent


def test_messages_to_another_site_use_the_slow_link() -> None:
    """Four stages on two sites: activations from stage 1 to stage 2 leave a site."""
    e = piped(4, 2, partition=Pipeline(stages=4, micros=2), pace=3.0, fabric=sites(2))
    spans = rows(simulate(e), "comm")
    sent = spans[[str(name).startswith("send activation") for name in spans.name]]
    for rank, (rate, latency) in enumerate([(10e6, 1e-3), (1e6, 4e-3), (10e6, 1e-3)]):
        mine = sent[sent.rank == rank]
        assert len(mine) == 4
        np.testing.assert_allclose(mine.t1 - mine.t0, latency + mine.nbytes / rate, rtol=1e-9)


def test_a_site_is_set_while_training_runs() -> None:
    e: Experiment = experiment(4, 8, strategy=DDP(), pace=3.0, fabric=Fabric(link=FAST))
    changes = [Change(3, "fabric.site", 2), Change(3, "between_bandwidth", 8.0), Change(3, "between_latency", 4.0)]
    took = ports(simulate(e, changes=changes), 0)
    before, after = (max(v for (step, _), v in took.items() if step in steps) for steps in ((0, 1, 2), (4, 5, 6)))
    assert after > 3.0 * before
    for s in run(e, *changes):
        real = {(r[0], r[2]): r[5] - r[4] for r in s.record if r[1] == "port"}
        assert real[6, next(name for step, name in real if step == 6)] == pytest.approx(after, rel=1e-6)


def test_a_link_fault_has_an_effect_with_sites_only() -> None:
    slow = Slow(rank=0, factor=2.0, phase="link")
    assert idle(Fabric(faults=(slow,)), ranks=4)
    assert not idle(sites(2, Link(), faults=(slow, Freeze(rank=1))), ranks=4)
