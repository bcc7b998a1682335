"""A light stand-in for the engine's session: the same contract, a thread that pushes rows, no torch.

The experiment's seed chooses what it does. The tests here check the path of rows through messages, gaps and the spool,
without processes.
"""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
import time
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_watch import RunWatch
from workbench.cluster.transport import disk_rows, row_encoding
from workbench.cluster.transport.reorder_buffer import ReorderBuffer
from workbench.engine.record.recorder import Recorder
from workbench.experiment import Experiment
from workbench.record.timeline import columns_of
from workbench.run import Run

RAISES, RAISES_EVERYWHERE, TALKS, NAN, BLOCKS, STUCK = 1, 2, 3, 4, 5, 6  # seeds with a meaning
SESSION = "test_cluster_fake:FakeSession"
PACE = 0.02


class FakeSession:
    """A session that trains nothing, at 50 steps a second; it obeys, records and fails as a real one."""

    def __init__(
        self, experiment: Any, *, rank: int, size: int, push: Any, run_dir: Path, epoch: float, **rest: Any
    ) -> None:
        self.experiment, self.rank, self.size, self.epoch = experiment, rank, size, epoch
        self.record = Recorder(rank, run_dir, push)
        self.inbox: queue.Queue[dict[str, Any]] = queue.Queue()
        self.at, self.phase, self.error, self.rest = 0, "starting", None, rest
        self.stopping = self.paused = self.left = self.hurried = False
        self.model = "a model"
        self.thread = threading.Thread(target=self.live, name=f"rank {rank} training", daemon=True)

    @staticmethod
    def host_store(host: str = "127.0.0.1") -> tuple[Any, str, int]:
        return object(), host, 1

    def start(self) -> None:
        self.thread.start()

    def request(self, what: dict[str, Any]) -> None:
        self.inbox.put(what)

    def hurry(self) -> None:
        self.hurried = self.stopping = True

    def abort(self, asked: bool = False) -> None:
        self.left = True

    def join(self, timeout: float | None = None) -> bool:
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def status(self) -> dict[str, Any]:
        return {"state": self.phase, "step": self.at, "busy": "fake", "error": self.error}

    def mark(self, name: str, detail: dict[str, Any]) -> None:
        self.record.mark(self.at, name, time.time() - self.epoch, json.dumps(detail))

    def say(self, phase: str) -> None:
        self.phase = phase
        if self.rank == 0:
            self.mark("state", {"state": phase})

    def live(self) -> None:
        try:
            self.train()
        except Exception as error:
            about = {"type": type(error).__name__, "text": str(error), "traceback": ""}
            self.error = {"rank": self.rank, "step": self.at, "op": "forward", **about}
            self.mark("error", self.error)
            self.say("failed")
        self.record.close()

    def train(self) -> None:
        self.say("running")
        e = self.experiment
        while not (self.stopping or self.left or (e.steps and self.at >= e.steps)):
            self.obey()
            if self.paused:
                time.sleep(PACE)
                continue
            began = time.time() - self.epoch
            self.step(e.seed)
            now = time.time() - self.epoch
            self.record.span(self.at, "step", "fake", began, began, now, 0)
            self.record.sample(self.at, "loss", now, 1.0 / (1 + self.at))
            self.at += 1
        if self.left:
            self.mark("torn", {})
        self.say("stopped" if self.stopping else "failed" if self.left else "done")

    def step(self, seed: int) -> None:
        time.sleep(PACE)
        if seed == RAISES_EVERYWHERE and self.at == 5:
            raise ValueError("shapes do not fit")
        if seed == RAISES and self.at == 5:
            raise ValueError("only rank 1 is wrong") if self.rank == 1 else RuntimeError("Connection closed by peer")
        if seed == NAN and self.at == 5 and self.rank == self.size - 1:
            self.mark("nan", {"loss": "nan"})
        if seed == TALKS and self.at == 3:
            print(f"hello from {self.rank}")
            print("to stderr", file=sys.stderr)
            logging.getLogger("user").warning("a log line")
            warnings.warn("a warning", stacklevel=1)
        while seed == STUCK and self.rank == 1:
            time.sleep(PACE)
        while seed == BLOCKS and self.rank == 1 and not (self.hurried or self.left):
            time.sleep(PACE)

    def obey(self) -> None:
        while not self.inbox.empty():
            what = self.inbox.get()
            match what["kind"]:
                case "change":
                    self.set(what)
                case "pause" | "resume":
                    self.paused = what["kind"] == "pause"
                    self.say("paused" if self.paused else "running")
                case "stop":
                    self.stopping = True

    def set(self, what: dict[str, Any]) -> None:
        about = {k: what.get(k) for k in ("id", "path", "value", "requested_at")}
        if what["path"] == "lr" and what["value"] == 99.0:
            return self.mark("refused", {**about, "reason": "lr=99: the fake does not like it"})
        self.experiment = self.experiment.set(what["path"], what["value"])
        self.mark("change", {**about, "text": "changed"})


def spans(first: int, n: int, rank: int = 0) -> dict[str, Any]:
    numbers = range(first, first + n)
    rows = [(rank, i, "comm", f"all_reduce bucket {i % 3}", i + 0.1, i + 0.2, i + 0.3, 4 * i) for i in numbers]
    return columns_of("spans", rows)


def marks(n: int) -> dict[str, Any]:
    return columns_of("marks", [(2, i, "log", i * 0.5, json.dumps({"text": f"ä {i}"})) for i in range(n)])


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    def plain(column: Any) -> list[Any]:
        return list(column.decode() if hasattr(column, "decode") else np.asarray(column).tolist())

    return set(one) == set(other) and all(plain(one[k]) == plain(other[k]) for k in one)


def test_what_is_decoded_is_what_was_encoded() -> None:
    for kind, columns in (("spans", spans(5, 100, rank=2)), ("marks", marks(3))):
        batch = row_encoding.decode_batch(row_encoding.encode_batch(row_encoding.RowBatch("g", kind, 2, 7, columns)))
        assert (batch.run_id, batch.kind, batch.rank, batch.seq) == ("g", kind, 2, 7)
        assert same(batch.columns, columns)


def test_a_message_is_small() -> None:
    frames = row_encoding.encode_batch(row_encoding.RowBatch("g" * 32, "spans", 2, 7, spans(0, 1000)))
    assert sum(map(len, frames)) < 1000 * 40 + 500


def test_rows_that_a_message_lost_come_from_disk_before_later_ones_pass() -> None:
    def disk(kind: str, rank: int, start: int) -> list[Any]:
        return [(start, spans(start, reached - start))] if reached > start else []

    passed: list[int] = []
    gaps, reached = ReorderBuffer({}, disk, lambda kind, rank, seq, columns: passed.append(seq)), 10
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 0, spans(0, 10)))
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 20, spans(20, 10)))
    assert passed == [0]
    reached = 20
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 30, spans(30, 5)))
    assert passed == [0, 10, 20, 30]
    assert gaps.next_seq["spans", 0] == 35


def test_a_gap_between_rows_that_wait_is_filled_too() -> None:
    def disk(kind: str, rank: int, start: int) -> list[Any]:
        return [(start, spans(start, on_disk - start))] if on_disk > start else []

    passed: list[tuple[int, int]] = []
    gaps = ReorderBuffer({}, disk, lambda kind, rank, seq, columns: passed.append((seq, seq + len(columns["rank"]))))
    on_disk = 0
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 10, spans(10, 10)))  # rows 0 to 9 and 20 to 29 are lost
    on_disk = 20
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 30, spans(30, 10)))
    assert max(end for _, end in passed) == 20, "rows 30 to 39 wait for rows 20 to 29"
    on_disk = 40
    gaps.put_batch(row_encoding.RowBatch("g", "spans", 0, 40, spans(40, 10)))
    reached = 0
    for first, end in passed:
        assert first <= reached, f"rows {reached} to {first - 1} were skipped"
        reached = max(reached, end)
    assert reached == 50


class Slow:
    """A rank that answers only the `at`-th request for rows 0 to 9, on a virtual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
        self.now, self.asked, self.at, self.passed = 0.0, 0, at, []
        clock = SimpleNamespace(monotonic=lambda: self.now)
        monkeypatch.setattr("workbench.cluster.transport.reorder_buffer.time", clock)
        self.reorder_buffer = ReorderBuffer({}, self.missed, lambda kind, rank, seq, columns: self.passed.append(seq))

    def missed(self, kind: str, rank: int, start: int) -> list[Any]:
        self.asked += 1
        if self.asked < self.at:
            self.now += 3.1  # longer than the lab waits
            raise RuntimeError("rank 0 did not answer 'rows' within 3 s")
        return [(0, spans(0, 10))]


def test_missing_rows_of_a_slow_rank_are_requested_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, at=3)
    for first in (10, 20, 30):
        slow.reorder_buffer.put_batch(row_encoding.RowBatch("g", "spans", 0, first, spans(first, 10)))
    assert slow.passed == [0, 10, 20, 30]


def test_the_end_of_a_run_requests_missing_rows_again(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, at=3)
    slow.reorder_buffer.put_batch(row_encoding.RowBatch("g", "spans", 0, 10, spans(10, 10)))
    slow.reorder_buffer.fetch_missing("spans", 0, 20)
    assert slow.passed == [0, 10]


def test_later_rows_wait_while_a_reminder_has_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, at=3)
    slow.reorder_buffer.put_batch(row_encoding.RowBatch("g", "marks", 0, 10, spans(10, 10)))
    for _ in range(2):
        slow.reorder_buffer.take_count("marks", 0, 20)
    assert slow.passed == [] and slow.asked == 2, "once each time: ranks are watched by the thread that asks"
    slow.reorder_buffer.take_count("marks", 0, 20)
    assert slow.passed == [0, 10]


def test_rows_pass_eventually_if_a_rank_never_sends_the_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Slow(monkeypatch, at=99)
    for first in range(10, 110, 10):
        slow.reorder_buffer.put_batch(row_encoding.RowBatch("g", "spans", 0, first, spans(first, 10)))
    assert slow.passed == list(range(10, 110, 10))
    asked = slow.asked
    slow.reorder_buffer.put_batch(row_encoding.RowBatch("g", "spans", 0, 110, spans(110, 10)))
    assert slow.passed[-1] == 110 and slow.asked == asked, "nobody waits for those any more"


def test_the_end_of_a_run_is_made_whole_from_disk() -> None:
    passed: list[int] = []
    disk = {("spans", 0): 3}
    gaps = ReorderBuffer(disk, lambda kind, rank, start: [(start, spans(start, 4))], lambda *row: passed.append(row[2]))
    gaps.fetch_missing("spans", 0, 7)
    gaps.fetch_missing("spans", 0, 7)
    assert passed == [3]


def test_pieces_of_a_spool_travel_as_one_blob(tmp_path: Path) -> None:
    record = Recorder(1, tmp_path)
    for i in range(30):
        record.span(i, "comm", "x", i, i, i + 1, 8)
    record.close()
    found = disk_rows.read_pieces(tmp_path, "spans", 1, 10)
    assert [(seq, len(c["rank"])) for seq, c in found] == [(10, 20)]
    back = disk_rows.unpack_pieces(disk_rows.pack_pieces(found, "spans", 1))
    assert back[0][0] == 10 and same(back[0][1], dict(found[0][1]))


def test_the_kernel_writes_the_last_mark_of_a_dead_rank_to_disk(tmp_path: Path) -> None:
    run = Run({"seed": 0}, path=tmp_path / "run", epoch=1.0)
    path = run.save()
    record = Recorder(0, path)
    record.mark(1, "state", 0.5, json.dumps({"state": "running"}))
    record.close()
    disk_rows.add_marks(path, 0, [(9, "state", 2.0, {"state": "failed"})])
    again = Run.open(path)
    assert again.state == "failed" and again.missing == 0


def test_an_answer_whose_message_was_lost_is_found_on_disk_though_nothing_follows_it(tmp_path: Path) -> None:
    run = Run(Experiment(ranks=1), path=tmp_path / "run", epoch=1.0)
    path = run.save()
    told = {"run_id": "g", "as": 0, "error": None, "state": "running", "step": 5, "busy": "", "over": False}
    told["sent"] = {"marks": 1}
    line = SimpleNamespace(ask_all=lambda what, **rest: {0: told})
    live = RunController(run, SimpleNamespace(rpc=line), Changes(Experiment(ranks=1), []), "g")
    change, watch = live.request_change("bucket_mb", 2), RunWatch(live)
    with pytest.raises(TimeoutError, match="the run is starting"):
        change.wait(0)
    record = Recorder(0, path)  # writes its spool and pushes to no client
    record.mark(5, "change", 0.5, json.dumps({"id": change.id, "path": "bucket_mb", "value": 2}))
    record.close()
    watch.request_status()
    assert change.applied_at is None  # its message may still be under way
    watch.request_status()
    assert change.wait(0).applied_at == 5
    with pytest.raises(TimeoutError, match="rank 0 at step 5"):
        live.request_change("bucket_mb", 4).wait(0)
