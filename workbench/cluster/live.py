"""One run under way, as the kernel sees it: takes rows in, answers turns, notices the end, brings errors home.

Two threads feed it: the relay hands over batches, and its own watch looks at the engines. It does not know how
engines are started, nor how anything is shown.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle

from workbench.cluster import spool
from workbench.cluster.cluster import Cluster
from workbench.cluster.errors import RankError
from workbench.cluster.gaps import Gaps
from workbench.cluster.place import ClusterError
from workbench.cluster.turns import Turn, Turns
from workbench.cluster.waiting import wait_for_run
from workbench.cluster.wire import Batch
from workbench.run import FINAL, Run
from workbench.timeline import KINDS

LOOK = 0.2  # seconds between two looks at the processes
ASK = 1.0  # seconds between two questions to the sessions
PATIENCE = 3.0  # seconds that ranks have to report or leave once one has failed


class Live:
    """Drives and follows one run. `state` is one of starting, running, paused, stopping, stopped, done, failed."""

    def __init__(self, run: Run, cluster: Cluster, turns: Turns, generation: str) -> None:
        self.run, self.cluster, self.turns, self.generation = run, cluster, turns, generation
        self.ranks = range(turns.experiment.ranks)
        self.began_with = turns.experiment
        self.state = "starting"
        self.step = 0
        self.loss: float | None = None
        self.notes: list[str] = []  # what the person should read, newest last
        self.error: BaseException | None = None
        self.status: dict[int, dict[str, Any]] = {}
        self.spools: dict[int, str] = {}
        self._errors: dict[int, dict[str, Any]] = {}
        self._until = float("inf")  # when ranks that have not left by then are given up
        self._released = False
        self._orders: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self._gaps = Gaps(dict(run._following), self._missed, self._append)
        self._lock = threading.RLock()
        self.over = threading.Event()
        run.live, run._control = True, self

    # -- rows come in (the relay's thread)

    def take(self, batch: Batch) -> None:
        """Puts a batch into the run, in order and without gaps."""
        if batch.generation == self.generation:
            self._gaps.put(batch)

    def _append(self, kind: str, rank: int, seq: int, columns: dict[str, Any]) -> None:
        new = self.run.append(kind, rank, seq, columns)
        if not new:
            return
        if kind == "marks":
            skip = len(columns["rank"]) - new
            for step, name, detail in zip(columns["step"], _texts(columns["name"]), columns["detail"], strict=True):
                if skip <= 0:
                    self._mark(rank, int(step), name, json.loads(detail))
                skip -= 1
        elif kind == "spans" and rank == 0:
            self.step = max(self.step, int(columns["step"][-1]))
        elif kind == "samples" and rank == 0:
            named = zip(_texts(columns["name"]), columns["value"], strict=True)
            self.loss = next((v for n, v in named if n == "loss"), self.loss)

    def replay(self) -> None:
        """Takes in what the record already says: for a kernel that attaches."""
        for name in ("change", "refused", "state", "error", "nan"):
            for step, _, detail in self.run.details(name):
                self._mark(int(detail.get("rank", 0)), step, name, detail)
        spans = self.run.timeline.spans.rows()
        self.step = int(spans.step.max()) if len(spans) else 0

    @property
    def steps_done(self) -> int:
        return self.step + 1 if self.step else 0

    def _missed(self, kind: str, rank: int, start: int) -> spool.Pieces:
        """Rows that no message brought, from the rank's disk."""
        if not self.elsewhere(rank):
            return spool.pieces(Path(self.run.path or "."), kind, rank, start)
        return spool.unpack(self.cluster.line.ask(rank, "rows", kind=kind, start=start)[1])

    def elsewhere(self, rank: int) -> bool:
        """Whether the rank spools to a disk that this kernel does not see."""
        return self.spools.get(rank, str(self.run.path)) != str(self.run.path)

    def _mark(self, rank: int, step: int, name: str, detail: dict[str, Any]) -> None:
        if name == "change":
            self.turns.applied(step, detail)
        elif name == "refused":
            self.turns.refused(detail)
        elif name == "state" and detail["state"] not in FINAL:
            if not (self.state == "stopping" and detail["state"] in ("running", "paused")):
                self.state = detail["state"]
        elif name == "error":
            self._failed(rank, detail)
        elif name == "nan" and not any("before any other" in n for n in self.notes):
            loss = detail.get("loss", "nan")
            self.notes.append(f"rank {rank}'s loss was {loss} at step {step}, before any other's; the run pauses")
            self.order("request", request={"id": "nan", "kind": "pause"})

    # -- orders

    def order(self, what: str, everyone: bool = False, **rest: Any) -> None:
        """Asks rank 0, or everyone, to do something; done in the order asked, once the sessions are there."""
        self._orders.put((what, everyone, rest))

    def _send(self, what: str, everyone: bool, rest: dict[str, Any]) -> None:
        try:
            if everyone:
                self.cluster.line.ask_all(what, timeout=1.0, ranks=self.ranks, **rest)
            else:
                self.cluster.line.ask(0, what, timeout=1.0, **rest)
        except Exception as failure:  # one order that fails must not keep the next from going out
            self._note(failure)

    def _note(self, failure: Exception) -> None:
        text = str(failure) if isinstance(failure, ClusterError) else f"{type(failure).__name__}: {failure}"
        if text not in self.notes[-5:]:
            self.notes.append(text)

    def _carry(self) -> None:
        while not self.over.is_set():
            with contextlib.suppress(queue.Empty):
                self._send(*self._orders.get(timeout=0.5))

    def begun(self) -> None:
        """The sessions are there: what was asked meanwhile goes out in order, and the watch begins."""
        threading.Thread(target=self._carry, name="run orders", daemon=True).start()
        threading.Thread(target=self._watch, name="run watch", daemon=True).start()

    def turn(self, path: str, value: Any) -> Turn:
        """Turns a knob; classes that the engines do not have go to all of them first."""
        return self.turns.ask(path, value, self._send_turn)

    def whereabouts(self) -> str:
        """Where each rank was when it last said so, in words."""
        ranks = [f"rank {r} at step {s['step']} in {s['busy'] or 'nothing'}" for r, s in sorted(self.status.items())]
        return ", ".join([f"the run is {self.state}", *ranks, *self.notes[-3:]])

    def _send_turn(self, turn: Turn, new: list[type]) -> None:
        turn.whereabouts = self.whereabouts
        if new:
            self.order("learn", everyone=True, blob=cloudpickle.dumps(new))
        about = {"id": turn.id, "path": turn.path, "value": turn.value, "requested_at": turn.requested_at}
        self.order("request", request={"kind": "turn", **about})

    def stop(self) -> None:
        """Stops at the next step boundary; a rank that is blocked is released. Asked again, aborts."""
        if self.state == "stopping":
            return self.abort()
        self.state = "stopping"
        self.order("request", request={"id": "stop", "kind": "stop"})
        self.order("hurry", everyone=True)

    def abort(self) -> None:
        """Leaves at once, on every rank."""
        self.state = "stopping"
        self._until = min(self._until, time.monotonic() + PATIENCE)
        self.order("abort", everyone=True, asked=True)

    def wait(self, timeout: float | None = None) -> Run:
        """Waits for the end, with a line of progress; raises RankError if ranks failed. See `waiting`."""
        return wait_for_run(self, timeout)

    # -- the watch (its own thread)

    def _watch(self) -> None:
        asked = 0.0
        while not self.over.is_set():
            try:
                self._look()
                quiet = self.state in ("running", "paused") and not self._errors
                if time.monotonic() - asked > (ASK if quiet else LOOK):
                    asked = time.monotonic()
                    self._ask()
            except Exception as failure:  # a run that nobody watches would never end
                self._note(failure)
            self.over.wait(LOOK)

    def _look(self) -> None:
        for rank in self.ranks:
            if rank not in self._errors and (how := self.cluster.death(rank)):
                last = self.status.get(rank, {})
                step = max(last.get("step", 0), self.step)
                error = {"rank": rank, "step": step, "op": last.get("busy", ""), "text": f"its engine {how}"}
                self._failed(rank, {**error, "type": "EngineDied"})

    def _ask(self) -> None:
        dead = {r for r, e in self._errors.items() if e["type"] == "EngineDied"}
        for rank, answer in self.cluster.line.ask_all("status", timeout=0.8, ranks=set(self.ranks) - dead).items():
            if isinstance(answer, dict) and answer["generation"] == self.generation:
                self.status[rank] = answer
                self._gaps.remind("marks", rank, answer["sent"].get("marks", 0))  # no later one may show a gap
                if answer["error"]:
                    self._failed(rank, answer["error"])
        inside = [r for r in self.ranks if r not in dead and not self.status.get(r, {}).get("over")]
        if self._errors and not self._released and time.monotonic() > self._until - PATIENCE + 0.5:
            self._released = True
            self.order("abort", everyone=True)
        if not inside or time.monotonic() > self._until:
            self.cluster.stuck |= bool(inside)
            self._finish(dead)

    def _failed(self, rank: int, error: dict[str, Any]) -> None:
        with self._lock:
            if rank in self._errors:
                return
            self._errors[rank] = {"t": time.monotonic(), **error}
            self._until = min(self._until, time.monotonic() + PATIENCE)
            if error["type"] == "EngineDied":
                self._released = True
                self.order("abort", everyone=True)

    def _finish(self, dead: set[int]) -> None:
        """All ranks are over: the last rows come in, then the run is what it is."""
        self._last_rows(dead)
        states = {self.status.get(r, {}).get("state") for r in self.ranks}
        if self._errors:
            error = RankError(list(self._errors.values()))
            self._obituary(dead, error)
            self.end("failed", error)
        else:
            self.end("done" if states == {"done"} else "failed" if states == {"failed"} else "stopped")

    def _last_rows(self, dead: set[int]) -> None:
        time.sleep(0.1)  # what was sent last is on its way
        for rank in self.ranks:
            sent = self.status.get(rank, {}).get("sent", {})
            for kind in KINDS:
                self._gaps.mend(kind, rank, sent.get(kind, 0))
            if rank not in dead and self.elsewhere(rank):
                self._fetch(rank)

    def _fetch(self, rank: int) -> None:
        def read(name: str, start: int) -> bytes:
            return self.cluster.line.ask(rank, "file", name=name, start=start)[1]

        spool.fetch(self.cluster.line.ask(rank, "files")[0], read, Path(self.run.path or "."))

    def _obituary(self, dead: set[int], error: RankError) -> None:
        """Writes the end into the record of ranks that could not."""
        now = time.time() - self.run.epoch
        for rank in sorted(dead):
            about = {k: v for k, v in self._errors[rank].items() if k != "t"}
            marks: list[tuple[int, str, float, dict[str, Any]]] = [(about["step"], "error", now, about)]
            if rank == 0:
                marks.append((about["step"], "state", now, {"state": "failed", "detail": str(error)}))
            steps, names, times, details = zip(*marks, strict=True)
            columns = {"rank": [rank] * len(marks), "step": steps, "name": names, "t": times}
            columns["detail"] = [json.dumps(d) for d in details]
            self.run.append("marks", rank, self._gaps.next["marks", rank], columns)
            spool.note(Path(self.run.path or "."), rank, marks)

    def leave(self, why: str) -> None:
        """From now on the run is not followed here, whatever becomes of it."""
        if not self.over.is_set():
            self.turns.end(why)
            self.run.live = False
            self.notes.append(why)
            self.over.set()

    def end(self, state: str, error: BaseException | None = None) -> None:
        """Marks the run as over, in `state`."""
        with self._lock:
            if self.over.is_set():
                return
            self.state, self.error = state, error
            if error:
                self.notes.append(f"{type(error).__name__}: {error}")
            self.turns.end("the run ended before it could be applied")
            self.run.live = False
            self.over.set()


def _texts(column: Any) -> list[str]:
    return [str(t) for t in (column.decode() if hasattr(column, "decode") else column)]
