"""Tests nonsense at every public entry: one sentence with field and value, never an internal error."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.testing

from tests.unit import synthetic
from workbench import simulate
from workbench.cli import app
from workbench.cluster.api import launch
from workbench.cluster.processes.lab_place import ClusterError, check_connection
from workbench.experiment import Experiment, user_input
from workbench.experiment.recipes import recipe
from workbench.fabric import Fabric, Link
from workbench.lab import Lab
from workbench.run import Run, RunError
from workbench.settings import KnobError
from workbench.strategies import LocalSGD


class Thing:
    """An unexpected object whose repr fails."""

    def __repr__(self) -> str:
        raise RuntimeError("no")


NONSENSE: dict[str, Any] = {
    "None": None, "5": 5, "-1": -1, "x": "x", "empty": "", "nul": "\0",
    "[]": [], "[5]": [5], "{}": {}, "{5: 5}": {5: 5},
    "nested": {"TopK": 5}, "nan": float("nan"), "inf": float("inf"), "True": True, "bytes": b"x", "huge": 10**400,
    "long": "9" * 5000, "thing": Thing(), "class": Thing, "function": len, "change": [(1, None, 5)],
}  # fmt: skip
SAID = (KnobError, RunError, ClusterError)
E = Experiment(steps=3, ranks=2, pace=10)
DOORS: dict[str, Callable[[Any], Any]] = {
    "setting's path": lambda v: E.set(v, 1),
    "setting": lambda v: E.set("strategy", v),
    "set a number": lambda v: E.set("lr", v),
    "set the faults": lambda v: E.set("faults", v),
    "set the task": lambda v: E.set("task", v),
    "Experiment(ranks)": lambda v: Experiment(ranks=v),
    "Experiment(compressor)": lambda v: Experiment(compressor=v),
    "Experiment(fabric)": lambda v: Experiment(fabric=v),
    "Experiment.read": lambda v: Experiment.read(v),
    "LocalSGD(every)": lambda v: LocalSGD(every=v),
    "Link(bandwidth)": lambda v: Fabric(link=Link(bandwidth=v)),
    "recipe": recipe,
    "lab.run": lambda v: launch.fit_experiment(user_input.experiment(v), 2),
    "lab.run's changes": lambda v: user_input.planned(E, user_input.changes(v)),
    "Lab(ranks)": lambda v: Lab(v),
    "Lab(name)": lambda v: user_input.text(v, "name", "lab"),
    "Lab(device)": user_input.device,
    "Lab(cluster)": lambda v: check_connection(user_input.path(v, "cluster", "a.json")),
    "Lab(profile)": lambda v: user_input.text(v, "profile", "default"),
    "Run.open": Run.open,
    "simulate": simulate,
    "simulate's changes": lambda v: simulate(E, changes=v),
    "simulate's costs": lambda v: simulate(E, costs=v),
    "simulate's replay": lambda v: simulate(E, replay=v),
    "simulate's resume": lambda v: simulate(E, real=True, resume=v),
    "what_if": lambda v: synthetic.run(steps=12).what_if(v),
}


@pytest.fixture(autouse=True)
def _no_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces Lab's start, because a value that passes the checks would start engines."""
    monkeypatch.setattr(Lab, "__init__", lambda self, *rest, **more: None)


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
def test_nonsense_gives_one_sentence(door: Callable[[Any], Any]) -> None:
    for name, value in NONSENSE.items():
        try:
            door(value)
        except SAID as said:
            text = str(said)
            own = re.sub(r"there are .*", "there are", text)  # other tests add members to a family
            assert 10 < len(own) < 700 and "\n" not in text, (name, text)
            assert re.search(r"[=:]|there is|must", text), (name, text)


@pytest.mark.parametrize(
    ("door", "value", "words"),
    [
        ("lab.run", 5, r"experiment=5: must be an Experiment, such as"),
        ("lab.run", "full_speed", r"experiment='full_speed': must be an Experiment.*recipe\('full_speed'\) makes an "),
        ("lab.run's changes", [5], r"changes\[0\]=5: must be Change\(at_step, path, value\)"),
        ("lab.run's changes", 5, r"changes=5: must be a list"),
        ("lab.run's changes", [(-1, "lr", 1)], r"changes\[0\].at_step=-1: must be an integer in \[0, 1000000000\]"),
        ("simulate's changes", [(1, "seed", 2)], r"seed=2: cannot change while a run is live; give it"),
        ("simulate's changes", [(1, "every", 2)], r"every: no such knob here"),
        ("recipe", None, r"recipe=None: must be a recipe's name; there are .*digits"),
        ("Lab(name)", 5, r"name=5: must be text, such as 'lab'"),
        ("Lab(device)", "tpu", r"device='tpu': must be auto, cpu, cuda"),
        ("Lab(cluster)", 5, r"cluster=5: must be a path"),
        ("Lab(cluster)", __file__, r"cluster='.*test_public_entrypoints.py': is not a client connection file"),
        ("Run.open", None, r"path=None: must be a run directory"),
        ("setting", {"LocalSGD": {"evry": 4}}, r"strategy: LocalSGD has no knob 'evry'; did you mean every\?"),
        ("setting's path", None, r"path=None: must be a knob's name as text"),
        ("simulate", "digits", r"experiment='digits': must be an Experiment"),
        ("simulate's costs", 5, r"costs=5: must be a Costs, such as Costs.measured\(run\), or None"),
        ("what_if", 5, r"settings=5: must be a dict of values by path"),
    ],
)  # fmt: skip
def test_the_sentence_contains_advice(door: str, value: Any, words: str) -> None:
    with pytest.raises(SAID, match=words):
        DOORS[door](value)


def test_the_error_for_an_unknown_knob_lists_knobs_only() -> None:
    with pytest.raises(KnobError) as said:
        E.set("compressor", {"TopK": {"qqqq": 0.1}})
    assert "it has density" in str(said.value) and "home" not in str(said.value) and "__" not in str(said.value)


def test_a_labs_name_must_be_text() -> None:
    with pytest.raises(KnobError, match="name=5: must be text"):
        Lab(name=5)  # type: ignore[arg-type]


def test_an_unwritable_run_folder_is_refused_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    file = tmp_path / "file"
    bad = (("/proc/run", "nothing can be recorded in /proc/run"), (file, "is a file"), (5, "out=5: must be a path"))
    for out, words in bad:
        with pytest.raises(SAID, match=words):
            launch.open_run(E, out, Run)  # type: ignore[arg-type]


def test_several_knobs_are_set_in_any_order() -> None:
    asked = [("density", 0.05), ("compressor", "TopK"), ("every", 4), ("strategy", "LocalSGD"), ("lr", 0.5)]
    there, back = user_input.turned(E, asked), user_input.turned(E, asked[::-1])
    assert there == back and there.compressor.of.density == 0.05 and there.strategy.every == 4  # type: ignore[attr-defined]
    with pytest.raises(KnobError, match="densty: no such knob here; did you mean"):
        user_input.turned(E, [("densty", 0.05), ("compressor", "TopK")])


@pytest.mark.parametrize("command", [["demo", "--ranks", "0"], ["run", "digits", "--out", "x", "--ranks", "65"]])
def test_the_command_line_names_the_ranks_that_a_lab_takes(command: list[str]) -> None:
    said = typer.testing.CliRunner().invoke(app, command)
    assert said.exit_code == 2 and f"must be an integer in [1, {user_input.MAX_RANKS}]" in said.output
