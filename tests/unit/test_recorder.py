"""Tests the recorder: it takes rows from any thread, spools and pushes them, and survives a failing disk."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.transport import row_subscriber
from workbench.engine.record import recorder as module
from workbench.engine.record import row_spool as spool
from workbench.engine.record.recorder import Recorder
from workbench.record import store
from workbench.record.store import Writer


class Page:
    """Collects the pushed rows."""

    def __init__(self) -> None:
        self.got: list[tuple[str, int, dict[str, Any]]] = []

    def __call__(self, new: list[tuple[str, int, dict[str, Any]]]) -> None:
        self.got += new

    def values(self, kind: str, column: str) -> list[Any]:
        return [v for k, _, columns in self.got if k == kind for v in list(columns[column])]

    def details(self, name: str) -> list[dict[str, Any]]:
        pairs = zip(self.values("marks", "name"), self.values("marks", "detail"), strict=True)
        return [json.loads(detail) for n, detail in pairs if n == name]


def fill(r: Recorder, n: int, first: int = 0) -> None:
    for i in range(first, first + n):
        r.span(i // 10, "comm", f"bucket {i % 4}", i * 1e-3, i * 1e-3, i * 1e-3 + 1e-4, i)


def until(true: Any, seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.01)


def test_recorded_rows_are_written_to_disk_and_pushed(tmp_path: Path) -> None:
    page = Page()
    r = Recorder(3, tmp_path, page)
    fill(r, 50)
    r.sample(4, "loss", 0.05, 5.5)
    r.mark(5, "state", 0.06, '{"state": "done"}')
    r.close()
    loaded = store.read(tmp_path).timeline
    assert loaded.spans.rows().nbytes.tolist() == page.values("spans", "nbytes") == list(range(50))
    assert loaded.samples.rows().value.tolist() == [5.5] and set(loaded.spans.rows().rank) == {3}
    assert loaded.marks.rows().detail.tolist() == ['{"state": "done"}']
    r.close()


def test_rows_are_numbered_without_holes(tmp_path: Path) -> None:
    page = Page()
    r = Recorder(0, tmp_path, page)
    for k in range(4):
        fill(r, 25, 25 * k)
        until(lambda k=k: len(page.values("spans", "step")) == 25 * (k + 1))
    r.close()
    expected = 0
    for kind, seq, columns in page.got:
        assert kind == "spans" and seq == expected
        expected += len(columns["rank"])
    assert expected == 100 and r.dropped == r.lost_rows == 0


def test_rows_are_pushed_within_half_a_second_and_spooled_within_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checks the time limits, and the first flush and turn after a row. A busy machine's delay does not count."""
    assert module.PUSH_INTERVAL < 0.5 and module.PUSH_INTERVAL + spool.WRITE_INTERVAL <= 1.0
    monkeypatch.setattr(module, "PUSH_INTERVAL", 600.0)
    monkeypatch.setattr(spool, "WRITE_INTERVAL", 600.0)
    page = Page()
    r = Recorder(0, tmp_path, page)
    fill(r, 5)
    r._flush_rows()
    assert len(page.values("spans", "step")) == 5 and not list(tmp_path.iterdir())
    r._spool._write_once()
    assert len(store.read(tmp_path).timeline.spans) == 5
    r.close()


def test_the_kernel_learns_of_a_failing_or_hanging_disk_within_two_seconds() -> None:
    """Checks the sum of polling intervals; a busy machine's delay does not count."""
    there = module.PUSH_INTERVAL + row_subscriber.DRAIN_INTERVAL
    assert spool.WRITE_INTERVAL + there < 2.0 and spool.HUNG_SECONDS + there < 2.0


def test_many_threads_may_record_at_once(tmp_path: Path) -> None:
    r = Recorder(0, tmp_path)
    threads = [threading.Thread(target=fill, args=(r, 2000)) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    r.close()
    assert len(store.read(tmp_path).timeline.spans) == 8000


def test_rows_beyond_the_limit_are_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_INTERVAL", 30.0)
    page = Page()
    r = Recorder(0, tmp_path, page, limit=100)
    fill(r, 130)
    r.close()
    assert r.dropped == 30
    samples = store.read(tmp_path).timeline.samples.rows()
    assert samples.name.tolist() == ["dropped"] and samples.value.tolist() == [30.0]
    assert len(store.read(tmp_path).timeline.spans) == 100 and page.values("samples", "value") == [30.0]


def test_nothing_recorded_leaves_no_files(tmp_path: Path) -> None:
    page = Page()
    Recorder(0, tmp_path, page).close()
    assert list(tmp_path.iterdir()) == [] and page.got == []


def test_a_full_disk_loses_rows_not_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_INTERVAL", 0.02)
    monkeypatch.setattr(spool, "WRITE_INTERVAL", 0.02)
    monkeypatch.setattr(spool, "RETRY_INTERVAL", 0.1)
    full = threading.Event()
    append = Writer.append

    def fails(self: Writer, columns: Any) -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, columns)

    monkeypatch.setattr(Writer, "append", fails)
    page = Page()
    r = Recorder(0, tmp_path, page)
    fill(r, 10)
    until(lambda: len(store.read(tmp_path).timeline.spans) == 10)
    full.set()
    fill(r, 20, 10)
    until(lambda: page.details("spool"))
    assert page.details("spool")[0]["error"] == "No space left on device"
    assert page.details("spool")[0]["lost"] > 0
    until(lambda: r.lost_rows == 21)  # all these rows reached the disk while it was full
    time.sleep(2 * spool.RETRY_INTERVAL)
    full.clear()
    fill(r, 5, 30)
    until(lambda: len(page.details("spool")) == 2)
    r.close()
    loaded = store.read(tmp_path)
    assert page.values("spans", "nbytes") == list(range(35)), "the push never stopped"
    assert loaded.timeline.spans.rows().nbytes.tolist() == [*range(10), *range(30, 35)]
    assert loaded.missing == r.lost_rows == 21, "twenty spans, and the mark that said so"
    assert page.details("spool")[1] == {
        "error": "",
        "lost": 21,
        "text": f"{spool.RECOVERED_TEXT}; 21 rows are not on disk",
    }
    assert (tmp_path / "spans-0.1.arrow").exists()


def test_several_slow_writes_are_not_reported_as_a_hung_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, said, append = [0.0], list[str](), Writer.append
    monkeypatch.setattr(spool, "WRITE_INTERVAL", 600.0)
    monkeypatch.setattr(spool, "time", SimpleNamespace(monotonic=lambda: now[0], thread_time=time.thread_time))

    def slow(self: Writer, columns: Any) -> None:
        now[0] += 0.9 * spool.HUNG_SECONDS
        said.extend(r._spool.take_reports())
        append(self, columns)

    monkeypatch.setattr(Writer, "append", slow)
    r = Recorder(0, tmp_path)
    fill(r, 5)
    r.sample(1, "loss", 0.1, 2.0)
    r.mark(1, "state", 0.1, "{}")
    r._flush_rows()
    r._spool._write_once()
    r.close()
    assert now[0] > 2 * spool.HUNG_SECONDS and said == [] and r.lost_rows == 0


def test_a_partially_written_batch_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(tmp_path, "samples", 0)
    row = {"rank": [0], "step": [1], "name": ["loss"], "t": [0.1], "value": [5.0]}
    writer.append(row)
    write = store.os.write

    def half(fd: int, data: Any) -> int:
        if len(data) < 64:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2])

    monkeypatch.setattr(store.os, "write", half)
    with pytest.raises(OSError, match="No space"):
        writer.append(row)
    monkeypatch.undo()
    writer.abandon()
    loaded = store.read(tmp_path)
    assert loaded.timeline.samples.rows().value.tolist() == [5.0] and not loaded.warnings


def test_a_directory_that_cannot_be_created_loses_rows_but_raises_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    page = Page()
    r = Recorder(0, tmp_path / "file" / "run", page)
    fill(r, 10)
    r.close()
    assert len(page.values("spans", "step")) == 10 and r.lost_rows >= 10 and page.details("spool")


def test_a_page_that_fails_does_not_stop_the_spool(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def gone(kind: str, seq: int, columns: dict[str, Any]) -> None:
        raise ConnectionError("nobody there")

    r = Recorder(0, tmp_path, gone)
    fill(r, 10)
    r.close()
    assert len(store.read(tmp_path).timeline.spans) == 10
    assert "were not taken" in caplog.text


def test_recording_costs_next_to_nothing(tmp_path: Path) -> None:
    for path in (tmp_path / "first", tmp_path):  # the first recorder of a process imports the writer
        path.mkdir(exist_ok=True)
        r = Recorder(0, path, Page())
        seconds = min(_timed(r) for _ in range(5))
        r.close()
    assert seconds < 5e-6, "a span is one append"
    assert 0 < r.cpu_seconds < 1.0


def _timed(r: Recorder, n: int = 5000) -> float:
    began = time.thread_time()  # of this thread: other load does not count
    for _ in range(n):
        r.span(1, "comm", "bucket 0", 0.1, 0.2, 0.3, 100)
    return (time.thread_time() - began) / n


CHILD = """
import sys, time
from pathlib import Path
from types import SimpleNamespace
from workbench.cluster.transport import row_subscriber
from workbench.engine.record import recorder as module
from workbench.engine.record import row_spool as spool
spool.RETRY_INTERVAL = 0.2
r = module.Recorder(0, Path(sys.argv[1]))
def fill(n, first=0):
    for i in range(first, first + n):
        r.span(i // 10, "comm", f"bucket {i % 4}", i * 1e-3, i * 1.0001e-3, i * 1.0003e-3, i)
"""


def child(tmp_path: Path, script: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", CHILD + script, str(tmp_path)]
    return subprocess.Popen(command, cwd=Path(__file__).parents[2], stdout=subprocess.PIPE, text=True)


@pytest.mark.engine
def test_after_a_kill_all_rows_but_the_last_seconds_are_on_disk(tmp_path: Path) -> None:
    """Earlier rows survive the loss of the batch in writing; the test above has the time limits."""
    with child(tmp_path, "fill(3000)\nwhile True: fill(20, 3000); time.sleep(.01)") as process:
        until(lambda: len(store.read(tmp_path).timeline.spans) >= 3000)
        time.sleep(0.3)
        process.kill()
    loaded = store.read(tmp_path)
    assert loaded.timeline.spans.rows().nbytes[:3000].tolist() == list(range(3000)) and loaded.missing == 0


@pytest.mark.engine
def test_a_disk_that_is_really_full_for_a_while(tmp_path: Path) -> None:
    limit = "resource.setrlimit(resource.RLIMIT_FSIZE, ({}, resource.RLIM_INFINITY))\n"
    steps = ["import resource", limit.format(40_000), "fill(4000)", "while not r.lost_rows: time.sleep(.01)"]
    steps += ["fill(4000, 4000)", "time.sleep(2)"]
    after = [limit.format("resource.RLIM_INFINITY"), "time.sleep(2)", "fill(500, 8000)", "r.close()"]
    after += ["print(r.lost_rows)"]
    out, _ = child(tmp_path, "\n".join([*steps, *after])).communicate(timeout=60)
    loaded = store.read(tmp_path)
    numbers = loaded.timeline.spans.rows().nbytes.tolist()
    assert int(out) == loaded.missing > 0, "what was lost is known"
    assert numbers[-500:] == list(range(8000, 8500)) and numbers == sorted(set(numbers))
    said = [json.loads(d) for d in loaded.timeline.marks.rows().detail]
    assert spool.RECOVERED_TEXT in said[-1]["text"]
