"""Notices ranks that stand still and (`RecordMonitor`) a record that lacks rows.

It keeps notes from the ranks' rows, marks and answers. An outdated note becomes its outcome. It asks no rank and ends
nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

import numpy as np

from workbench.cluster.observe.hang_diagnosis import (
    FIRST_STEP_STALL,
    LONG_WAIT_SHARE,
    STALL_STEPS,
    RankPlace,
    StallVerdict,
    find_patience,
    find_stall,
)
from workbench.cluster.observe.record_monitor import RecordMonitor
from workbench.record.run import Run
from workbench.record.timeline import Rows
from workbench.settings.rank_text import format_ranks

MAX_CHECK_GAP = 5.0  # seconds; after a longer gap this kernel itself stood still
MIN_NOTED_SLEEP = 2.0  # seconds
PROCESS_CHECK_AFTER = 2.0  # seconds of a rank's silence until the system is asked about its process
RECENT_STEPS = 20  # of all ranks, for the usual length


def read_sleep() -> float:
    """Returns this machine's seconds of sleep, on Linux; else 0."""
    boot = getattr(time, "CLOCK_BOOTTIME", None)
    return time.clock_gettime(boot) - time.monotonic() if boot is not None else 0.0


class HangMonitor:
    """Watches the ranks of one run. `holdup` names the ranks that hold it up, or "".

    sleep_clock:      returns this machine's seconds of sleep
    hang_after:       seconds without a move after which a rank hangs; 0: by the usual length of a step
    describe_process: returns the system's text about a rank's process
    explain_waiting:  finds the cause if all ranks wait
    report_stall:     called once a second during a stall, with whether it is new
    """

    def __init__(
        self,
        run: Run,
        ranks: Collection[int],
        notes: list[str],
        clock: Callable[[], float] = time.monotonic,
        sleep_clock: Callable[[], float] = read_sleep,
    ) -> None:
        self.run, self.ranks, self.notes = run, ranks, notes
        self.clock, self.sleep_clock = clock, sleep_clock
        self.hang_after: Callable[[], float] = lambda: 0.0
        self.describe_process: Callable[[int], str] = lambda rank: ""
        self.report_stall: Callable[[StallVerdict, bool], None] = lambda found, fresh: None
        self.explain_waiting: Callable[[StallVerdict], StallVerdict] = lambda found: found
        self.holdup = ""
        self.table: dict[int, RankPlace] = {}
        self._silence_began = self._last_check = clock()  # earlier time is no silence
        self._kernel_stall = (0.0, float("-inf"))  # this kernel's last stall: seconds, end
        self._sleep_seconds = sleep_clock()
        self._last_message_at: dict[int, float] = {}  # when a rank last sent anything
        self._last_span_at: dict[int, float] = {}  # when its last span came
        self._statuses: dict[int, tuple[float, dict[str, Any]]] = {}
        self._newest_spans: dict[int, tuple[int, str, str, float]] = {}  # step, lane, name and arrival
        self._step_seconds: deque[float] = deque(maxlen=RECENT_STEPS)
        self._operation_seconds: dict[tuple[int, str], deque[float]] = {}  # of recent operations
        self._longest_evaluation = 0.0  # seconds
        self._notes_by_topic: dict[Any, str] = {}
        self._open_stall: tuple[tuple[int, ...], StallVerdict] | None = None
        self._lock = threading.Lock()
        self.record_monitor = RecordMonitor(run, self._put_note)

    def start_watch(self) -> None:
        self._silence_began = self._last_check = self.clock()
        self._sleep_seconds = self.sleep_clock()

    # -- events

    def take_rows(self, kind: str, rank: int, columns: dict[str, Any]) -> None:
        now = self._last_message_at[rank] = self.clock()
        if kind != "spans" or not len(columns["rank"]):
            return
        self._last_span_at[rank] = now
        lanes, names, t0, t1 = (
            decode_texts(columns["lane"]),
            decode_texts(columns["name"]),
            columns["t0"],
            columns["t1"],
        )
        for i, lane in enumerate(lanes):
            seconds = float(t1[i] - t0[i])
            if lane == "step":
                self._step_seconds.append(seconds)
            elif lane == "eval":
                self._longest_evaluation = max(self._longest_evaluation, seconds)
            if lane in ("compute", "eval"):
                self._operation_seconds.setdefault((rank, names[i]), deque(maxlen=RECENT_STEPS)).append(seconds)
        self._newest_spans[rank] = int(columns["step"][-1]), lanes[-1], names[-1], now

    def restore_places(self, spans: Rows) -> None:
        """Reads the ranks' last places from the record, for attaching: some ranks may be gone."""
        ranks, back = np.unique(spans.rank[::-1], return_index=True)
        last = spans[len(spans) - 1 - back]
        for rank, step, lane, name in zip(ranks, last.step, last.lane, last.name, strict=True):
            self._newest_spans[int(rank)] = int(step), str(lane), str(name), float("-inf")

    def take_status(self, rank: int, answer: dict[str, Any]) -> None:
        now = self._last_message_at[rank] = self.clock()
        self._statuses[rank] = now, answer
        self.record_monitor.take_status(rank, int(answer.get("lost", 0)))

    def take_mark(self, rank: int, step: int, name: str, detail: dict[str, Any]) -> None:
        """Takes in a mark that the rank, or its record, stood still."""
        if name == "stood still":
            seconds = float(detail["seconds"])
            if detail.get("machine") or self._also_stood(seconds):
                word = "slept" if detail.get("machine") else "stood still"
                return self._put_note(
                    "machine", f"this machine {word} for {seconds:.0f} s, this kernel and its ranks alike"
                )
            self._put_note((rank,), f"rank {rank} {detail['text']} (step {step})")
        elif name == "spool":
            self.record_monitor.take_mark(rank, detail)

    def _also_stood(self, seconds: float) -> bool:
        """Whether this kernel also missed the time."""
        missed, ended = self._kernel_stall
        now = self.clock()
        return now - self._last_check > seconds / 2 or (missed > seconds / 2 and now - ended < 2 * MAX_CHECK_GAP)

    # -- conclusions

    def find_stalls(self, state: str, over: Collection[int] = ()) -> None:
        """Call it about once a second, after asking the ranks."""
        self._restart_silence()
        self.record_monitor.check_folder()
        table = self._list_places(over) if state in ("starting", "running") else {}
        usual = self._usual_length(table)
        limit = max(self.hang_after(), 0.0 if usual is not None and self.hang_after() else find_patience(usual))
        table = self.table = {rank: self._add_history(rank, seen, limit) for rank, seen in table.items()}
        if state not in ("starting", "running"):
            self._silence_began, self._open_stall, self.holdup = self.clock(), None, ""
        if not table:
            return
        found = find_stall(table, limit)
        if found and all(seen.waits for seen in table.values()):
            found = self.explain_waiting(found)
        glance = found or find_stall(table, LONG_WAIT_SHARE * limit)
        self.holdup = glance.text if glance else ""
        self._follow_stall(found)

    def _restart_silence(self) -> None:
        """Restarts the silence if this kernel, or the whole machine, stood still."""
        now, asleep = self.clock(), self.sleep_clock()
        gap, nap = now - self._last_check, asleep - self._sleep_seconds
        self._last_check, self._sleep_seconds = now, asleep
        if nap > MIN_NOTED_SLEEP:
            self._put_note("machine", f"this machine slept for {nap:.0f} s, this kernel and its ranks alike")
        if gap > MAX_CHECK_GAP:
            self._kernel_stall = gap, now
        if gap > MAX_CHECK_GAP or nap > MIN_NOTED_SLEEP:
            self._silence_began = now

    def _list_places(self, over: Collection[int]) -> dict[int, RankPlace]:
        now, table = self.clock(), {}
        for rank in self.ranks:
            if rank in over:
                continue
            at, answer = self._statuses.get(rank, (self._silence_began, {}))
            stalled = 0.0 if answer.get("asleep") else answer.get("still", 0.0) + now - at
            stalled = min(stalled, now - self._last_span_at.get(rank, self._silence_began), now - self._silence_began)
            silent = now - max(self._last_message_at.get(rank, self._silence_began), self._silence_began)
            step, op = self.find_place(rank)
            table[rank] = RankPlace(step, op, bool(answer.get("waits")), stalled, silent, own=bool(answer.get("own")))
        return table

    def _add_history(self, rank: int, seen: RankPlace, limit: float) -> RankPlace:
        """Adds the rank's earlier times in this operation, and its process's state."""
        took = max(self._operation_seconds.get((rank, seen.op), ()), default=0.0)
        least = FIRST_STEP_STALL if seen.op == "evaluate" and not self._longest_evaluation else STALL_STEPS * took
        process = self.describe_process(rank) if seen.silent_seconds > PROCESS_CHECK_AFTER else ""
        return seen._replace(limit_factor=max(1.0, least / limit), process=process)

    def _usual_length(self, table: dict[int, RankPlace]) -> float | None:
        """Returns the usual seconds of the current operation."""
        if self._longest_evaluation and any(seen.op == "evaluate" for seen in table.values()):
            return max(self._longest_evaluation, *self._step_seconds, 0.0)
        return statistics.median(self._step_seconds) if self._step_seconds else None

    def _follow_stall(self, found: StallVerdict | None) -> None:
        """Updates one note per stall while it lasts, then notes the outcome."""
        if found:
            self.report_stall(found, self._open_stall is None)
            key = self._open_stall[0] if self._open_stall else found.stalled_ranks
            self._put_note(key, found.text, fresh=self._open_stall is None)
            self._open_stall = key, found
        elif self._open_stall:
            (key, was), self._open_stall = self._open_stall, None
            if self._notes_by_topic.get(key) == was.text:  # else the rank's report is more exact
                ranks = format_ranks(was.stalled_ranks)
                self._put_note(key, f"{ranks} stood still for {was.seconds:.0f} s and went on")

    def find_place(self, rank: int) -> tuple[int, str]:
        """Returns (step, operation) of a rank by its newest answer or row."""
        at, answer = self._statuses.get(rank, (float("-inf"), {}))
        step, op = int(answer.get("step", 0)), str(answer.get("busy") or "")
        if rank not in self._newest_spans:
            return step, op
        last, lane, name, came = self._newest_spans[rank]
        ended = lane == "step"
        if (last + ended, came) <= (step, at):
            return step, op
        return (last + 1, "") if ended else (last, f"after {name}")

    def describe_death(self, rank: int, how: str) -> dict[str, Any]:
        """Returns the error of a rank without an engine, at its last place."""
        step, op = self.find_place(rank)
        return {"rank": rank, "step": step, "op": op, "text": f"its engine {how}", "type": "EngineDied"}

    def _put_note(self, key: Any, text: str, fresh: bool = True) -> None:
        """Replaces the note on the same topic. fresh: as the newest note"""
        with self._lock:
            old = self._notes_by_topic.get(key)
            self._notes_by_topic[key] = text
            if old in self.notes:
                at = self.notes.index(old)
                if not fresh:
                    self.notes[at] = text
                    return
                del self.notes[at]
            self.notes.append(text)


def decode_texts(column: Any) -> list[str]:
    """Returns a text column of a message as strings."""
    return [str(t) for t in (column.decode() if hasattr(column, "decode") else column)]
