"""Tests stragglers among ranks that only message neighbours: the cause is blamed, not ranks that pass it on."""

from __future__ import annotations

import pytest

from tests.sim.virtual import paced
from workbench import simulate
from workbench.analysis import find_straggler
from workbench.fabric import Noisy, Slow
from workbench.strategies import AsyncServer, Gossip, Strategy

pytestmark = pytest.mark.ranks


def verdict(strategy: Strategy, ranks: int, *faults: Slow) -> object:
    return find_straggler(
        simulate(paced(ranks, 60, 20.0, strategy=strategy, faults=(*faults, Noisy(spread=0.05)))).timeline
    )


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete"])
@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.parametrize(("phase", "factor"), [("forward", 1.3), ("backward", 1.2)])
def test_the_slow_rank_is_the_cause_and_all_other_ranks_are_victims(
    graph: str, ranks: int, phase: str, factor: float
) -> None:
    found = verdict(Gossip(graph=graph), ranks, Slow(rank=1, factor=factor, phase=phase))
    assert found is not None
    assert (found.rank, found.side, found.phase) == (1, "compute", phase)
    assert set(found.victims) == set(range(ranks)) - {1}
    assert found.harm == pytest.approx(found.seconds, rel=0.2), "what it loses the others wait"


@pytest.mark.parametrize("graph", ["ring", "exponential"])
@pytest.mark.parametrize("ranks", [4, 8])
def test_a_slow_port_is_distinguished_from_slow_compute(graph: str, ranks: int) -> None:
    found = verdict(Gossip(graph=graph), ranks, Slow(rank=2, factor=20.0, phase="link"))
    assert found is not None and (found.rank, found.side) == (2, "link")
    direct = {1, 3} if graph == "ring" else set()
    assert direct <= set(found.victims)


@pytest.mark.parametrize("graph", ["ring", "exponential", "complete", "hypercube"])
def test_no_straggler_is_reported_without_a_fault(graph: str) -> None:
    assert verdict(Gossip(graph=graph), 8) is None


def test_a_slow_link_hidden_by_compute_is_not_blamed() -> None:
    assert verdict(Gossip(), 4, Slow(rank=1, factor=2.0, phase="link")) is None


def test_a_server_that_all_ranks_wait_for_by_design_is_not_blamed() -> None:
    assert verdict(AsyncServer(), 4) is None
    assert verdict(AsyncServer(servers=1), 4) is None
