"""Decides when a run is over: which ranks left, which errors count, how long to wait.

It has no thread, socket or clock of its own.

[Note: How long a stop takes] The ranks stop at their next common step boundary. The kernel waits while they complete
steps. A step may take max(`LEAST`, `STEPS` x the longest recent step) seconds, with `FIRST` for `LEAST` before the
first step. With shorter steps the wait ends after `MOST` seconds. Then the ranks must leave in the middle of a step.
After max(`LEAVE`, `STEPS` x that step) more seconds the kernel gives up the remaining ranks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from workbench.cluster.run.errors import is_consequence
from workbench.record.run import FINAL

LEAST = 1.0  # seconds
STEPS = 3.0
FIRST = 10.0  # seconds
MOST = 20.0  # seconds
LEAVE = 3.0  # seconds
REUNION = 30.0  # seconds for ranks to meet after a loss
REPORT = 0.5  # seconds for other ranks' reports after a failure

Error = dict[str, Any]


class Ending:
    """The end of one run of `ranks`, for any thread.

    coming: ranks that have not joined, whose end says nothing about the run
    """

    def __init__(self, ranks: Iterable[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.ranks, self.clock = set(ranks), clock
        self.coming: set[int] = set()
        self.left: dict[int, str] = {}
        self.errors: dict[int, Error] = {}
        self.lost: dict[int, Error | None] = {}  # ranks lost without ending the run
        self.outlives: Callable[[], bool] = lambda: False  # the run survives a lost rank
        self.unwatched: Error | None = None  # a non-finite loss that ended the run
        self.asked = False
        self._told = False  # ranks must leave within a step
        self._since = self._moved = 0.0  # stop requested; last step of any rank
        self._release = self._until = float("inf")
        self._waiting: float | None = None  # since when only unjoined ranks remain
        self._phases: dict[int, str] = {}  # each rank's last reported state
        self._steps: dict[int, int] = {}
        self._lengths: dict[int, float] = {}  # longest recent step, in seconds
        self._lock = threading.Lock()

    # -- events

    def heard(self, rank: int, status: dict[str, Any]) -> None:
        self._lengths[rank] = float(status.get("step_s") or 0.0)
        self._phases[rank] = str(status["state"])
        self.at(rank, int(status["step"]))
        if status["over"]:
            self.gone(rank, status["state"] if status["state"] in FINAL else "failed")

    def at(self, rank: int, step: int) -> None:
        if step > self._steps.get(rank, -1):
            self._steps[rank], self._moved = step, self.clock()

    def gone(self, rank: int, state: str) -> None:
        """Records that a rank left. Its first report counts."""
        with self._lock:
            if self.left.setdefault(rank, state) == "done" and self._ended_after(rank, self.errors.get(rank)):
                self.lost[rank] = self.errors.pop(rank)
                if not self.errors:
                    self._release = float("inf")

    def _ended_after(self, rank: int, error: Error | None) -> bool:
        """Whether an engine ended after its rank's last step, which is no failure."""
        return self.left.get(rank) == "done" and error is not None and error["type"] == "EngineDied"

    def failed(self, rank: int, error: Error) -> None:
        """Records a rank's error. Its first report counts."""
        with self._lock:
            if rank in self.errors:
                return
            now = self.clock()
            if rank in self.coming:
                self.lost.setdefault(rank)
                self.ranks.discard(rank)
            if self._ended_after(rank, error):
                self.lost.setdefault(rank)
            if rank in self.lost:
                self.lost[rank] = self.lost[rank] or {"t": now, **error}
                return
            self.errors[rank] = {"t": now, **error}
            wait = REUNION if self.outlives() else 0.0 if error["type"] == "EngineDied" else REPORT
            self._release = min(self._release, now + wait)

    def admit_ranks(self, new: Iterable[int]) -> None:
        with self._lock:
            self.ranks |= set(new)
            self.coming |= set(new)

    def note_joined(self, members: Iterable[int]) -> None:
        """Records the training ranks. One may have died before the kernel heard of its joining."""
        with self._lock:
            new = self.coming & set(members)
            self.coming -= new
            self.ranks |= new
            died = {rank: error for rank in new if (error := self.lost.pop(rank, None))}
        for rank, error in died.items():
            self.failed(rank, error)

    def note_outlived(self, gone: Iterable[int], step: int) -> None:
        """Records that the run continues without these ranks from `step`, possibly an earlier one."""
        with self._lock:
            self._steps = {rank: min(at, step) for rank, at in self._steps.items()}
            self.ranks -= set(gone)
            self.coming -= set(gone)
            self.lost |= {rank: self.errors.pop(rank, None) or self.lost.get(rank) for rank in gone}
            if not self.errors:
                self._release = float("inf")

    def forget_ranks(self, ranks: Iterable[int]) -> None:
        with self._lock:
            self.lost |= {rank: self.errors.pop(rank) for rank in ranks}

    # -- orders

    def note_stop(self) -> None:
        self.asked = True
        self._since = self.clock()

    def note_abort(self) -> None:
        self._told = True
        self._until = min(self._until, self.clock() + self._find_patience(LEAVE))

    def restart_waits(self) -> None:
        """Restarts the waits, because ranks receive earlier orders only now."""
        if self.asked:
            self._since = self.clock()
        if self._told:
            self._until = self.clock() + self._find_patience(LEAVE)

    # -- what is due

    @property
    def is_unwanted(self) -> bool:
        return self.asked and self.clock() - self._since > FIRST

    @property
    def dead_ranks(self) -> set[int]:
        return {r for r, e in {**self.lost, **self.errors}.items() if e and e["type"] == "EngineDied"}

    @property
    def living_ranks(self) -> set[int]:
        return self.ranks - self.dead_ranks

    @property
    def awaited_ranks(self) -> set[int]:
        return self.living_ranks - set(self.left)

    @property
    def is_near(self) -> bool:
        return bool(self.asked or self._told or self.errors or self.left)

    def next_action(self) -> str:
        """Returns what is due: "over", "give up", "abort", or ""."""
        now = self.clock()
        if not self.awaited_ranks:
            return "over"
        if now > self._until:
            return "give up"
        if not self._told and (now > min(self._release, self._boundary_limit()) or self._only_coming(now)):
            return "abort"
        return ""

    def _only_coming(self, now: float) -> bool:
        """Whether only uninvited ranks remain: the run made its last step, or every trained rank has died."""
        uninvited = {self._phases.get(rank) for rank in self.awaited_ranks} == {"waiting"}
        if not (self.awaited_ranks <= self.coming and (uninvited or "done" in self.left.values())):
            self._waiting = None
            return False
        self._waiting = self._waiting if self._waiting is not None else now
        return now - self._waiting > LEAVE  # their invitation may be on its way

    def _boundary_limit(self) -> float:
        """Returns until when a stop awaits a boundary. See [Note: How long a stop takes]."""
        if not self.asked:
            return float("inf")
        begun = any(step > 0 for step in self._steps.values())
        patience = self._find_patience(LEAST if begun else FIRST)
        return min(max(self._since, self._moved) + patience, self._since + max(MOST, patience))

    def _find_patience(self, least: float) -> float:
        return max(least, STEPS * max(self._lengths.values(), default=0.0))

    def find_outcome(self) -> tuple[str, list[Error]]:
        """Returns (done, stopped, preempted or failed; the errors).

        After a stop, neither a peer's closed connection is a failure, nor a rank's death before the ranks agreed to
        continue. A death after a rank's last step is one if it caused all errors.
        """
        errors = [e for e in self.errors.values() if not (self.asked and (is_consequence(e) or self._was_outlived(e)))]
        if errors and all(map(is_consequence, errors)):
            errors += self._list_late_deaths()
        if errors and not self.asked:
            errors += [_make_released(rank, step) for rank, step in self._list_released()]
        if self.unwatched is not None:
            errors.insert(0, self.unwatched)
        if errors:
            preempted = any(error["type"] == "Preempted" for error in errors)
            return "preempted" if preempted else "failed", errors
        states = {self.left.get(rank, "stopped") for rank in self.ranks - self.coming}
        if states == {"done"}:
            return "done", []
        return ("failed" if states == {"failed"} and not self.asked else "stopped"), []

    def _was_outlived(self, error: Error) -> bool:
        """Whether a rank died, and another trained rank could continue until the stop."""
        stopped = {rank for rank in self.ranks - self.coming if self.left.get(rank) == "stopped"}
        return error["type"] == "EngineDied" and self.outlives() and bool(stopped)

    def _list_late_deaths(self) -> list[Error]:
        """Returns the deaths of ranks after their last step. Other ranks may have lost a peer because of one."""
        return [e for r, e in sorted(self.lost.items()) if r in self.ranks and self._ended_after(r, e) and e]

    def _list_released(self) -> list[tuple[int, int]]:
        """Returns (rank, step) of ranks that left unaware of the failure."""
        left = sorted(r for r, state in self.left.items() if state == "stopped" and r not in self.errors)
        return [(rank, self._steps.get(rank, 0)) for rank in left]


def _make_released(rank: int, step: int) -> Error:
    return {"rank": rank, "step": step, "op": "", "type": "Left", "text": "was told to leave", "consequence": True}
