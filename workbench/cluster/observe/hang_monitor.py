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

    hang_after: seconds without a move after which a rank hangs; 0: by the usual length of a step
    process:    returns the system's text about a rank's process
    between:    finds the cause if all ranks wait
    hangs:      called once a second during a stall, with whether it is new
    """

    def __init__(
        self,
        run: Run,
        ranks: Collection[int],
        notes: list[str],
        clock: Callable[[], float] = time.monotonic,
        asleep: Callable[[], float] = read_sleep,
    ) -> None:
        self.run, self.ranks, self.notes = run, ranks, notes
        self.clock, self.asleep = clock, asleep
        self.hang_after: Callable[[], float] = lambda: 0.0
        self.process: Callable[[int], str] = lambda rank: ""
        self.hangs: Callable[[StallVerdict, bool], None] = lambda found, fresh: None
        self.between: Callable[[StallVerdict], StallVerdict] = lambda found: found
        self.holdup = ""
        self.table: dict[int, RankPlace] = {}
        self._base = self._looked = clock()  # earlier time is no silence
        self._gap = (0.0, float("-inf"))  # this kernel's last stall: seconds, end
        self._slept = asleep()
        self._word: dict[int, float] = {}  # when a rank last sent anything
        self._moved: dict[int, float] = {}  # when its last span came
        self._answers: dict[int, tuple[float, dict[str, Any]]] = {}
        self._row: dict[int, tuple[int, str, str, float]] = {}  # newest span's step, lane, name and arrival
        self._lengths: deque[float] = deque(maxlen=RECENT_STEPS)
        self._took: dict[tuple[int, str], deque[float]] = {}  # seconds of recent operations
        self._evaluation = 0.0  # longest, in seconds
        self._said: dict[Any, str] = {}
        self._episode: tuple[tuple[int, ...], StallVerdict] | None = None
        self._lock = threading.Lock()
        self.recording = RecordMonitor(run, self._put_note)

    def start_watch(self) -> None:
        self._base = self._looked = self.clock()
        self._slept = self.asleep()

    # -- events

    def take_rows(self, kind: str, rank: int, columns: dict[str, Any]) -> None:
        now = self._word[rank] = self.clock()
        if kind != "spans" or not len(columns["rank"]):
            return
        self._moved[rank] = now
        lanes, names, t0, t1 = (
            decode_texts(columns["lane"]),
            decode_texts(columns["name"]),
            columns["t0"],
            columns["t1"],
        )
        for i, lane in enumerate(lanes):
            seconds = float(t1[i] - t0[i])
            if lane == "step":
                self._lengths.append(seconds)
            elif lane == "eval":
                self._evaluation = max(self._evaluation, seconds)
            if lane in ("compute", "eval"):
                self._took.setdefault((rank, names[i]), deque(maxlen=RECENT_STEPS)).append(seconds)
        self._row[rank] = int(columns["step"][-1]), lanes[-1], names[-1], now

    def restore_places(self, spans: Rows) -> None:
        """Reads the ranks' last places from the record, for attaching: some ranks may be gone."""
        ranks, back = np.unique(spans.rank[::-1], return_index=True)
        last = spans[len(spans) - 1 - back]
        for rank, step, lane, name in zip(ranks, last.step, last.lane, last.name, strict=True):
            self._row[int(rank)] = int(step), str(lane), str(name), float("-inf")

    def take_status(self, rank: int, answer: dict[str, Any]) -> None:
        now = self._word[rank] = self.clock()
        self._answers[rank] = now, answer
        self.recording.take_status(rank, int(answer.get("lost", 0)))

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
            self.recording.take_mark(rank, detail)

    def _also_stood(self, seconds: float) -> bool:
        """Whether this kernel also missed the time."""
        missed, ended = self._gap
        now = self.clock()
        return now - self._looked > seconds / 2 or (missed > seconds / 2 and now - ended < 2 * MAX_CHECK_GAP)

    # -- conclusions

    def find_stalls(self, state: str, over: Collection[int] = ()) -> None:
        """Call it about once a second, after asking the ranks."""
        self._restart_silence()
        self.recording.check_folder()
        table = self._list_places(over) if state in ("starting", "running") else {}
        usual = self._usual_length(table)
        limit = max(self.hang_after(), 0.0 if usual is not None and self.hang_after() else find_patience(usual))
        table = self.table = {rank: self._add_history(rank, seen, limit) for rank, seen in table.items()}
        if state not in ("starting", "running"):
            self._base, self._episode, self.holdup = self.clock(), None, ""
        if not table:
            return
        found = find_stall(table, limit)
        if found and all(seen.waits for seen in table.values()):
            found = self.between(found)
        glance = found or find_stall(table, LONG_WAIT_SHARE * limit)
        self.holdup = glance.text if glance else ""
        self._follow_stall(found)

    def _restart_silence(self) -> None:
        """Restarts the silence if this kernel, or the whole machine, stood still."""
        now, asleep = self.clock(), self.asleep()
        gap, nap, self._looked, self._slept = now - self._looked, asleep - self._slept, now, asleep
        if nap > MIN_NOTED_SLEEP:
            self._put_note("machine", f"this machine slept for {nap:.0f} s, this kernel and its ranks alike")
        if gap > MAX_CHECK_GAP:
            self._gap = gap, now
        if gap > MAX_CHECK_GAP or nap > MIN_NOTED_SLEEP:
            self._base = now

    def _list_places(self, over: Collection[int]) -> dict[int, RankPlace]:
        now, table = self.clock(), {}
        for rank in self.ranks:
            if rank in over:
                continue
            at, answer = self._answers.get(rank, (self._base, {}))
            still = 0.0 if answer.get("asleep") else answer.get("still", 0.0) + now - at
            still = min(still, now - self._moved.get(rank, self._base), now - self._base)
            mute = now - max(self._word.get(rank, self._base), self._base)
            step, op = self.find_place(rank)
            table[rank] = RankPlace(step, op, bool(answer.get("waits")), still, mute, own=bool(answer.get("own")))
        return table

    def _add_history(self, rank: int, seen: RankPlace, limit: float) -> RankPlace:
        """Adds the rank's earlier times in this operation, and its process's state."""
        took = max(self._took.get((rank, seen.op), ()), default=0.0)
        least = FIRST_STEP_STALL if seen.op == "evaluate" and not self._evaluation else STALL_STEPS * took
        return seen._replace(
            times=max(1.0, least / limit), process=self.process(rank) if seen.mute > PROCESS_CHECK_AFTER else ""
        )

    def _usual_length(self, table: dict[int, RankPlace]) -> float | None:
        """Returns the usual seconds of the current operation."""
        if self._evaluation and any(seen.op == "evaluate" for seen in table.values()):
            return max(self._evaluation, *self._lengths, 0.0)
        return statistics.median(self._lengths) if self._lengths else None

    def _follow_stall(self, found: StallVerdict | None) -> None:
        """Updates one note per stall while it lasts, then notes the outcome."""
        if found:
            self.hangs(found, self._episode is None)
            key = self._episode[0] if self._episode else found.odd
            self._put_note(key, found.text, fresh=self._episode is None)
            self._episode = key, found
        elif self._episode:
            (key, was), self._episode = self._episode, None
            if self._said.get(key) == was.text:  # else the rank's report is more exact
                self._put_note(key, f"{format_ranks(was.odd)} stood still for {was.seconds:.0f} s and went on")

    def find_place(self, rank: int) -> tuple[int, str]:
        """Returns (step, operation) of a rank by its newest answer or row."""
        at, answer = self._answers.get(rank, (float("-inf"), {}))
        step, op = int(answer.get("step", 0)), str(answer.get("busy") or "")
        if rank not in self._row:
            return step, op
        last, lane, name, came = self._row[rank]
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
            old = self._said.get(key)
            self._said[key] = text
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
