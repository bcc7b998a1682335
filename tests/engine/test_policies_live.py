"""Runs a policy from a notebook's cell in a lab: set live, named in changes, overruled, disabled."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import pytest

from tests.labs import apart
from tests.waiting import until
from widgets.charts.marks import change_marks
from widgets.controls.controls import Controls
from widgets.controls.requests import list_items
from workbench.experiment import Experiment
from workbench.experiment.recipes import recipe
from workbench.lab import Lab
from workbench.policies import Decision, Policy, Seen

pytestmark = pytest.mark.engine


@dataclass(frozen=True, kw_only=True)
class Lowering(Policy):
    """Halves the rate at every look until it is below 1e-4, then fails."""

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        if seen.experiment.lr < 1e-4:
            raise ArithmeticError("there is nothing left to halve")
        yield Decision("half is enough", {"lr": seen.experiment.lr / 2})


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)  # as if this were a notebook
    with apart(tmp_path_factory):
        with Lab(ranks=2, name="steered") as made:
            yield made.wait(90)
    cloudpickle.unregister_pickle_by_value(here)


def test_a_policy_from_a_cell_is_set_live_named_overruled_and_disabled_after_an_error(lab: Lab) -> None:
    e: Experiment = recipe("digits").set("ranks", 2).set("lr", 0.0016).set("eval_every", 0).set("pace", 20.0)
    run = lab.run(e)
    lab.set("policy", Lowering(look_every=50)).wait(60)  # slow enough for a person to intervene before it fails
    assert until(lambda: any(c.change.by for c in lab.changes))
    mine = lab.set("lr", 0.001).wait(60)
    assert until(lambda: any("does not change lr" in note for note in lab.notes))
    assert lab.experiment.lr == 0.001
    lab.set("policy", Lowering(look_every=5)).wait(60)
    assert until(lambda: any("is paused" in note for note in lab.notes))
    assert until(lambda: lab.experiment.policy.paused)
    lab.stop()
    run.wait(60)
    assert mine.change.by == ""
    assert run.state == "stopped"
    *decided, put_off = [c for c in lab.changes if c.change.by]
    assert {(c.path, c.change.by) for c in decided} == {("lr", "Lowering")}
    assert "nothing left to halve" in put_off.change.reason
    assert repr(decided[0]).endswith("by Lowering, since half is enough")
    shown = list_items(lab.changes)
    assert any(line["said"].endswith("; decided by Lowering: half is enough") for line in shown)
    assert sum(mark.label.endswith(" by Lowering") for mark in change_marks(run)) == len(decided) + 1
    paths = {row["path"] for row in Controls(lab).rows}
    assert {"policy", "policy.paused", "policy.look_every"} <= paths
