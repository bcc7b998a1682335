"""Tests the controls: every knob has one, and each entry is checked and answered next to it."""

from __future__ import annotations

import gc
import json
import threading
from dataclasses import dataclass, replace
from typing import Any
from weakref import ref

import pytest
import torch

from widgets.controls.controls import Controls, cell_ended
from widgets.controls.options import find_chosen, list_options
from widgets.controls.requests import list_items
from widgets.controls.rows import FIRST, ControlState, make_rows
from widgets.controls.stops import list_stops, nearest_stop
from workbench.cluster.run.run_changes import PendingChange
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.fabric import Slow
from workbench.partitions import Tensor
from workbench.settings import NEXT, Change, knob, members, walk
from workbench.strategies import Strategy
from workbench.tasks import ClickThrough, Task


class StillLab:
    """A lab without ranks: changes wait until `apply` is called."""

    def __init__(self, live: bool = False) -> None:
        self.experiment = Experiment().checked()
        self.live, self.ranks, self.changes, self.run_now = live, 4, [], None

    def set(self, path: Any, value: Any = None) -> PendingChange:
        wanted = self.experiment
        for t in self.changes:
            wanted = wanted.set(t.path, t.value) if t.applied_at is None else wanted
        wanted.set(path, value)
        asked = PendingChange(Change(NEXT, path, value, f"change {len(self.changes)}"))
        self.changes.append(asked)
        if not self.live:
            self.apply(0)
        return asked

    def apply(self, step: int) -> None:
        for asked in self.changes:
            if asked.applied_at is None:
                self.experiment = self.experiment.set(asked.path, asked.value)
                asked.answer(applied_at=step)


def row(controls: Controls, path: str) -> dict[str, Any]:
    return next(r for r in controls.rows if r["path"] == path)


def paths(controls: Controls) -> list[str]:
    return [r["path"] for r in controls.rows]


@pytest.mark.parametrize(
    ("strategy", "compressor"), [*((name, "TopK") for name in members(Strategy)), ("DDP", "Dense"), ("DDP", "Cast")]
)
def test_every_knob_has_a_control(strategy: str, compressor: str) -> None:
    e = Experiment(task=ClickThrough()).set("strategy", strategy)
    if not members(Strategy)[strategy]().refuses(members(Compressor)[compressor].usual()):
        e = e.set("compressor", compressor)
    made = {r["path"]: r for r in make_rows(e, ControlState())}
    for path, k in walk(e):
        held = path in ("fabric", "fabric.link", "fabric.faults", "compressor.of")  # shown by their contents
        assert held or path in made, path
        if path in made:
            assert made[path]["doc"].startswith(k.doc) and k.unit in (made[path]["unit"], made[path]["label"])
    assert json.dumps(list(made.values()))


def test_the_controls_used_most_come_first_and_open() -> None:
    made = make_rows(Experiment().set("strategy", "LocalSGD").checked(), ControlState())
    first = [r["path"] for r in made if not r["group"]]
    own = [path for path in first if path.startswith("strategy.")]
    lies = [path for path in first if path.startswith("partition.")]
    assert first[: len(own) + len(lies) + 3] == ["strategy", *own, "partition", *lies, "compressor"]
    assert own[0] == "strategy.every" and lies[0] == "partition.checkpoint"
    assert all(path in first for path in FIRST)
    assert all(r["group"] for r in made[len(first) :])


def test_a_strategy_defined_in_a_cell_gets_its_controls_automatically() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Whimsical(Strategy):
        """Averages when it feels like it."""

        mood: float = knob(0.5, 0.0, 1.0, unit="whims", doc="how much it feels like it")

        async def step(self, rank: Any, state: Any) -> None:
            await rank.update()

    lab = StillLab()
    controls = Controls(lab)
    controls.handle_message({"change": "strategy", "value": {"Whimsical": {}}})
    found = row(controls, "strategy.mood")
    assert (found["kind"], found["value"], found["unit"], found["allowed"]) == (
        "number",
        "0.5",
        "whims",
        "0 to 1 whims",
    )
    assert isinstance(lab.experiment.strategy, Whimsical)
    controls.close()
    del lab, controls, Whimsical
    gc.collect()
    assert "Whimsical" not in members(Strategy)  # no other test must see it


@pytest.mark.parametrize("k", [k for _, k in walk(Experiment()) if k.kind in (int, float)], ids=lambda k: k.name)
def test_sliders_stop_at_allowed_values_from_end_to_end(k: Any) -> None:
    found = list_stops(k)
    assert all(k.check(v) == v for v in found)
    assert found == sorted(set(found)) and len(found) <= 101
    assert not found or (found[-1] == k.high and found[0] == k.low)
    assert not found or found[nearest_stop(found, found[2])] == found[2]


def test_a_partition_is_offered_with_a_strategy_that_allows_it() -> None:
    lab = StillLab(live=True)
    lab.experiment = lab.experiment.set("strategy", "ZeRO3")
    controls = Controls(lab)
    offered = {o["text"]: o for o in row(controls, "partition")["options"]}
    assert not offered["Pipeline, with DDP"]["refused"] and "Whole" in offered
    controls.handle_message({"change": "partition", "value": offered["Pipeline, with DDP"]["value"]})
    (asked,) = lab.changes
    assert asked.change.settings.keys() == {"partition", "strategy"} and row(controls, "strategy")["waiting"]
    lab.apply(3)
    controls.refresh()
    offered = {o["text"]: o for o in row(controls, "strategy")["options"]}
    assert "LocalSGD" in offered and not offered["ZeRO3, with Whole"]["refused"]
    controls.handle_message({"change": "strategy", "value": offered["ZeRO3, with Whole"]["value"]})
    lab.apply(6)
    assert [type(x).__name__ for x in (lab.experiment.strategy, lab.experiment.partition)] == ["ZeRO3", "Whole"]


def test_an_invalid_entry_shows_a_reason_at_its_control_and_changes_nothing() -> None:
    lab = StillLab()
    controls = Controls(lab)
    controls.handle_message({"change": "strategy", "value": {"LocalSGD": {}}})
    before = lab.experiment
    for typed in ("0", "1.5", "many"):
        controls.handle_message({"change": "strategy.every", "value": typed, "number": True})
        error = row(controls, "strategy.every")["error"]
        assert "strategy.every=" in error and "an integer in [1, 256] steps" in error and typed in error
    assert lab.experiment == before and row(controls, "strategy.every")["value"] == "8"
    controls.handle_message({"change": "strategy.every", "value": "16", "number": True})
    assert row(controls, "strategy.every")["error"] == "" and lab.experiment.strategy.every == 16


def test_an_invalid_pair_is_refused_with_advice() -> None:
    controls = Controls(StillLab())
    controls.handle_message({"change": "compressor", "value": "TopK"})
    offered = {o["text"]: o for o in row(controls, "strategy")["options"]}
    assert offered["TorchDDP"]["refused"] and not offered["LocalSGD"]["refused"]
    controls.handle_message({"change": "strategy", "value": {"TorchDDP": {}}})
    assert "use Dense with it" in row(controls, "strategy")["error"]
    assert row(controls, "strategy")["value"] == "DDP"


def test_a_change_shows_as_requested_until_it_is_applied() -> None:
    lab = StillLab(live=True)
    controls = Controls(lab)
    controls.handle_message({"change": "strategy", "value": {"LocalSGD": {}}})
    controls.handle_message({"change": "strategy.every", "value": 4})
    found = row(controls, "strategy.every")
    assert found["waiting"] and found["value"] == "4"
    assert [i["state"] for i in list_items(lab.changes)] == ["waiting", "waiting"]
    lab.apply(17)
    controls.refresh()
    assert not row(controls, "strategy.every")["waiting"]
    assert list_items(lab.changes)[0] | {"when": ""} == {
        "path": "strategy.every", "text": "every = 4", "state": "applied", "said": "applied at step 17", "when": "",
    }  # fmt: skip


def test_settings_that_cannot_change_live_are_disabled_with_a_reason() -> None:
    lab = StillLab(live=True)
    for path in ("seed", "task", "task.width", "ranks"):
        found = row(Controls(lab), path)
        assert found["disabled"] and "before Start" in found["why"]
        assert not row(Controls(StillLab()), path)["disabled"]
    assert not row(Controls(lab), "lr")["disabled"]


def test_top_k_is_offered_with_and_without_its_error_feedback() -> None:
    found = list_options(Compressor)
    texts = [o.text for o in found]
    assert "TopK + ErrorFeedback" in texts and "TopK alone" in texts and "Dense" in texts
    for option in found:
        e = Experiment().set("compressor", option.value)
        assert found[find_chosen(found, e.compressor)].text == option.text
    nested = Experiment().set("compressor", {"ErrorFeedback": {"of": {"Cast": {}}}})
    made = {r["path"]: r for r in make_rows(nested, ControlState())}
    assert made["compressor.of"]["value"] == "Cast" and "compressor.of.to" in made


def test_a_custom_task_is_listed_while_it_is_in_use() -> None:
    own = Task(model=int, data=int, loss=int, optimizer=int)
    found = {r["path"]: r for r in make_rows(Experiment(task=own), ControlState())}["task"]
    assert found["options"][found["index"]]["text"] == "Task"
    other = {r["path"]: r for r in make_rows(Experiment(), ControlState())}["task"]
    assert "Task" not in [o["text"] for o in other["options"]]


def test_a_fault_is_filled_in_then_injected_then_cleared() -> None:
    lab = StillLab()
    controls = Controls(lab)
    controls.handle_message({"change": "fabric.faults.new", "value": {"Slow": {}}})
    controls.handle_message({"change": "fabric.faults.new.rank", "value": "3", "number": True})
    controls.handle_message({"change": "fabric.faults.new.phase", "value": "backward"})
    assert row(controls, "fabric.faults.new.rank")["stops"] == ["0", "1", "2", "3"]
    assert lab.experiment.fabric.faults == ()
    controls.handle_message({"press": "fabric.faults.inject"})
    assert lab.experiment.fabric.faults == (Slow(rank=3, phase="backward"),)
    assert row(controls, "fabric.faults.0")["text"] == "Slow: rank 3, factor 2, phase backward"
    assert "fabric.faults.new.rank" not in paths(controls)
    controls.handle_message({"press": "fabric.faults.0"})
    assert lab.experiment.fabric.faults == ()


def test_nothing_is_sent_when_nothing_changed() -> None:
    controls = Controls(StillLab())
    sent = []
    controls.observe(lambda change: sent.append(change), "rows")
    for _ in range(3):
        controls.refresh()
    assert sent == []


def test_changes_are_listed_in_few_words() -> None:
    lab = StillLab()
    for path, value in (("compressor", "TopK"), ("fabric.faults", [Slow(rank=2)]), ("fabric.link.bandwidth", 200)):
        lab.set(path, value)
    texts = [i["text"] for i in list_items(lab.changes)]
    assert texts[0] == "bandwidth = 200" and texts[2] == "TopK" and texts[1].startswith("faults: Slow(rank=2")


def test_options_that_the_model_refuses_are_disabled_with_the_reason() -> None:
    """A model that no rule can slice or cut, and one with too few layers. Building them allocates no memory."""
    built: list[str] = []

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            built.append(str(torch.get_default_device()))
            self.inner = torch.nn.Linear(3, 3)

    lab = StillLab()
    kept = torch.get_rng_state()
    controls = Controls(lab)
    lab.experiment = replace(lab.experiment, task=Task(model=Own, data=int, loss=int, optimizer=int), batch=0).checked()
    controls.refresh()
    offered = {o["text"]: o for o in row(controls, "partition")["options"]}
    assert not offered["Whole"]["refused"]
    assert offered["Tensor"]["refused"] and "no plan says how to split Own" in offered["Tensor"]["doc"]
    assert offered["Pipeline"]["refused"] and "has no declared cuts" in offered["Pipeline"]["doc"]
    assert not any(o["refused"] for o in row(controls, "optimizer")["options"])
    controls.handle_message({"change": "partition", "value": "Tensor"})
    assert "no plan says how to split Own" in row(controls, "partition")["error"] and not lab.changes
    assert built == ["meta"] and torch.equal(torch.get_rng_state(), kept)
    # set by a program, so other knobs are not to blame
    lab.experiment = replace(lab.experiment, partition=Tensor()).checked()
    controls.refresh()
    unasked = next(r for r in make_rows(lab.experiment, ControlState()) if r["path"] == "optimizer")
    assert row(controls, "optimizer")["options"] == unasked["options"]
    assert not {o["text"]: o for o in row(controls, "partition")["options"]}["Whole"]["refused"]


def test_the_timers_thread_does_not_build_the_model() -> None:
    """Building a model may draw random numbers, so it must not run next to a cell. It runs at the end of a cell."""
    lab, built = StillLab(), []
    controls = Controls(lab)
    task = Task(model=lambda: built.append(1) or torch.nn.Linear(3, 3), data=int, loss=int, optimizer=int)
    lab.experiment = replace(lab.experiment, task=task, batch=0).checked()
    timer = threading.Thread(target=controls.refresh)
    timer.start()
    timer.join()
    assert not built and not {o["text"]: o for o in row(controls, "partition")["options"]}["Tensor"]["refused"]
    cell_ended(ref(controls))()
    assert built == [1] and {o["text"]: o for o in row(controls, "partition")["options"]}["Tensor"]["refused"]
