"""Tests traces of other jobs on our timeline: from torch.profiler, from a GPU by hand, and invalid ones."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from tests.unit import synthetic
from tests.unit.test_cli import refused, say
from workbench.analysis import break_down, last_steps, line_up, measure_overlap
from workbench.record import kineto
from workbench.run import Run, RunError

REAL = sorted((Path(__file__).parents[1] / "recorded" / "torch-2.13").glob("*.json.gz"))


def event(name: str, cat: str, ts: float, dur: float, tid: int = 1, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "pid": 1, "tid": tid, "args": args}


def kernel(name: str, ts: float, dur: float, call: int, **args: Any) -> dict[str, Any]:
    return event(name, "kernel", ts, dur, 7, correlation=call, stream=7, **args)


def step(at: float, late: float = 0.0) -> list[dict[str, Any]]:
    """Returns a GPU step: 1 ms forward, 2 ms backward that hides 0.5 of a 1.5 ms all-reduce, 0.2 ms update."""
    n, t = int(at) * 10, at + late
    nccl = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    said = {"Collective name": "allreduce", "In msg nelems": 1000, "dtype": "Float"}
    return [
        event(f"ProfilerStep#{int(at // 5000)}", "user_annotation", at, 4000),
        event("autograd::engine::evaluate_function: MmBackward0", "cpu_op", at + 200, 300, 2),
        event("Optimizer.step#Adam.step", "user_annotation", at + 600, 100),
        *(event("cudaLaunchKernel", "cuda_runtime", at + dt, 5, correlation=n + k)
          for k, dt in enumerate((50, 250, 260, 620))),
        kernel("volta_sgemm", t + 100, 1000, n),
        kernel("wgrad", t + 1100, 2000, n + 1),
        kernel(nccl, t + 2600, 1500, n + 2, **said),
        kernel("multi_tensor_apply", t + 4100, 200, n + 3),
        event("Memcpy HtoD", "gpu_memcpy", t + 110, 40, 8, correlation=-1, stream=8, bytes=64),
    ]  # fmt: skip


def written(path: Path, events: list[dict[str, Any]], **about: Any) -> Path:
    path.write_text(json.dumps({"schemaVersion": 1, **about, "traceEvents": events}))
    return path


def test_gpu_kernels_become_phases_collectives_and_exposed_time(tmp_path: Path) -> None:
    files = [written(tmp_path / f"worker{r}.json", [*step(0, 100.0 * r), *step(5000, 100.0 * r)],
                     distributedInfo={"rank": r}, deviceProperties=[{"name": "a GPU"}]) for r in (0, 1)]  # fmt: skip
    run = Run.from_traces(files)
    found = break_down(run.timeline, 0, 2)
    assert run.environment["devices"] == ["a GPU"] and run.state == "done" and found.steps == 2
    assert found.exposed == pytest.approx([1e-3, 1e-3]) and found.compute == pytest.approx([3.2e-3, 3.2e-3])
    assert measure_overlap(run.timeline, 0, 2).share == pytest.approx([1 / 3, 1 / 3])
    mine = run.spans[(run.spans["rank"] == 0) & (run.spans["step"] == 1)]
    lasted = (mine.t1 - mine.t0).groupby([mine.lane.astype(str), mine.name.astype(str)]).sum() * 1e3
    assert lasted["compute"].to_dict() == pytest.approx({"forward": 1, "backward": 2, "update": 0.2})
    assert mine[mine.lane == "comm"].nbytes.tolist() == [4000] and "offload" in set(mine.lane)
    met = line_up(run.timeline, 0, 2)
    assert met.full.all() and met.waiting[:, 0] == pytest.approx([1e-4, 1e-4]), "rank 1 comes 0.1 ms later"


def test_traces_of_torch_are_read_and_saved(tmp_path: Path) -> None:
    run = Run.from_traces(REAL)
    assert last_steps(run.timeline) == (0, 4) and run.settings["ranks"] == 2
    names = {lane: set(some["name"].astype(str)) for lane, some in run.spans.groupby("lane", observed=True)}
    assert names["comm"] == {"all_reduce 0", "all_reduce 1"} and names["compute"] == {"forward", "backward", "update"}
    found = break_down(run.timeline, 0, 4)
    assert (found.compute > 0.3 * found.seconds).all()
    assert (found.compute + found.exposed <= 1.001 * found.seconds).all()
    again = Run.open(run.save(tmp_path / "kept"))
    assert len(again.spans) == len(run.spans) and again.summary()["steps"] == 4
    page = tmp_path / "page.html"
    said = say("open", *map(str, REAL), "--out", str(page))
    assert said.exit_code == 0 and "of its communication behind compute" in said.output and page.stat().st_size > 1e6


def test_our_exported_traces_are_read_back_with_the_same_overlap(tmp_path: Path) -> None:
    run = synthetic.run(steps=40, ranks=2)
    back = Run.from_traces(sorted(run.export("chrome", tmp_path / "traces").iterdir()))
    ours, theirs = (measure_overlap(r.timeline, *last_steps(r.timeline)).share for r in (run, back))
    assert theirs == pytest.approx(ours, abs=1e-4)


ODD = [3, None, {"ph": "X"}, event("no time", "kernel", float("nan"), 1.0), event("ends before", "kernel", 1.0, -5.0),
       event("endless", "kernel", 1.0, 1e300), {**event("x", "kernel", 1, 1), "name": {"a": 1}},
       {**event("args", "kernel", 2.0, 3.0), "args": "none", "tid": {"a": 1}}]  # fmt: skip


def test_invalid_events_are_left_out_and_invalid_files_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.from_traces([written(tmp_path / "odd.json", ODD)])
    assert run.warnings == ("5 events without a finite time or a name were omitted",)
    (tmp_path / "torn.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [' * 9)[:-9])
    (tmp_path / "deep.json").write_text("[" * 100_000)
    (tmp_path / "other.json").write_text('{"traceEvents": {"a": 1}}')
    (tmp_path / "not.json.gz").write_bytes(b"no gzip")
    written(tmp_path / "empty.json", [])
    for name, words in (("torn.json.gz", "cannot be read"), ("deep.json", "not JSON"), ("other.json", "no traceEvents"),
                        ("not.json.gz", "cannot be read"), ("empty.json", "no event with a duration"),
                        ("none.json", "no such file"), (".", "is a folder")):  # fmt: skip
        assert words in refused(say("open", str(tmp_path / name)))
    same = [written(tmp_path / f"{n}.json", step(0), distributedInfo={"rank": 3}) for n in "ab"]
    with pytest.raises(RunError, match="is of rank 3, and so is"):
        Run.from_traces(same)
    monkeypatch.setattr(kineto, "MAX_FILE_BYTES", 1 << 20)
    (tmp_path / "bomb.json.gz").write_bytes(gzip.compress(b" " * (1 << 22)))
    with pytest.raises(RunError, match=r"has more than 1 MB of JSON; profile fewer steps"):
        Run.from_traces([tmp_path / "bomb.json.gz"])
