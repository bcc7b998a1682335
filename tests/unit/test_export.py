"""Tests exports of a run: a trace for Perfetto, and code that repeats the run."""

from __future__ import annotations

import ast
import gc
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.unit import synthetic
from workbench.analysis.export.export import as_python, to_perfetto
from workbench.record.timeline import Mark, Sample, Span
from workbench.run import Run, RunError
from workbench.settings import KnobError, knob


def trace(run: Run, path: Path) -> dict[str, Any]:
    return json.loads(to_perfetto(run, path).read_text())  # type: ignore[no-any-return]


def test_a_trace_has_a_process_per_rank_and_a_thread_per_lane(tmp_path: Path) -> None:
    events = trace(synthetic.run(ranks=3, steps=12, changes=()), tmp_path / "t.json")["traceEvents"]
    named = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "process_name"}
    assert named == {(0, "rank 0"), (1, "rank 1"), (2, "rank 2")}
    lanes = {e["args"]["name"]: e["tid"] for e in events if e["name"] == "thread_name"}
    assert {"step", "compute", "comm", "wait", "port"} <= set(lanes) and lanes["compute"] < lanes["comm"]
    assert {e["tid"] for e in events if e["ph"] == "X" and e["cat"] == "comm"} == {lanes["comm"]}


def test_every_row_of_the_record_is_one_event(tmp_path: Path) -> None:
    run = synthetic.run(steps=30, changes=((10, "lr", 0.1),))
    events = trace(run, tmp_path / "t.json")["traceEvents"]
    kinds = [e["ph"] for e in events]
    assert kinds.count("X") == len(run.spans) and kinds.count("C") == len(run.samples)
    assert kinds.count("i") == len(run.marks)
    first, span = next(e for e in events if e["ph"] == "X"), run.spans.iloc[0]
    assert (first["name"], first["pid"]) == (span["name"], span["rank"])
    assert first["ts"] == pytest.approx(span.t0 * 1e6, abs=1e-3)
    assert first["dur"] == pytest.approx((span.t1 - span.t0) * 1e6, abs=2e-3)


def test_a_trace_contains_the_error_of_clocks(tmp_path: Path) -> None:
    run = Run({"ranks": 1})
    run.timeline.marks.add([Mark(0, 0, "start", 0.0, json.dumps({"clock_error": 2.5e-5}))])
    about = trace(run, tmp_path / "t.json")["metadata"]
    assert about["clock_error_s"] == {"0": 2.5e-5} and about["experiment"] == {"ranks": 1}


def test_numbers_that_json_cannot_hold_are_left_out(tmp_path: Path) -> None:
    run = Run({})
    run.timeline.samples.add([Sample(0, 0, "loss", 0.1, float("nan")), Sample(0, 1, "loss", 0.2, 5.0)])
    run.timeline.spans.add([Span(0, 0, "a lane of its own", "x", 0.0, 0.0, 0.1, 0)])
    events = trace(run, tmp_path / "t.json")["traceEvents"]
    assert [e["args"]["value"] for e in events if e["ph"] == "C"] == [5.0]


def test_an_empty_run_and_a_compressed_trace_are_written(tmp_path: Path) -> None:
    assert trace(Run({}), tmp_path / "t.json")["traceEvents"] == []
    packed = to_perfetto(synthetic.run(steps=5, changes=()), tmp_path / "t.json.gz")
    assert json.loads(gzip.decompress(packed.read_bytes()))["traceEvents"]


def executed(code: str) -> dict[str, Any]:
    """Runs the code of a run without its lab. Returns the definitions."""
    space: dict[str, Any] = {}
    exec(code[: code.index("lab = Lab(")].replace(", Lab\n", "\n"), space)
    return space


def experiment_of(code: str) -> Any:
    return executed(code)["experiment"]


def test_the_code_of_a_run_rebuilds_its_experiment_and_changes() -> None:
    from workbench.experiment import Experiment

    experiment = Experiment().set("strategy", "LocalSGD").set("compressor", "TopK").set("steps", 100)
    experiment = experiment.set("partition", "Pipeline").set("schedule", "GPipe")
    experiment = experiment.set("fabric.faults", [{"Slow": {"rank": 1, "factor": 2.0}}])
    run = Run(experiment.plain())
    detail = {"id": "a", "path": "strategy", "value": {"LocalSGD": {"every": 4}}}
    run.timeline.marks.add([Mark(0, 20, "change", 2.0, json.dumps(detail))])
    code = as_python(run)
    assert code.endswith("run.wait()\n")
    assert experiment_of(code) == experiment and tuple(executed(code)["changes"]) == run.changes


def test_the_code_of_a_resumed_run_resumes_again(tmp_path: Path) -> None:
    parent = {"checkpoint": "runs/it's/step-00000004", "step": 4, "run": "runs/it's"}
    path = Run({"ranks": 2}, name="branch", parent=parent).save(tmp_path / "branch")
    assert Run.open(path).parent == parent
    assert """changes=changes, resume="runs/it's/step-00000004")""" in as_python(Run.open(path))
    assert "resume" not in as_python(Run({"ranks": 2}, name="odd", parent={"checkpoint": ["x"]}))


def test_the_code_of_an_endless_run_has_its_completed_steps() -> None:
    run = synthetic.run(steps=30, changes=())
    run.settings["steps"] = 0
    assert "    steps=30,  # as far as this run got" in as_python(run)


def test_the_code_leaves_a_users_functions_to_fill_in() -> None:
    run = Run({"task": {"Task": {"model": "<net>", "data": "<lambda>"}}, "steps": 5})
    code = as_python(run)
    assert "task=...,  # your own Task(...)" in code and "import Task" not in code
    compile(code, "run", "exec")


EVIL = "__import__('os').system('touch evil')"
HOSTILE: dict[str, dict[str, Any]] = {
    "ranks": {"ranks": f"4)\n{EVIL}\n("},
    "a field": {f"steps={EVIL}, lr": 1},
    "a keyword": {"lambda": 1},
    "a family's name": {"strategy": {f"DDP({EVIL}) or DDP": {}}},
    "a builtin": {"strategy": {"SystemExit": {}}},
    "a knob": {"compressor": {"TopK": {f"density={EVIL}, d": 0.1}}},
    "messages that look alike": {"strategy": {"DDP": {"\uff45very": 1}}},
}


@pytest.mark.parametrize("settings", HOSTILE.values(), ids=HOSTILE)
def test_no_name_of_a_hostile_record_becomes_code(settings: dict[str, Any]) -> None:
    with pytest.raises(RunError, match=r"run .run. cannot be written as Python: .* must be"):
        as_python(Run(settings))


def test_values_of_a_hostile_record_stay_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    deep = {"DDP": {"every": {f"X({EVIL})": {"k": EVIL}}, "b": [EVIL, {"Y": {f"k={EVIL}": 1}}], "c": float("inf")}}
    run = Run({"strategy": deep, "lr": EVIL, "seed": 5, "steps": 3, "bucket_mb": {EVIL: [EVIL, float("nan")]}})
    detail = {"path": f"lr', {EVIL}, '", "value": {EVIL: EVIL}}
    run.timeline.marks.add([Mark(0, 2, "change", 2.0, json.dumps(detail))])
    code = as_python(run)
    taken: dict[str, Any] = {}
    names = {"Experiment": lambda **k: taken.update(k), "DDP": lambda **k: ("DDP", k), "Change": lambda *a: a}
    body = "\n".join(line for line in code.splitlines() if not line.startswith(("from", "lab", "run")))
    exec(body, {**names, "__builtins__": {"float": float}}, space := {})
    assert taken["lr"] == EVIL and taken["strategy"][1]["every"] == {f"X({EVIL})": {"k": EVIL}}
    assert space["changes"] == [(2, detail["path"], detail["value"])]
    assert not (tmp_path / "evil").exists()


def test_a_users_class_is_named_and_found_by_the_code() -> None:
    from workbench.compressors import Cast, ErrorFeedback

    mine = {"ErrorFeedback": {"of": {"Owned": {"share": 0.5}}}}
    code = as_python(Run({"compressor": mine, "strategy": {"DDP": {"accumulate": 2}}, "lr": 0.5, "steps": 5}))
    assert 'experiment = Experiment.read({\n    "compressor": ' in code
    assert '    "strategy": DDP(accumulate=2),\n' in code
    assert f'"compressor": {mine},  # Owned: your own, to be defined before' in code
    with pytest.raises(KnobError, match="no such compressor"):
        experiment_of(code)

    @dataclass(frozen=True, kw_only=True)
    class Owned(Cast):
        share: float = knob(0.1, 0.0, 1.0, doc="how much")

    found = experiment_of(code)
    assert found.compressor == ErrorFeedback(of=Owned(share=0.5)) and (found.lr, found.strategy.accumulate) == (0.5, 2)
    del Owned, found  # other tests look for members, too
    gc.collect()


@pytest.mark.parametrize("name", ["Popen", "Lab", "Run", "Path"])
def test_names_that_do_not_ship_are_never_called(name: str) -> None:
    code = as_python(Run({"strategy": {name: {"args": ["touch", "evil"]}}, "steps": 5}))
    assert {"strategy": {name: {"args": ["touch", "evil"]}}, "steps": 5} == ast.literal_eval(
        code[code.index("read(") + 5 : code.index(")\nchanges")]
    )


def test_every_shipped_member_can_be_imported_like_in_the_code() -> None:
    from tests.ranks import shipped
    from workbench.compressors import Compressor
    from workbench.fabric import Fault
    from workbench.optimizers import Optimizer
    from workbench.settings import shipped as found
    from workbench.strategies import Strategy

    homes = {"compressors": Compressor, "fabric": Fault, "optimizers": Optimizer, "strategies": Strategy}
    for home, base in homes.items():
        assert set(shipped(base)) == set(found(f"workbench.{home}"))
