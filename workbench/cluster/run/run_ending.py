"""Decides when a run is over: which ranks left, which errors count, how long to wait.

It has no thread, socket or clock of its own.

[Note: How long a stop takes] The ranks stop at their next common step boundary. The kernel waits while they complete
steps. A step may take max(`MIN_STEP_WAIT`, `WAIT_FACTOR` x the longest recent step) seconds, with `FIRST_STEP_WAIT` for
`MIN_STEP_WAIT` before the first step. With shorter steps the wait ends after `MAX_STEP_WAIT` seconds. Then the ranks
must leave in the middle of a step. After max(`LEAVE_TIMEOUT`, `WAIT_FACTOR` x that step) more seconds the kernel gives
up the remaining ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from workbench.cluster.run.rank_errors import is_consequence
from workbench.record.run import FINAL

MIN_STEP_WAIT = 1.0  # seconds
WAIT_FACTOR = 3.0  # step lengths
FIRST_STEP_WAIT = 10.0  # seconds
MAX_STEP_WAIT = 20.0  # seconds
LEAVE_TIMEOUT = 3.0  # seconds, in the middle of a step
REGROUP_TIMEOUT = 30.0  # seconds for ranks to meet after a loss
REPORT_TIMEOUT = 0.5  # seconds for other ranks' reports after a failure

Error = dict[str, Any]


class RunEnding:
    """The end of one run, for any thread. joining: ranks that have not joined; their end says nothing about the run"""

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks, self.clock = set(ranks), clock
        self.joining: set[int] = set()
        self.final_states: dict[int, str] = {}
        self.errors: dict[int, Error] = {}
        self.lost: dict[int, Error | None] = {}  # without ending the run
        self.survives_loss: Callable[[], bool] = lambda: False  # the run survives a lost rank
        self.unwatched_error: Error | None = None  # a non-finite loss that ended the run
        self.is_stop_requested = False
        self._is_abort_requested = False  # ranks must leave within a step
        self._stop_requested_at = self._last_step_at = 0.0
        self._abort_at = self._give_up_at = float("inf")
        self._only_joining_since: float | None = None  # since when no other ranks remain
        self._phases: dict[int, str] = {}  # last reported, by rank
        self._steps: dict[int, int] = {}
        self._step_seconds: dict[int, float] = {}  # of the longest recent step
        self._lock = threading.Lock()

    # -- events

    def take_status(self, rank: int, status: dict[str, Any]) -> None:
        self._step_seconds[rank] = float(status.get("step_s") or 0.0)
        self._phases[rank] = str(status["state"])
        self.note_step(rank, int(status["step"]))
        if status["over"]:
            self.note_left(rank, status["state"] if status["state"] in FINAL else "failed")

    def note_step(self, rank: int, step: int) -> None:
        if step > self._steps.get(rank, -1):
            self._steps[rank], self._last_step_at = step, self.clock()

    def note_left(self, rank: int, state: str) -> None:
        """A rank's first report counts."""
        with self._lock:
            if self.final_states.setdefault(rank, state) == "done" and self._ended_after(rank, self.errors.get(rank)):
                self.lost[rank] = self.errors.pop(rank)
                if not self.errors:
                    self._abort_at = float("inf")

    def _ended_after(self, rank: int, error: Error | None) -> bool:
        """Whether an engine ended after its rank's last step, which is no failure."""
        return self.final_states.get(rank) == "done" and error is not None and error["type"] == "EngineDied"

    def note_error(self, rank: int, error: Error) -> None:
        """A rank's first report counts."""
        with self._lock:
            if rank in self.errors:
                return
            now = self.clock()
            if rank in self.joining:
                self.lost.setdefault(rank)
                self.ranks.discard(rank)
            if self._ended_after(rank, error):
                self.lost.setdefault(rank)
            if rank in self.lost:
                self.lost[rank] = self.lost[rank] or {"t": now, **error}
                return
            self.errors[rank] = {"t": now, **error}
            wait = REGROUP_TIMEOUT if self.survives_loss() else 0.0 if error["type"] == "EngineDied" else REPORT_TIMEOUT
            self._abort_at = min(self._abort_at, now + wait)

    def admit_ranks(self, new: Iterable[int]) -> None:
        with self._lock:
            self.ranks |= set(new)
            self.joining |= set(new)

    def note_joined(self, members: Iterable[int]) -> None:
        """Records the training ranks. One may have died before the kernel heard of its joining."""
        with self._lock:
            new = self.joining & set(members)
            self.joining -= new
            self.ranks |= new
            died = {rank: error for rank in new if (error := self.lost.pop(rank, None))}
        for rank, error in died.items():
            self.note_error(rank, error)

    def note_removed(self, gone: Iterable[int], step: int) -> None:
        """The run continues without these ranks from `step`, possibly an earlier one."""
        with self._lock:
            self._steps = {rank: min(at, step) for rank, at in self._steps.items()}
            self.ranks -= set(gone)
            self.joining -= set(gone)
            self.lost |= {rank: self.errors.pop(rank, None) or self.lost.get(rank) for rank in gone}
            if not self.errors:
                self._abort_at = float("inf")

    def forget_ranks(self, ranks: Iterable[int]) -> None:
        with self._lock:
            self.lost |= {rank: self.errors.pop(rank) for rank in ranks}

    # -- commands

    def note_stop(self) -> None:
        self.is_stop_requested = True
        self._stop_requested_at = self.clock()

    def note_abort(self) -> None:
        self._is_abort_requested = True
        self._give_up_at = min(self._give_up_at, self.clock() + self._find_patience(LEAVE_TIMEOUT))

    def restart_waits(self) -> None:
        """Restarts the waits, because ranks receive earlier orders only now."""
        if self.is_stop_requested:
            self._stop_requested_at = self.clock()
        if self._is_abort_requested:
            self._give_up_at = self.clock() + self._find_patience(LEAVE_TIMEOUT)

    # -- what is due

    @property
    def is_stop_overdue(self) -> bool:
        return self.is_stop_requested and self.clock() - self._stop_requested_at > FIRST_STEP_WAIT

    @property
    def dead_ranks(self) -> set[int]:
        return {r for r, e in {**self.lost, **self.errors}.items() if e and e["type"] == "EngineDied"}

    @property
    def living_ranks(self) -> set[int]:
        return self.ranks - self.dead_ranks

    @property
    def awaited_ranks(self) -> set[int]:
        return self.living_ranks - set(self.final_states)

    @property
    def is_end_near(self) -> bool:
        return bool(self.is_stop_requested or self._is_abort_requested or self.errors or self.final_states)

    def next_action(self) -> str:
        """Returns what is due: "over", "give up", "abort", or ""."""
        now = self.clock()
        if not self.awaited_ranks:
            return "over"
        if now > self._give_up_at:
            return "give up"
        if not self._is_abort_requested and (
            now > min(self._abort_at, self._boundary_limit()) or self._only_joining_left(now)
        ):
            return "abort"
        return ""

    def _only_joining_left(self, now: float) -> bool:
        """Whether only uninvited ranks remain: the run made its last step, or every trained rank has died."""
        uninvited = {self._phases.get(rank) for rank in self.awaited_ranks} == {"waiting"}
        if not (self.awaited_ranks <= self.joining and (uninvited or "done" in self.final_states.values())):
            self._only_joining_since = None
            return False
        self._only_joining_since = self._only_joining_since if self._only_joining_since is not None else now
        return now - self._only_joining_since > LEAVE_TIMEOUT  # their invitation may be on its way

    def _boundary_limit(self) -> float:
        """Returns until when a stop awaits a boundary. See [Note: How long a stop takes]."""
        if not self.is_stop_requested:
            return float("inf")
        begun = any(step > 0 for step in self._steps.values())
        patience = self._find_patience(MIN_STEP_WAIT if begun else FIRST_STEP_WAIT)
        return min(
            max(self._stop_requested_at, self._last_step_at) + patience,
            self._stop_requested_at + max(MAX_STEP_WAIT, patience),
        )

    def _find_patience(self, least: float) -> float:
        return max(least, WAIT_FACTOR * max(self._step_seconds.values(), default=0.0))

    def find_outcome(self) -> tuple[str, list[Error]]:
        """Returns (done, stopped, preempted or failed; the errors).

        After a stop, neither a peer's closed connection is a failure, nor a rank's death before the ranks agreed to
        continue. A death after a rank's last step is one if it caused all errors.
        """
        errors = [
            e
            for e in self.errors.values()
            if not (self.is_stop_requested and (is_consequence(e) or self._was_survived(e)))
        ]
        if errors and all(map(is_consequence, errors)):
            errors += self._list_late_deaths()
        if errors and not self.is_stop_requested:
            errors += [_make_freed_error(rank, step) for rank, step in self._list_freed()]
        if self.unwatched_error is not None:
            errors.insert(0, self.unwatched_error)
        if errors:
            preempted = any(error["type"] == "Preempted" for error in errors)
            return "preempted" if preempted else "failed", errors
        states = {self.final_states.get(rank, "stopped") for rank in self.ranks - self.joining}
        if states == {"done"}:
            return "done", []
        return ("failed" if states == {"failed"} and not self.is_stop_requested else "stopped"), []

    def _was_survived(self, error: Error) -> bool:
        """Whether a rank died, and another trained rank could continue until the stop."""
        stopped = {rank for rank in self.ranks - self.joining if self.final_states.get(rank) == "stopped"}
        return error["type"] == "EngineDied" and self.survives_loss() and bool(stopped)

    def _list_late_deaths(self) -> list[Error]:
        """Returns the deaths of ranks after their last step. Other ranks may have lost a peer because of one."""
        return [e for r, e in sorted(self.lost.items()) if r in self.ranks and self._ended_after(r, e) and e]

    def _list_freed(self) -> list[tuple[int, int]]:
        """Returns (rank, step) of ranks that left unaware of the failure."""
        left = sorted(r for r, state in self.final_states.items() if state == "stopped" and r not in self.errors)
        return [(rank, self._steps.get(rank, 0)) for rank in left]


def _make_freed_error(rank: int, step: int) -> Error:
    return {"rank": rank, "step": step, "op": "", "type": "Left", "text": "was told to leave", "consequence": True}
