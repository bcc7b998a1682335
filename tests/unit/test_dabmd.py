"""Tests DABMD on real ranks: a slow rank takes fewer batches, delays no rank, and changes reach all."""

from __future__ import annotations

import pytest

from tests.ranks import experiment, run
from tests.sim.virtual import samples, seconds
from workbench import simulate
from workbench.engine.rank.session import Session
from workbench.fabric import Slow
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change
from workbench.strategies import DABMD

pytestmark = pytest.mark.ranks


def took(session: Session) -> list[float]:
    return [v for _, name, _, v in session.record.samples if name == "batches"]


def test_a_slow_rank_takes_fewer_batches_in_rounds_of_equal_length() -> None:
    """On the virtual clock ranks take as many batches as fit into the window. A busy machine allows fewer on real
    ranks.
    """
    chosen = experiment(3, 10, strategy=DABMD(window=240.0), pace=30.0).set("faults", (Slow(rank=1, factor=4.0),))
    change = Change(9, "strategy", "DDP")
    simulated = simulate(chosen, changes=[change])
    each = [set(samples(simulated, "batches", r)) for r in range(3)]
    assert each == [{8.0}, {2.0}, {8.0}], "27 ms each beside 108 ms each, in 240 ms"
    assert seconds(simulated)[:9].max() < 0.24, "ten batches of the slow rank would take 1.08 s"
    sessions = run(chosen, change)
    batches = [sorted(took(s)[1:]) for s in sessions]
    assert batches[1][4] < min(batches[0][4], batches[2][4])
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_live_changes_of_graph_and_rounds_work() -> None:
    wanted = [(3, "strategy.graph", "exponential"), (6, "strategy.rounds", 3), (9, "bucket_mb", 0.02)]
    sessions = run(experiment(4, 12, strategy=DABMD(window=5.0), pace=1.0), *(Change(*change) for change in wanted))
    assert len(sessions[0].record.noted("change")) == 3 and not sessions[0].record.noted("refused")
    assert all(len(took(s)) == 12 for s in sessions)
