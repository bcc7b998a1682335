"""Tests Run: one class for live, recorded and synthetic runs, which opens without torch and has a short repr."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import workbench
from tests.unit import synthetic
from workbench.engine.record.recorder import Recorder
from workbench.record.store import RunError
from workbench.record.timeline import KINDS
from workbench.run import Run
from workbench.settings import Change

ROOT = Path(workbench.__file__).parent.parent
SETTINGS: dict[str, Any] = {"strategy": {"DDP": {}}, "ranks": 2}


def loss(steps: range, rank: int = 0) -> dict[str, Any]:
    n = len(steps)
    return {
        "rank": np.full(n, rank), "step": list(steps), "name": ["loss"] * n, "t": np.array(steps) * 0.1,
        "value": np.full(n, 5.0),
    }  # fmt: skip


def recorded(tmp_path: Path, end: str = "done") -> Path:
    run = Run(SETTINGS, name="two steps", epoch=7.0, environment={"torch": "2.13.0"})
    path = run.save(tmp_path / "run")
    r = Recorder(0, path)
    r.mark(0, "start", 0.0, json.dumps({"host": "here", "pid": 1, "clock_error": 1e-5}))
    for step in range(2):
        r.span(step, "step", "DDP", step, step, step + 0.9, 0)
        r.sample(step, "loss", step + 0.9, 5.0 - step)
    r.mark(1, "change", 1.0, json.dumps({"id": "a", "path": "lr", "value": 0.1, "text": "lr = 0.1"}))
    r.mark(2, "state", 2.0, json.dumps({"state": end}))
    r.close()
    return path


def test_a_recorded_run_has_the_recorded_values(tmp_path: Path) -> None:
    run = Run.open(recorded(tmp_path))
    assert (run.name, run.epoch, run.live, run.state) == ("two steps", 7.0, False, "done")
    assert run.settings == SETTINGS and run.changes == (Change(1, "lr", 0.1),)
    assert run.environment["torch"] == "2.13.0" and run.environment["ranks"][0]["host"] == "here"
    assert run.spans.t1.tolist() == [0.9, 1.9] and run.samples.value.tolist() == [5.0, 4.0]
    assert run.wait() is None and run.missing == 0 and run.warnings == ()


def test_a_run_without_an_end_has_the_state_cut_off(tmp_path: Path) -> None:
    run = Run.open(recorded(tmp_path, end="running"))
    assert run.state == "cut off"
    run.live = True
    assert run.state == "running"


def test_repeated_rows_count_once() -> None:
    run = Run(SETTINGS)
    assert run.append("samples", 0, 0, loss(range(5))) == 5
    assert run.append("samples", 0, 0, loss(range(5))) == 0
    assert run.append("samples", 0, 3, loss(range(3, 8))) == 3
    assert run.samples.step.tolist() == list(range(8))
    assert run.duplicates == 7 and run.missing == 0


def test_missing_rows_are_counted_per_rank_and_kind() -> None:
    run = Run(SETTINGS)
    run.append("samples", 0, 0, loss(range(5)))
    run.append("samples", 1, 0, loss(range(5), rank=1))
    run.append("samples", 0, 9, loss(range(9, 11)))
    assert run.missing == 4 and len(run.samples) == 12
    assert "4 rows missing" in repr(run)


def test_an_opened_run_takes_rows_after_those_on_disk(tmp_path: Path) -> None:
    run = Run.open(recorded(tmp_path))
    assert run.append("samples", 0, 0, loss(range(4))) == 2
    assert run.samples.step.tolist() == [0, 1, 2, 3] and run.missing == 0


def test_frames_are_cached_until_new_rows_arrive() -> None:
    run = Run(SETTINGS)
    run.append("samples", 0, 0, loss(range(3)))
    first = run.samples
    assert run.samples is first
    run.append("samples", 0, 3, loss(range(3, 4)))
    assert len(run.samples) == 4 and len(first) == 3


def test_summary_and_repr_have_progress_speed_and_loss() -> None:
    run = synthetic.run(steps=160)
    s = run.summary()
    assert (s["strategy"], s["ranks"], s["steps"], s["state"], s["changes"]) == ("LocalSGD", 4, 160, "done", 2)
    assert 0.09 < s["step_s"] < 0.2 and 2.5 < s["held_out"] < 3.5 and s["bytes_per_step"] > 0
    assert "\n" not in repr(run) and "4 ranks, 160 steps" in repr(run) and "2 changes" in repr(run)
    json.dumps(s)


def test_an_empty_run_still_shows_itself() -> None:
    run = Run({})
    assert "0 steps" in repr(run) and run.summary()["held_out"] is None and run.changes == ()
    assert list(run.spans.columns)[:3] == ["rank", "step", "lane"]


class Entry:
    """A stub of an entry point of the group workbench.display."""

    def __init__(self, draws: Any) -> None:
        self.draws = draws

    def load(self) -> Any:
        if isinstance(self.draws, ImportError):
            raise self.draws
        return self.draws


@pytest.mark.parametrize(
    ("entries", "bundle"),
    [
        ([], {"text/plain"}),
        ([Entry(ImportError("no plotly here"))], {"text/plain"}),
        ([Entry(lambda run: {"text/html": "<b>drawn</b>", "text/plain": "drawn"})], {"text/html", "text/plain"}),
    ],
)
def test_a_cell_shows_the_displays_bundle_or_plain_text(
    monkeypatch: pytest.MonkeyPatch, entries: list[Entry], bundle: set[str]
) -> None:
    monkeypatch.setattr("workbench.record.display.entry_points", lambda group, name: entries)
    assert set(synthetic.run(steps=5, changes=())._repr_mimebundle_()) == bundle


def test_a_widget_is_shown_as_it_shows_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    class Widget:
        def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
            return {"application/widget": "view"}

    monkeypatch.setattr("workbench.record.display.entry_points", lambda group, name: [Entry(lambda run: Widget())])
    assert synthetic.run(steps=5, changes=())._repr_mimebundle_() == {"application/widget": "view"}


def test_the_experiment_of_a_recorded_run_is_read_back() -> None:
    from workbench.experiment import Experiment

    run = Run(Experiment().set("ranks", 2).plain())
    assert run.experiment.ranks == 2 and run.experiment.plain() == run.settings


def test_orders_go_to_the_lab_of_a_live_run() -> None:
    class Lab:
        asked: list[Any]

        def __init__(self) -> None:
            self.asked = []

        def wait(self, timeout: float | None = None) -> str:
            self.asked.append(timeout)
            return "waited"

        def stop(self) -> None:
            self.asked.append("stop")

    run = Run(SETTINGS, live=True)
    run._control = lab = Lab()
    assert run.wait(2.0) == "waited"
    run.stop()
    assert lab.asked == [2.0, "stop"]


def imports_at_the_top(name: str) -> set[str]:
    """Returns the imports of one of our modules, with its parents, without imports in functions."""
    file = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    file = file if file.exists() else file.with_suffix("") / "__init__.py"
    if not file.exists():
        return set()
    found = set()
    todo: list[ast.AST] = list(ast.parse(file.read_text()).body)
    while todo:
        node = todo.pop()
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                continue
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                continue
            case ast.Import():
                found |= {alias.name for alias in node.names}
            case ast.ImportFrom(module=str(module)):
                found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
            case _:
                todo += list(ast.iter_child_nodes(node))
    return found | ({name.rpartition(".")[0]} - {""})


def test_opening_a_run_imports_no_torch() -> None:
    todo, seen = ["workbench.run", "workbench.analysis", "workbench.analysis.export.export"], set()
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        if name.split(".")[0] == "workbench":
            todo += imports_at_the_top(name)
    assert "pyarrow" in seen and "numpy" in seen, "the walk finds imports"
    assert not {n for n in seen if n.split(".")[0] in ("torch", "plotly", "ipywidgets", "ipyparallel")}


def test_a_simulated_run_that_is_saved_opens_with_the_same_rows(tmp_path: Path) -> None:
    from tests.ranks import experiment
    from workbench import simulate

    chosen = experiment(3, 6, pace=5.0, eval_every=3)
    run = simulate(chosen, changes=[Change(2, "strategy", "LocalSGD"), Change(4, "lr", 0.01)], real=True)
    again = Run.open(run.save(tmp_path / "kept"))
    assert (again.name, again.state, again.missing, again.warnings) == ("simulated", "done", 0, ())
    assert again.settings == run.settings and again.changes == run.changes
    assert again.environment == run.environment and again.summary() == run.summary()
    for kind in KINDS:
        mine, theirs = run.timeline.table(kind).rows(), again.timeline.table(kind).rows()
        assert len(mine) == len(theirs) > 0
        for rank in range(3):
            found = mine[mine.rank == rank].columns, theirs[theirs.rank == rank].columns
            assert all(np.array_equal(x, found[1][k]) for k, x in found[0].items()), (kind, rank)
    with pytest.raises(RunError, match="already holds a run"):
        run.save(tmp_path / "kept")
    copy = Run.open(again.save(tmp_path / "copy"))
    assert len(copy.spans) == len(run.spans) and copy.changes == run.changes


def test_a_run_without_rows_is_saved_without_streams(tmp_path: Path) -> None:
    path = Run(SETTINGS, name="to come").save(tmp_path / "run")
    assert [p.name for p in path.iterdir()] == ["run.json"]
