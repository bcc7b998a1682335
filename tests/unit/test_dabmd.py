"""DABMD on real ranks: a slow one takes fewer batches and holds up nobody, and the rest hear of every change."""

from __future__ import annotations

import pytest

from tests.ranks import experiment, run
from workbench.engine.session import Session
from workbench.fabric import Slow
from workbench.host.canonical import state_hash
from workbench.settings import Change
from workbench.strategies import DABMD

pytestmark = pytest.mark.ranks


def took(session: Session) -> list[float]:
    return [v for _, name, _, v in session.record.samples if name == "batches"]


def test_a_slow_rank_takes_fewer_batches_and_a_round_is_as_long() -> None:
    chosen = experiment(3, 10, strategy=DABMD(window=240.0), pace=30.0).set("faults", (Slow(rank=1, factor=4.0),))
    sessions = run(chosen, Change(9, "strategy", "DDP"))
    batches = [sorted(took(s)[1:]) for s in sessions]
    assert batches[1][4] <= 2 < 5 <= min(batches[0][4], batches[2][4]), "108 ms each beside 27 ms each, in 240 ms"
    lasted = sorted(r[5] - r[4] for r in sessions[0].record if r[1] == "step" and r[0] < 9)
    assert lasted[4] < 0.39, "ten batches of the slow rank would take 1.08 s"
    assert len({state_hash(s.layout) for s in sessions}) == 1


def test_turned_live_between_graphs_it_goes_on() -> None:
    wanted = [(3, "strategy.graph", "exponential"), (6, "strategy.rounds", 3), (9, "bucket_mb", 0.02)]
    sessions = run(experiment(4, 12, strategy=DABMD(window=5.0), pace=1.0), *(Change(*change) for change in wanted))
    assert len(sessions[0].record.noted("change")) == 3 and not sessions[0].record.noted("refused")
    assert all(len(took(s)) == 12 for s in sessions)
