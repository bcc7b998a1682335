"""Tests exports for other tools: required fields, and agreement with our figures."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from tests.unit import synthetic
from tests.unit.test_cli import refused, say
from workbench.analysis import last_steps, measure_overlap
from workbench.run import Run, RunError


@pytest.fixture(scope="module")
def run() -> Run:
    return synthetic.run(steps=60, ranks=3)


def union(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for begin, end in sorted(parts):
        if out and begin <= out[-1][1]:
            out[-1] = out[-1][0], max(out[-1][1], end)
        else:
            out.append((begin, end))
    return out


def hta_says(events: list[dict[str, Any]]) -> float:
    """Returns the per cent of communication hidden by compute, as HTA 0.5's get_comm_comp_overlap computes it."""
    kernels = [e for e in events if e.get("cat") == "kernel" and e["args"]["stream"] >= 0]
    named = [(bool(re.match(r"^nccl.*Kernel", e["name"])), (e["ts"], e["ts"] + e["dur"])) for e in kernels]
    sides = [union([part for comm, part in named if comm == wanted]) for wanted in (True, False)]
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in sides[0] for c, d in sides[1])
    return 100 * both / sum(b - a for a, b in sides[0])


def test_chrome_traces_hold_what_hta_reads_and_give_our_overlap(run: Run, tmp_path: Path) -> None:
    folder = run.export("chrome", tmp_path / "traces")
    said = []
    for rank in range(3):
        text = gzip.open(folder / f"rank-{rank}.json.gz", "rt").read()
        found = re.search(r'"rank":\s+(\d+)', text)
        assert found and int(found[1]) == rank, "HTA looks for the first of these, with a space"
        trace = json.loads(text)
        assert trace["distributedInfo"] == {"backend": "gloo", "rank": rank, "world_size": 3}
        assert isinstance(trace["baseTimeNanoseconds"], int)
        events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
        assert {"ts", "dur", "cat", "name", "pid", "tid", "args"} <= set.intersection(*(set(e) for e in events))
        calls = {e["args"]["correlation"]: e for e in events if e["cat"] == "cuda_runtime"}
        kernels = [e for e in events if e["cat"] == "kernel"]
        assert all(calls[e["args"]["correlation"]]["ts"] <= e["ts"] and e["dur"] >= 0 for e in kernels)
        steps = {e["name"] for e in events if e["cat"] == "user_annotation" and e["name"].startswith("ProfilerStep#")}
        assert steps == {f"ProfilerStep#{k}" for k in range(60)}
        said.append(hta_says(events))
    ours = 100 * measure_overlap(run.timeline, *last_steps(run.timeline)).share
    assert said == pytest.approx(ours.tolist(), abs=0.01) and 20 < min(said) < max(said) < 80


@pytest.mark.parametrize("form", ["parquet", "csv"])
def test_exported_tables_can_be_read_back(run: Run, tmp_path: Path, form: str) -> None:
    folder = run.export(form, tmp_path / form)
    for kind, frame in (("spans", run.spans), ("samples", run.samples), ("marks", run.marks)):
        path = folder / f"{kind}.{form}"
        back = pd.read_parquet(path) if form == "parquet" else pd.read_csv(path)
        assert list(back.columns) == list(frame.columns) and len(back) == len(frame)
        for name in frame.columns:
            if frame[name].dtype.kind in "if":
                assert np.array_equal(back[name], frame[name])
            else:
                assert back[name].tolist() == frame[name].astype(str).tolist()


def test_tensorboard_shows_each_ranks_curves(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    folder = run.export("tensorboard", tmp_path / "logs")
    losses = run.samples[(run.samples["name"] == "loss") & (run.samples["rank"] == 1)].sort_values("step")
    (file,) = (folder / "rank-1").iterdir()
    events = [e for e in EventFileLoader(str(file)).Load() if e.summary.value]
    found = [(e.step, e.summary.value[0].tensor.float_val[0]) for e in events if e.summary.value[0].tag == "loss"]
    assert [step for step, _ in found] == losses.step.tolist()
    assert [value for _, value in found] == pytest.approx(losses.value.tolist(), rel=1e-6)
    assert sum(e.summary.value[0].tag == "step_seconds" for e in events) == 60


def test_impossible_exports_give_one_sentence(run: Run, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"to='xml': must be one of perfetto, chrome, parquet, csv, tensorboard"):
        run.export("xml")
    (tmp_path / "file").write_text("")
    for form in ("chrome", "csv"):
        with pytest.raises(RunError, match="choose another"):
            run.export(form, tmp_path / "file" / "in")


def test_the_command_names_the_file_after_the_run(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = run.save(tmp_path / "kept")
    monkeypatch.chdir(tmp_path)
    assert say("export", str(kept), "--to", "perfetto").output == "wrote synthetic-perfetto.json.gz\n"
    assert json.load(gzip.open("synthetic-perfetto.json.gz"))["traceEvents"]
    assert "must be one of" in refused(say("export", str(kept), "--to", "xml"))
