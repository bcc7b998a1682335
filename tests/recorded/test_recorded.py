"""Checks that runs of earlier versions still open, draw and replay after renames.

Each version's folder has a `said.json`. It holds that version's own facts about the runs, and its members. Task is not
among them: its functions are the user's own, and a record keeps only their names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.recorded.make import HERE
from widgets.charts import picture
from widgets.views import all_views
from widgets.views._base import draw_view
from workbench import Costs, simulate
from workbench.compressors import Compressor
from workbench.experiment import Experiment, user_input
from workbench.fabric import Fault
from workbench.optimizers import Optimizer
from workbench.run import Run
from workbench.strategies import Strategy
from workbench.tasks import TaskBase

ROOT = HERE.parent.parent
RUNS = sorted(path.parent for path in HERE.glob("*/*/run.json"))
SAID = {path.parent.name: json.loads(path.read_text()) for path in HERE.glob("*/said.json")}
FAMILIES = {"strategy": Strategy, "compressor": Compressor, "fault": Fault, "optimizer": Optimizer, "task": TaskBase}

every_run = pytest.mark.parametrize("path", RUNS, ids=lambda p: f"{p.parent.name}-{p.name}")


def facts(run: Run) -> dict[str, Any]:
    """Returns the facts of a record that must not change: progress, changes, rows by name, and losses."""
    spans, samples = run.spans, run.samples
    held = samples[samples.name == "held_out"]
    return {
        "state": run.state,
        "ranks": int(run.settings["ranks"]),
        "steps": run.summary()["steps"],
        "changes": [c.at_step for c in run.changes],
        "refused": [step for step, _, _ in run.details("refused")],
        "spans": {str(name): int(n) for name, n in spans.name.value_counts(sort=False).sort_index().items() if n},
        "sent": int(spans.nbytes.sum()),
        "seconds": round(float(spans.t1.max()), 6),
        "held_out": [round(float(v), 9) for v in held.value],
        "samples": len(samples),
        "marks": len(run.marks),
    }


def changed(run: Run) -> list[Experiment]:
    """Returns the run's experiment at the beginning and after each change."""
    every = [run.experiment]
    for change in run.changes:
        every.append(user_input.turned(every[-1], [(change.path, change.value)]))
    return every


@every_run
def test_a_recorded_run_opens_with_the_same_facts(path: Path) -> None:
    run = Run.open(path)
    assert not run.missing and not run.warnings
    assert facts(run) == SAID[path.parent.name]["runs"][path.name]


def test_they_open_without_torch() -> None:
    code = "import sys; from workbench.run import Run\nfor p in sys.argv[1:]: repr(Run.open(p)), Run.open(p).changes"
    code += "\nsys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *map(str, RUNS)], cwd=ROOT, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize("version", sorted(SAID))
def test_all_members_of_a_version_are_in_its_runs_and_still_load(version: str) -> None:
    met: dict[str, set[str]] = {family: set() for family in FAMILIES}
    for path in HERE.glob(f"{version}/*/run.json"):
        run = Run.open(path.parent)
        for plain in [run.settings, *({change.path: change.value} for change in run.changes)]:
            for family, names in met.items():
                names |= set(named(plain)) & set(SAID[version]["members"][family])
        changed(run)
    assert {family: sorted(names) for family, names in met.items()} == SAID[version]["members"]


def named(plain: Any) -> list[str]:
    """Returns all keys in a record's plain settings, nested ones included. A member is {name: knobs}."""
    if isinstance(plain, Mapping):
        return [*map(str, plain), *(name for inner in plain.values() for name in named(inner))]
    return [name for inner in plain for name in named(inner)] if isinstance(plain, list | tuple) else []


@every_run
def test_every_view_and_the_picture_draw_it(path: Path) -> None:
    run = Run.open(path)
    ours = {name: view for name, view in all_views().items() if view.__module__.startswith("widgets.")}
    charts = {name: draw_view(view(), run) for name, view in ours.items()}
    boxes = charts["Timeline"]
    assert boxes is not None and any(len(trace.x) for trace in boxes.data)
    assert picture.draw_png(run)[:4] == b"\x89PNG"
    assert f"{len(run.changes)}  " in picture.describe_picture(run) or not run.changes


@every_run
def test_the_simulator_replays_it(path: Path) -> None:
    run = Run.open(path)
    costs = None if run.environment.get("host") == "simulated" else Costs.measured(run)
    again = simulate(run.experiment, changes=run.changes, costs=costs)
    assert again.summary()["steps"] == run.summary()["steps"]
    opaque = [
        change for change in run.changes if change.path == "strategy" and "TorchDDP" in change.value
    ]  # torch's own DDP, which the simulator cannot look into
    assert [detail["value"] for _, _, detail in again.details("refused")] == [change.value for change in opaque]
    followed = [change for change in run.changes if change not in opaque]
    assert [c.path for c in again.changes] == [c.path for c in followed]
    if all(e.strategy.lockstep for e in changed(run)):
        assert [c.at_step for c in again.changes] == [c.at_step for c in followed]


@every_run
def test_the_python_code_of_a_recorded_run_repeats_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Experiment, list[Any]]] = []

    class Still:
        def __init__(self, ranks: int) -> None:
            self.ranks = ranks

        def run(self, experiment: Experiment, changes: list[Any]) -> Still:
            asked.append((experiment, changes))
            return self

        def wait(self) -> None:
            pass

    run = Run.open(path)
    monkeypatch.setattr("workbench.lab.Lab", Still)
    exec(compile(run.as_python(), str(path), "exec"), {})
    assert asked[0][0] == run.experiment
    assert [(c.at_step, c.path) for c in asked[0][1]] == [(c.at_step, c.path) for c in run.changes]
