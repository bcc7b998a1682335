"""Tests one change of several knobs, checked as a whole: from the request to the record."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest

from tests.sim.insides import simulated
from tests.split import small, spread
from tests.unit.test_tensor import parts
from widgets.charts.marks import change_marks
from workbench.analysis import list_stretches
from workbench.analysis.export.export import as_python
from workbench.cluster.run.run_changes import Changes, PendingChange
from workbench.experiment import Experiment, user_input
from workbench.partitions import Pipeline
from workbench.policies import Policy
from workbench.policies._base import Decision, Seen
from workbench.settings import Change, KnobError, to_plain
from workbench.strategies import DDP, ZeRO3

BOTH = {"strategy": DDP(), "partition": Pipeline(micros=2)}
E = Experiment(ranks=4, strategy=ZeRO3()).checked()


def sharded(steps: int, **rest: Any) -> Experiment:
    known = {"task": small(parts=parts, evaluate=None), "strategy": ZeRO3(), "pace": 2.0}
    return spread(4, steps, **{**known, **rest})


def test_dependent_knobs_are_set_at_once_in_any_order_but_not_in_turn() -> None:
    with pytest.raises(KnobError, match="under ZeRO3 ranks shard"):
        E.set("partition", BOTH["partition"])
    back = E.set(dict(reversed(BOTH.items())))
    assert back == E.set(BOTH) and back.partition == BOTH["partition"]
    with pytest.raises(KnobError, match="under ZeRO3 ranks shard"):
        back.set("strategy", "ZeRO3")
    assert back.set({"strategy": "ZeRO3", "partition": "Whole"}) == E.set("strategy", "ZeRO3")


@pytest.mark.parametrize(("path", "value"), [({}, None), ({3: 4}, None), (BOTH, 3), ("strategy, partition", "DDP"),
                                             ({"lr": 0.1, "lrr": 0.1}, None)], ids=str)  # fmt: skip
def test_an_invalid_group_of_settings_raises_knob_error(path: Any, value: Any) -> None:
    with pytest.raises(KnobError, match="knob"):
        E.set(path, value)


def test_a_lab_checks_a_group_as_a_whole_and_sends_it_as_one() -> None:
    changes, sent = Changes(E, []), list[PendingChange]()
    with pytest.raises(KnobError, match="seed=3: cannot change while a run is live; stop it"):
        changes.request_change({"lr": 0.1, "seed": 3}, None, lambda asked, new: sent.append(asked))
    asked = changes.request_change({"density": 0.2, "compressor": "TopK"}, None, lambda asked, new: sent.append(asked))
    assert sent == [asked] and asked.change.settings.keys() == {"compressor.of.density", "compressor"}
    changes.note_applied(7, json.loads(json.dumps(asked.change.plain(), sort_keys=True)))
    assert asked.applied_at == 7 and changes.experiment.compressor.of.density == 0.2  # type: ignore[attr-defined]
    (planned,) = user_input.planned(E, user_input.changes([(9, BOTH)]))
    assert planned == Change(9, {name: to_plain(getattr(E.set(BOTH), name)) for name in BOTH})


@pytest.mark.ranks
def test_a_group_is_recorded_replayed_and_written_as_python() -> None:
    record, _ = simulated(sharded(9), Change(3, BOTH))
    (change,) = record.changes
    assert change.settings.keys() == BOTH.keys()
    assert change.text.startswith("strategy = DDP(accumulate=1), partition = Pipeline(")
    assert [mark.label for mark in change_marks(record)] == ["DDP(accumulate=1), Pipeline"]
    assert list_stretches(record)[-1].settings["partition"] == to_plain(BOTH["partition"])
    names: dict[str, Any] = {}
    lines = as_python(record).splitlines()
    exec("\n".join(lines[:1] + lines[lines.index("changes = [") : lines.index("]") + 1]), names)
    again, _ = simulated(sharded(9), *names["changes"])
    assert again.timeline.samples.rows().value.tolist() == record.timeline.samples.rows().value.tolist()


@dataclass(frozen=True, kw_only=True)
class Cuts(Policy):
    """A policy that splits the model after the third step."""

    def decide(self, seen: Seen, state: Any) -> Any:
        return [Decision("it is time", {", ".join(BOTH): BOTH})] if seen.step >= 3 else []


@pytest.mark.ranks
def test_a_policy_may_set_a_group_but_leaves_a_users_group_alone() -> None:
    e = sharded(9, policy=Cuts(look_every=3))
    record, _ = simulated(e)
    assert [(c.at_step, c.by, set(c.settings)) for c in record.changes] == [(3, "Cuts", set(BOTH))]
    other, _ = simulated(e, Change(2, {"strategy": "DDP", "bucket_mb": 0.02}))
    assert [(c.at_step, set(c.settings)) for c in other.changes] == [(2, {"strategy", "bucket_mb"})]
    assert "Cuts: does not change strategy, because a person set it at step 2" in str(other.details("policy"))
