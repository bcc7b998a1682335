"""Tests malicious run directories: opened, or refused in one sentence, fast, small, and never executed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import ipc

from tests.unit import hostile
from workbench.record import frames
from workbench.record.stream import schema
from workbench.run import Run

ROOT = Path(__file__).parents[2]


def in_a_child(first: int, stop: int, out: Path) -> dict[str, Any]:
    """Tries seeds in a child process, which a crash or a lack of memory would end."""
    command = [sys.executable, "-m", "tests.unit.hostile", str(first), str(stop), str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def held(found: dict[str, Any], cases: int) -> None:
    assert not found["failed"], "\n".join(f"{k}: {v}" for k, v in found["failed"].items())
    assert cases * 0.2 < found["opened"] < cases * 0.95, "some are refused, and not all"
    assert found["longest_s"] < 20 and found["grown_mb"] < 400


@pytest.mark.engine
def test_a_hostile_run_directory_is_opened_or_refused_in_a_sentence(tmp_path: Path) -> None:
    held(in_a_child(0, 52, tmp_path), 52)


@pytest.mark.parametrize(("first", "count"), [
    pytest.param(1000, 250, marks=pytest.mark.long), pytest.param(1250, 750, marks=pytest.mark.every),
])  # fmt: skip
def test_many_hostile_run_directories(first: int, count: int, tmp_path: Path) -> None:
    held(in_a_child(first, first + count, tmp_path), count)


@pytest.mark.parametrize("compression", ["lz4", "zstd"])
def test_a_small_file_with_huge_contents_is_not_unpacked(tmp_path: Path, compression: str) -> None:
    path = hostile.good(tmp_path / "run")
    before = len(Run.open(path).timeline.samples)
    kind, n = schema("samples", 1), 10_000_000
    zeros = {f.name: np.zeros(n, "i4" if f.name == "name" else f.type.to_pandas_dtype()) for f in kind}
    columns = [hostile.named(zero, ["loss"]) if name == "name" else pa.array(zero) for name, zero in zeros.items()]
    file = path / "samples-1.1.arrow"
    with ipc.new_stream(file, kind, options=ipc.IpcWriteOptions(compression=compression)) as stream:
        stream.write_batch(pa.RecordBatch.from_arrays(columns, schema=kind))
    del columns, zeros
    pool = pa.default_memory_pool()
    held_before = pool.bytes_allocated()
    run = Run.open(path)
    assert file.stat().st_size < 5_000_000 and pool.bytes_allocated() - held_before < 50e6
    assert len(run.timeline.samples) == before
    (said,) = run.warnings
    assert said.startswith("samples-1.1.arrow: ends in a torn batch") and "unpacks to more than its size allows" in said


def test_real_records_are_read_whole(tmp_path: Path) -> None:
    """Rows that are as equal as possible have the highest ratio of unpacking."""
    path = tmp_path / "run"
    run = hostile.good(path)
    for file in path.glob("*.arrow"):
        assert frames.find_whole_messages(file.read_bytes()) == (file.stat().st_size, "")
    alike = Run({"ranks": 1})
    alike.timeline.samples.extend({"rank": [0] * 10**6, "step": [1] * 10**6, "name": ["loss"] * 10**6,
                                   "t": np.zeros(10**6), "value": np.zeros(10**6)})  # fmt: skip
    again = Run.open(alike.save(tmp_path / "alike"))
    assert len(again.timeline.samples) == 10**6 and not again.warnings and run == path


def test_a_stream_cut_at_any_byte_is_read_up_to_the_cut(tmp_path: Path) -> None:
    data = (hostile.good(tmp_path / "run") / "spans-0.arrow").read_bytes()
    ends = {frames.find_whole_messages(data[:at])[0] for at in range(len(data))}
    assert len(ends) < 20 and 0 in ends, "messages are taken whole"
    for at in range(0, len(data), 7):
        end, wrong = frames.find_whole_messages(data[:at])
        assert end <= at and (end == at) == (not wrong)
