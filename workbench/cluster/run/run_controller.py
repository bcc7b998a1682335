"""One live run in the kernel: takes in rows, answers changes, notices the end.

Two threads feed it: the relay with batches, and the watch with the engines' state.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

from workbench.cluster.engines.cluster import Cluster
from workbench.cluster.observe.hang_monitor import HangMonitor, decode_texts
from workbench.cluster.observe.run_folder import DISK_TIMEOUT, run_with_timeout
from workbench.cluster.processes.lab_place import host_name
from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.run import generations, last_rows
from workbench.cluster.run.alarm_monitor import AlarmMonitor
from workbench.cluster.run.command_queue import CommandQueue
from workbench.cluster.run.evictions import Evictions
from workbench.cluster.run.run_changes import Changes, PendingChange
from workbench.cluster.run.run_questions import RunQuestions
from workbench.cluster.run.run_state import RunState
from workbench.cluster.run.run_waiting import wait_for_run
from workbench.cluster.transport import disk_rows
from workbench.cluster.transport.reorder_buffer import ReorderBuffer
from workbench.cluster.transport.row_encoding import RowBatch
from workbench.record import alarms
from workbench.record.run import FINAL, Run
from workbench.settings.describe_error import said

REPLAYED_MARKS = ("change", "refused", "resized", "policy", "not saved", "data", "state", "error", "rolled back",
                  "preempted", "members", "memory grows", "end")  # fmt: skip


class RunController(RunState, RunQuestions):
    """Drives and follows one run. `state` is "starting", "running", "paused", "stopping", or one of `FINAL`.

    watched: whether a person sees the run; an unwatched run ends, rather than pauses, at a non-finite loss
    """

    commands: CommandQueue

    def __init__(
        self, run: Run, cluster: Cluster, changes: Changes, run_id: str, watched: Callable[[], bool] = lambda: True
    ) -> None:
        super().__init__(run, cluster, changes, run_id, watched)
        self.evictions = Evictions(self)
        self.ending.survives_loss = lambda: self.changes.experiment.on_death != "end" or bool(self.evictions.leaving)
        self.commands = CommandQueue(self)
        self.alarm_monitor = AlarmMonitor(self)
        self.reorder_buffer = ReorderBuffer(dict(run._following), self._read_missed, self._append_rows)
        self._lock = threading.RLock()
        self.hang_monitor = HangMonitor(run, self.ranks, self.notes)
        self.hang_monitor.hang_after = lambda: self.changes.experiment.hang_after
        self.hang_monitor.describe_process = lambda rank: cluster.health.describe_stop(rank)
        self.hang_monitor.report_stall = self.evictions.handle_stall
        self.hang_monitor.explain_waiting = self.evictions.name_dead_link
        run.live, run._control = True, self

    # -- rows (on the relay's thread)

    def take_batch(self, batch: RowBatch) -> None:
        if batch.run_id == self.run_id:
            self.reorder_buffer.put_batch(batch)

    def _append_rows(self, kind: str, rank: int, seq: int, columns: dict[str, Any]) -> None:
        if not (new := self.run.append(kind, rank, seq, columns)):
            return
        self.hang_monitor.take_rows(kind, rank, columns)
        if kind == "marks":
            skip = len(columns["rank"]) - new
            named = zip(columns["step"], columns["t"], decode_texts(columns["name"]), columns["detail"], strict=True)
            for step, t, name, detail in named:
                if skip <= 0:
                    self._take_mark(rank, int(step), float(t), name, json.loads(detail))
                skip -= 1
        elif kind == "spans":
            self.ending.note_step(rank, int(columns["step"][-1]))
            self.step = max(self.step, int(columns["step"][-1])) if rank == self.commands.leader else self.step
        elif kind == "samples" and rank == self.commands.leader:
            valued = zip(decode_texts(columns["name"]), columns["value"], strict=True)
            self.loss = next((v for n, v in valued if n == "loss"), self.loss)

    def replay_record(self) -> None:
        """Takes in the existing record without acting, when a kernel attaches."""
        self.evictions.can_replace = False
        for rank, step, t, name, detail in self.run.said(*REPLAYED_MARKS, *alarms.NAMES):
            self._take_mark(rank, step, t, name, detail)
        self.evictions.can_replace = True
        spans = self.run.timeline.spans.rows()
        self.hang_monitor.restore_places(spans)
        self.step = int(spans.step.max()) if len(spans) else 0

    def _read_missed(self, kind: str, rank: int, start: int) -> disk_rows.RowPieces:
        if not self.is_elsewhere(rank):
            path = Path(self.run.path or ".")
            return run_with_timeout(DISK_TIMEOUT, lambda: disk_rows.read_pieces(path, kind, rank, start))
        return disk_rows.unpack_pieces(self.cluster.rpc.ask_rank(rank, "rows", kind=kind, start=start)[1])

    def _take_mark(self, rank: int, step: int, t: float, name: str, detail: dict[str, Any]) -> None:
        if name == "change":
            self.changes.note_applied(step, detail, rank not in self.members or "again" in detail)
        elif name == "refused":
            self.commands.dismiss_ranks(self.changes.note_refused(detail))
        elif name == "resized":
            generations.answer_resize(self, step, detail)
        elif name == "state" and detail["state"] not in FINAL and rank in self.members:
            if detail["state"] == "running":
                self.alarm_monitor.note_resumed(t)
            if not (self.state == "stopping" and detail["state"] in ("running", "paused")):
                self.state = detail["state"]
        elif name == "error":
            self.ending.note_error(rank, detail)
        elif name in ("stood still", "spool"):
            self.hang_monitor.take_mark(rank, step, name, detail)
        elif name == "end":
            self.ending.note_left(rank, detail["state"])
        elif name in ("policy", "not saved", "data") and detail.get("text") not in (None, *self.notes):
            self.notes.append(detail["text"])
        elif name == "memory grows" and detail["text"] not in self.notes:
            self.notes.append(detail["text"])
            self.run.warnings = tuple(dict.fromkeys((*self.run.warnings, detail["text"])))
        elif name in ("rolled back", "not rolled back"):
            self.alarm_monitor.take_rollback(t, detail)
        elif name == "preempted":
            self.notes.append(detail["text"])
            self.preempted |= dict.fromkeys(detail["ranks"])
        elif name == "members":
            generations.apply_new_generation(self, self.commands, self.evictions, step, detail)
        elif name in alarms.NAMES:
            self.alarm_monitor.take_alarm(name, rank, step, t, detail)

    def note_death(self, rank: int, error: dict[str, Any]) -> None:
        if why := self.evictions.reasons.get(rank):
            error["text"] = f"was put out: {why}; {error['text']}"
        self.ending.note_error(rank, error)
        has_continued = rank in self.ending.lost  # the report may precede the engine's end
        if (has_continued or self.ending.survives_loss()) and not self.ending.is_stop_requested:
            where = f" at step {error['step']}" if error["step"] or error["op"] else ""  # if the rank reported it
            where += f", {error['op']}" if error["op"] else ""
            self.notes.append(f"rank {rank} is lost{where}: {error['text']}")
            if self.cluster.engines[rank].host != host_name():  # a lost machine closes no connection
                self.evictions.leave_behind([rank])

    # -- commands

    def start_commands(self) -> None:
        """Sends waiting commands. `RunWatch` then watches the run."""
        self.ending.restart_waits()
        self.hang_monitor.start_watch()
        if self.initial_experiment.task.has_own_loop:
            self.cluster.renewal.follow_run(self)
        SupervisedThread("run orders", self.commands.send_next_command, self.over, self.note_error).start()

    def request_change(self, path: str | Mapping[str, Any], value: Any = None) -> PendingChange:
        """Requests a change of knobs, after sending classes that engines lack."""
        return self.changes.request_change(path, value, self._send_change)

    def _send_change(self, change: PendingChange, new: list[type]) -> None:
        change.describe_ranks = self.describe_ranks
        if new:
            self.queue_command("learn", everyone=True, blob=cloudpickle.dumps(new))
        self.commands.put_change(change)

    def stop(self) -> None:
        """Stops at the next step boundary. A second call aborts. A stop is never a failure of the run.

        Without a boundary, the ranks leave in the middle of a step. The lab ends engines of ranks that do not leave,
        notes where they stood, and replaces them for the next run. This takes less than 30 s, or 7 times the longest
        step if steps exceed 3 s. See [Note: How long a stop takes].
        """
        if self.state == "stopping":
            return self.abort()
        self.request_stop()

    def request_checkpoint(self) -> None:
        self.queue_command("request", request={"id": f"checkpoint {time.time_ns():x}", "kind": "checkpoint"})

    def request_stop(self) -> None:
        self.state = "stopping"
        self.ending.note_stop()
        self.queue_command("request", request={"id": "stop", "kind": "stop"})
        self.queue_command("hurry", everyone=True)

    def abort(self) -> None:
        self.state = "stopping"
        self.ending.note_stop()
        self.abort_ranks()

    def close(self) -> None:
        """Stops the run, and aborts it after 3 s."""
        if not self.over.is_set():
            self.stop()
            if not self.over.wait(3.0):
                self.abort()
                self.over.wait(2.0)

    def abort_ranks(self) -> None:
        self.ending.note_abort()
        self.queue_command("abort", everyone=True, asked=self.ending.is_stop_requested)

    def note_saved(self, path: Path, rows: int) -> None:
        self.hang_monitor.record_monitor.note_saved(path, rows, None if self.over.is_set() else self.step)

    def wait(self, timeout: float | None = None) -> Run:
        """Waits for the end with a progress line. Raises RankError if ranks failed. See run_waiting.py."""
        return wait_for_run(self, timeout)

    # -- the end

    def leave_run(self, why: str) -> None:
        """Stops following the run, which may continue."""
        if not self.over.is_set():
            self.changes.refuse_unanswered(why)
            self.run.live = False
            self.notes.append(why)
            self.over.set()

    def end_run(self, state: str, error: BaseException | None = None) -> None:
        with self._lock:
            if self.over.is_set():
                return
            self.state, self.error = state, error
            if error:
                self.notes.append(said(error))
            try:
                last_rows.record_state(self, state, error)
                self.hang_monitor.record_monitor.count_lacking()
            except Exception as failure:  # a disk error must not prevent the end
                self.note_error(failure)
            self.changes.refuse_unanswered("the run ended before it could be applied")
            self.run.live = False
            self.over.set()
