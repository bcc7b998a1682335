"""One run under way, as the kernel sees it: takes rows in, answers changes, notices the end, brings errors home.

Two threads feed it: the relay hands over batches, and its own watch looks at the engines. It does not know how
engines are started, nor how anything is shown.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import cloudpickle

from workbench.cluster import last_rows, spool
from workbench.cluster.attention import Attention, texts
from workbench.cluster.changes import Changes, PendingChange
from workbench.cluster.cluster import Cluster
from workbench.cluster.ending import Ending
from workbench.cluster.gaps import Gaps
from workbench.cluster.place import ClusterError
from workbench.cluster.steady import Steady
from workbench.cluster.waiting import wait_for_run
from workbench.cluster.watch import Watch
from workbench.cluster.wire import Batch
from workbench.record.run import FINAL, Run

UNWATCHED = (
    "the loss is {loss}, and the run was ended, for nobody watches it who could take something back and go on; lower "
    "the learning rate, or let it pause: lab.run(..., on_nan='pause')"
)


class NotFinite(NamedTuple):
    """A rank's loss was not finite."""

    t: float
    rank: int
    step: int
    loss: str


class Live:
    """Drives and follows one run. `state` is one of starting, running, paused, stopping, stopped, done, failed.

    watched: asked when a loss is not finite: does anybody see the run, so that it is to pause and not to end?
    """

    def __init__(
        self, run: Run, cluster: Cluster, changes: Changes, generation: str, watched: Callable[[], bool] = lambda: True
    ) -> None:
        self.run, self.cluster, self.changes, self.generation = run, cluster, changes, generation
        self.watched = watched
        self.ranks = range(changes.experiment.ranks)
        self.began_with = changes.experiment
        self.state = "starting"
        self.step = 0
        self.loss: float | None = None
        self.notes: list[str] = []  # what the person should read, newest last
        self.error: BaseException | None = None
        self.status: dict[int, dict[str, Any]] = {}
        self.spools: dict[int, str] = {}
        self.ending = Ending(self.ranks)
        self._nan: NotFinite | None = None  # the first since the run began, or went on
        self._resumed = float("-inf")  # when that was
        self._pauses = True  # does it pause the run?
        self._orders: queue.Queue[tuple[Any, ...]] = queue.Queue()
        self.gaps = Gaps(dict(run._following), self._missed, self._append)
        self._lock = threading.RLock()
        self.over = threading.Event()
        self.attention = Attention(run, self.ranks, self.notes)
        run.live, run._control = True, self

    # -- rows come in (the relay's thread)

    def take(self, batch: Batch) -> None:
        """Puts a batch into the run, in order and without gaps."""
        if batch.generation == self.generation:
            self.gaps.put(batch)

    def _append(self, kind: str, rank: int, seq: int, columns: dict[str, Any]) -> None:
        new = self.run.append(kind, rank, seq, columns)
        if not new:
            return
        self.attention.row(kind, rank, columns)
        if kind == "marks":
            skip = len(columns["rank"]) - new
            named = zip(columns["step"], columns["t"], texts(columns["name"]), columns["detail"], strict=True)
            for step, t, name, detail in named:
                if skip <= 0:
                    self._mark(rank, int(step), float(t), name, json.loads(detail))
                skip -= 1
        elif kind == "spans":
            self.ending.at(rank, int(columns["step"][-1]))
            self.step = max(self.step, int(columns["step"][-1])) if rank == 0 else self.step
        elif kind == "samples" and rank == 0:
            valued = zip(texts(columns["name"]), columns["value"], strict=True)
            self.loss = next((v for n, v in valued if n == "loss"), self.loss)

    def replay(self) -> None:
        """Takes in what the record already says: for a kernel that attaches."""
        for name in ("change", "refused", "policy", "not saved", "data", "state", "error", "nan", "end"):
            for step, t, detail in self.run.details(name):
                self._mark(int(detail.get("rank", 0)), step, t, name, detail)
        spans = self.run.timeline.spans.rows()
        self.step = int(spans.step.max()) if len(spans) else 0

    @property
    def holdup(self) -> str:
        """Which ranks hold the run up right now, in words; "" if none does."""
        return self.attention.holdup

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

    def _mark(self, rank: int, step: int, t: float, name: str, detail: dict[str, Any]) -> None:
        if name == "change":
            self.changes.applied(step, detail)
        elif name == "refused":
            self.changes.refused(detail)
        elif name == "state" and detail["state"] not in FINAL:
            self._forget(t, detail["state"])
            if not (self.state == "stopping" and detail["state"] in ("running", "paused")):
                self.state = detail["state"]
        elif name == "error":
            self.ending.failed(rank, detail)
        elif name in ("stood still", "spool"):
            self.attention.mark(rank, step, name, detail)
        elif name == "end":
            self.ending.gone(rank, detail["state"])
        elif name in ("policy", "not saved", "data") and detail.get("text") not in (None, *self.notes):
            self.notes.append(detail["text"])
        elif name == "nan":
            self._not_finite(NotFinite(t, rank, step, detail.get("loss", "nan")))

    def _forget(self, t: float, state: str) -> None:
        """A run that goes on has left behind what was not finite before."""
        if state == "running":
            self._resumed = max(self._resumed, t)
            self._nan = self._nan if self._nan and self._nan.t > t else None

    def _not_finite(self, found: NotFinite) -> None:
        """The first loss that is not finite pauses the run, or ends it where nobody would go on."""
        if found.t < self._resumed:
            return
        known, self._nan = self._nan, min(found, self._nan or found)
        if known is None:
            self._pauses = self.watched()
            if self._pauses:
                self.order("request", request={"id": "nan", "kind": "pause"})
            else:
                self._stop()
        if self._nan != known:  # rows of several ranks come in any order
            does = "the run pauses" if self._pauses else "nobody watches, so the run ends"
            text = f"rank {found.rank}'s loss was {found.loss} at step {found.step}, before any other's; {does}"
            self.notes[:] = [n for n in self.notes if "before any other's" not in n] + [text]
            about = {"rank": found.rank, "step": found.step, "op": "", "type": "FloatingPointError"}
            self.ending.unwatched = None if self._pauses else {**about, "text": UNWATCHED.format(loss=found.loss)}

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
            self.note(failure)
            if rest.get("request", {}).get("kind") == "stop":  # nobody else would hear of it: they are told to leave
                self.free()

    def note(self, failure: Exception) -> None:
        """Says, once in a row, what went wrong here."""
        text = str(failure) if isinstance(failure, ClusterError) else f"{type(failure).__name__}: {failure}"
        if text not in self.notes[-5:]:
            self.notes.append(text)

    def _carry(self) -> None:
        try:
            order = self._orders.get(timeout=0.5)
        except queue.Empty:
            return
        self._send(*order)

    def begun(self) -> None:
        """The sessions are there: what was asked meanwhile goes out in order, and the watch begins."""
        self.ending.begun()
        self.attention.begun()
        Steady("run orders", self._carry, self.over, self.note).start()
        Watch(self).start()

    def set(self, path: str, value: Any) -> PendingChange:
        """Asks for a change of one knob; classes that the engines do not have go to all of them first."""
        return self.changes.ask(path, value, self._send_change)

    def whereabouts(self) -> str:
        """Where each rank was when it last said so, in words."""
        ranks = [f"rank {r} at step {s['step']} in {s['busy'] or 'nothing'}" for r, s in sorted(self.status.items())]
        return ", ".join([f"the run is {self.state}", *ranks, *self.notes[-3:]])

    def _send_change(self, asked: PendingChange, new: list[type]) -> None:
        asked.whereabouts = self.whereabouts
        if new:
            self.order("learn", everyone=True, blob=cloudpickle.dumps(new))
        self.order("request", request={"kind": "change", **asked.change.plain()})

    def stop(self) -> None:
        """Stops at the next step boundary; asked again, aborts. Never a failure of the run.

        Where no boundary comes, the ranks are told to leave in the middle of a step, and the engine of a rank that does
        not leave is ended; a note says which and where it stood, and the next run gets new engines. All this takes less
        than 30 s, or seven times the longest step where steps last longer than 3 s. See [Note: How long a stop takes].
        """
        if self.state == "stopping":
            return self.abort()
        self._stop()

    def _stop(self) -> None:
        self.state = "stopping"
        self.ending.stop()
        self.order("request", request={"id": "stop", "kind": "stop"})
        self.order("hurry", everyone=True)

    def abort(self) -> None:
        """Leaves at once, on every rank."""
        self.state = "stopping"
        self.ending.stop()
        self.free()

    def free(self) -> None:
        """Tells all ranks to leave in the middle of a step."""
        self.ending.abort()
        self.order("abort", everyone=True, asked=self.ending.asked)

    def wait(self, timeout: float | None = None) -> Run:
        """Waits for the end, with a line of progress; raises RankError if ranks failed. See `waiting`."""
        return wait_for_run(self, timeout)

    # -- the end

    def leave(self, why: str) -> None:
        """From now on the run is not followed here, whatever becomes of it."""
        if not self.over.is_set():
            self.changes.end(why)
            self.run.live = False
            self.notes.append(why)
            self.over.set()

    def end(self, state: str, error: BaseException | None = None) -> None:
        """Marks the run as over, in `state`; its record says the same."""
        with self._lock:
            if self.over.is_set():
                return
            self.state, self.error = state, error
            if error:
                self.notes.append(f"{type(error).__name__}: {error}")
            try:
                last_rows.final(self, state, error)
            except Exception as failure:  # a full disk must not keep it from being over
                self.note(failure)
            self.changes.end("the run ended before it could be applied")
            self.run.live = False
            self.over.set()
