"""Tests that all ranks know earlier changes and their origin, also new ranks and ranks that went back."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sim.insides import simulated
from tests.sim.test_mortal import ends, members, setting
from tests.unit.test_crash import crash
from tests.unit.test_policies import Halver
from tests.unit.test_resizing import Crowd
from tests.unit.test_resizing import setting as resized
from workbench.record.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, Strategy

pytestmark = pytest.mark.ranks


def known(session: Any) -> list[tuple[int, str]]:
    """Returns the changes that a rank knows: step and path."""
    return [(change.at_step, change.path) for change in session.policy_runner.made]


def told(run: Run) -> list[tuple[int, str]]:
    """Returns the same from the record."""
    return [(step, said["path"]) for step, _, said in run.details("change")]


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=str)
def test_a_new_first_rank_respects_what_a_person_set_before(strategy: Strategy) -> None:
    with Crowd(resized(strategy, policy=Halver(look_every=5), diverged=0.0)) as crowd:
        crowd.first.request({"kind": "change", "path": "lr", "value": 0.001, "id": "by hand"})
        crowd.until(lambda: crowd.said("change"))
        crowd.resize(0, 1, 2)
        assert {len(known(s.training)) for s in crowd.there} == {1}
        crowd.resize(2)
        assert crowd.first.member == 2
        crowd.reach(crowd.first.rank.step + 12)
        assert crowd.first.experiment.lr == 0.001
        crowd.stopped()
    assert [said["id"] for said in crowd.said("change")] == ["by hand"]


@pytest.mark.parametrize("real", [True, False], ids=["real", "sizes"])
def test_a_new_simulated_rank_respects_what_a_person_set_before(real: bool) -> None:
    e = setting(DDP(), ranks=2, steps=400, pace=300.0, on_death="replace", policy=Halver(look_every=5))
    changes = [Change(3, "lr", 0.04), crash(5, 0), Change(200, "bucket_mb", 0.5), crash(300, 0)]
    run, sessions = simulated(e, *changes, real=real)
    last = {s.member: s for s in sessions if ends(run)[s.member] == "done"}
    assert sorted(last) == [2, 3], "all who were there have been replaced"
    assert {tuple(known(s)) for s in last.values()} == {tuple(told(run))}
    assert [said["value"] for _, _, said in run.details("change") if said["path"] == "lr"] == [0.04]


def test_a_new_rank_knows_that_decisions_are_replayed() -> None:
    """The run is simulated again with all of its changes, so no policy decides a second time on any rank."""
    e = setting(DDP(), ranks=2, steps=400, pace=300.0, on_death="replace", policy=Halver(look_every=50), lr=0.5)
    run, _ = simulated(e, crash(5, 0), crash(300, 0))
    made = [(step, said["path"], said["value"]) for step, _, said in run.details("change")]
    assert [at for at, path, _ in made if path == "lr"][-1] > 300 and len(members(run)) == 4
    again, _ = simulated(e, *run.changes)
    assert [(step, said["path"], said["value"]) for step, _, said in again.details("change")] == made
