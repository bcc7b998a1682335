"""One run on one rank: the training loop in its own thread, answerable while it trains.

It meets its peers once per step or round to learn of changes (see ticket.py), applies them between steps, and
leaves in words when something goes wrong. It knows nothing of clusters, sockets or notebooks.
"""

from __future__ import annotations

import json
import queue
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from workbench import changes, measuring
from workbench.engine.changes import Turnable, adopt
from workbench.engine.collectives import Aborted, Leaving, Wire, host_store, peer_left
from workbench.engine.evaluate import evaluate
from workbench.engine.host import Host
from workbench.engine.recorder import Recorder
from workbench.engine.setup import able, set_up
from workbench.engine.shaping import Clock, Naps
from workbench.engine.ticket import Tickets
from workbench.experiment import Experiment
from workbench.knobs import Change, KnobError, in_words
from workbench.ops import Rank


class Session(Turnable):
    """A run as one rank lives it. Constructing costs nothing; `start` returns at once."""

    def __init__(
        self, experiment: Experiment, *, rank: int, size: int, store: tuple[str, int], generation: str,
        epoch: float, run_dir: Path | None = None, push: Callable[..., None] | None = None,
        changes: tuple[Change, ...] = (), device: str = "cpu", kind: str = "gloo", loopback: bool = True,
    ) -> None:
        self.experiment = experiment.checked()
        self.rank = Rank(rank, size, experiment.seed)
        self.generation, self.device, self.kind, self.loopback = generation, device, kind, loopback
        self.clock = Clock(epoch)
        self.naps = Naps(self.clock)
        self.record = Recorder(rank, run_dir, push)
        self.planned = sorted(changes, key=lambda c: c.at_step)
        self.leaving = Leaving()
        self.state: Any = None  # what the strategy remembers
        self.phase = "starting"
        self.error: dict[str, Any] | None = None
        self.paused, self.credit, self.stopping = False, 0, False
        self._asked = threading.Event()  # a person asked for an abort
        self.pending_pause, self.flushing, self.measuring = 0.0, 0, measuring.Measuring()
        self.model: Any = None
        self.optimizer: Any = None
        self.host: Host | None = None
        self.wires: list[Wire] = []
        self.boards: list[Path] = []  # files of this run that rank 0 removes at the end
        self.meeting: Any = None
        self.where = store
        self.tickets: Tickets | None = None
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=f"rank {rank} training", daemon=True)

    host_store = staticmethod(host_store)

    # -- asked from outside --

    def start(self) -> None:
        self._thread.start()

    def request(self, what: dict[str, Any]) -> None:
        """A change, pause, resume, step or stop, on rank 0; it travels with the next ticket."""
        self.inbox.put(what)

    def hurry(self) -> None:
        """A stop was asked: no more emulated delays; a collective that does not end is left."""
        self.naps.hurried = True
        threading.Thread(target=self._release, args=(self.rank.step,), daemon=True).start()

    def abort(self, asked: bool = False) -> None:
        """Leave at once; the peers are freed, too. asked: by a person, so that it is no failure."""
        self.naps.hurried = True
        if asked:
            self.stopping = True
            self._asked.set()
        self.leaving.set()
        self._cut()

    def _cut(self) -> None:
        for wire in self.wires:
            wire.cut()
        if self.host is not None:
            self.host.post.cut()

    def join(self, timeout: float | None = None) -> bool:
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def status(self) -> dict[str, Any]:
        busy = (self.host.lane.busy or self.host.op) if self.host else ""
        return {"state": self.phase, "step": self.rank.step, "busy": busy, "error": self.error}

    def _release(self, step: int) -> None:
        while not self.join(0.6):
            if self.rank.step == step:
                self.stopping = True
                self.abort()
                return
            step = self.rank.step

    # -- the thread --

    def _live(self) -> None:
        try:
            set_up(self)
            self._train()
        except Aborted:
            self._say("stopped" if self.stopping else "failed", f"left in the middle of step {self.rank.step}")
        except BaseException as error:
            self._fail(error)
        finally:
            self._tear_down()

    def restart_data(self) -> None:
        self.batches.restart(self.experiment.batch, self.experiment.seed, self.rank.step)

    def _train(self) -> None:
        self._cpu = time.process_time()
        evaluate(self, together=True)
        self._say("running")
        self.meeting.go_on()
        while True:
            self._boundary()
            strategy = self.experiment.strategy
            at_last = 0 < self.experiment.steps <= self.rank.step
            if self.stopping or self.meeting.over or (at_last and strategy.lockstep):
                if strategy.lockstep and strategy.can_settle:
                    self.host.drive(strategy.settle(self.rank, self.state))
                return self._say("stopped" if self.stopping else "done")
            before = self.rank.step
            if self.rank.role == "trainer":  # a server comes here for changes only
                self._step()
            if self.experiment.evaluates(before, self.rank.step):
                evaluate(self, together=self.experiment.strategy.lockstep)

    def _step(self) -> None:
        host, strategy = self.host, self.experiment.strategy
        host.met = strategy.opaque
        self.lane.step = self.rank.step
        if self.pending_pause:
            self._freeze()
        self.rate.follow(self)
        began = self.clock.now()
        made = host.drive(self.measuring.step(self)) or 1
        host.watch.settle()
        self.record.span(self.rank.step, "step", type(strategy).__name__, began, began, self.clock.now(), 0)
        loss = host.mean_loss()
        self.record.sample(self.rank.step, "loss", self.clock.now(), loss)
        if loss != loss or loss in (float("inf"), float("-inf")):
            self._not_finite(loss)
        if self.flushing and host.met:
            host.drive(changes.flushed(self))
        if (names := host.learned_order()) is not None:
            adopt(self, names)
        self.before_update()
        self.rank.step += made
        if self.credit:
            self.credit = max(0, self.credit - made)
            self.paused = self.credit == 0

    def _freeze(self) -> None:
        began = self.clock.now()
        self.naps.until(began + self.pending_pause)
        self.pending_pause = 0.0
        self.mark("fault", {"text": f"stood still for {self.clock.now() - began:.1f} s"})

    def before_update(self) -> None:
        if self.host.met and not self.tickets.asked and self.tickets.rung(self.lane.completed):
            self.tickets.ask()

    # -- between steps --

    pocket: list[dict[str, Any]] | None = None

    def _boundary(self) -> None:
        apart = self.meeting.apart
        if apart:
            if not self.meeting.called():
                return
            self.meeting.assemble()
        for change in self.meeting.take_planned():
            self._turn({"kind": "turn", "id": f"planned {change.at_step}", "path": change.path, "value": change.value})
        if self.pocket is not None:
            requests, self.pocket = self.pocket, None
            self._obey(requests)
        elif apart or self.tickets.asked or self.rank.step == 0 or self.control is None:
            if not self.tickets.asked:
                self.tickets.ask()
            self._obey(self.tickets.take())
        if self.paused and not self.stopping:
            self._say("paused")
            while self.paused and not self.stopping:
                self.tickets.ask(wait=0.5)
                self._obey(self.tickets.take())
            self._say("stopping" if self.stopping else "running")
        if apart or self.meeting.apart:
            self.meeting.go_on()

    def _obey(self, requests: list[dict[str, Any]]) -> None:
        for what in requests:
            match what["kind"]:
                case "turn":
                    self._turn(what)
                case "pause":
                    self.paused, self.credit = True, 0
                case "resume":
                    self.paused, self.credit = False, 0
                case "step":
                    self.paused, self.credit = False, int(what.get("n", 1))
                case "stop":
                    self.stopping = True

    def _turn(self, what: dict[str, Any]) -> None:
        about = {k: what.get(k) for k in ("id", "path", "value", "requested_at")}
        try:
            wanted = able(self, self.experiment.turn(what["path"], what["value"]))
        except KnobError as reason:
            if self.rank.index == 0:
                self.mark("refused", {**about, "reason": str(reason)})
            return
        self.lane.step = self.rank.step
        self.host.drive(changes.apply(self, wanted))
        if self.rank.index == 0:
            self.mark("change", {**about, "text": f"{what['path']} = {in_words(what['value'])}"})

    def _not_finite(self, loss: float) -> None:
        self.mark("nan", {"loss": str(loss)})
        if self.rank.index == 0:
            self.inbox.put({"kind": "pause", "id": "nan"})

    # -- saying --

    def mark(self, name: str, detail: dict[str, Any]) -> None:
        self.record.mark(self.rank.step, name, self.clock.now(), json.dumps(detail))

    def mark_buckets(self) -> None:
        """The buckets as they are now, in bytes each, into rank 0's record."""
        if self.rank.index == 0:
            self.mark("buckets", {"nbytes": [b.nbytes for b in self.layout.buckets]})

    def _say(self, phase: str, detail: str = "") -> None:
        self.phase = phase
        if self.rank.index == 0:
            self.mark("state", {"state": phase, "detail": detail})

    def _fail(self, error: BaseException) -> None:
        consequence = peer_left(error)
        if consequence and not self.stopping:  # a peer left: if it was told to, so are we, any moment now
            self._asked.wait(0.4)
        if self.stopping and self.naps.hurried:
            return self._say("stopped", f"left in the middle of step {self.rank.step}")
        op = (self.host.lane.busy or self.host.op) if self.host else "set-up"
        self.error = {
            "rank": self.rank.index, "step": self.rank.step, "op": op, "type": type(error).__name__,
            "text": str(error), "traceback": "".join(traceback.format_exception(error)),
            "consequence": consequence,
        }
        error.__traceback__ = None  # a kept traceback keeps the dead group's sockets open
        self.mark("error", self.error)
        self._say("failed", self.error["text"])
        if self.meeting is not None:
            self.meeting.retire()
        self._cut()

    _cpu = 0.0

    def _count_cost(self) -> None:
        """What this rank's process and its recorder cost, in CPU seconds, into the record."""
        now, step = self.clock.now(), self.rank.step
        self.record.sample(step, "cpu_process", now, time.process_time() - self._cpu)
        self.record.sample(step, "cpu_recording", now, self.record.cpu_seconds)

    def _tear_down(self) -> None:
        if self.host is not None:
            self._count_cost()
            self.leaving.set()  # whatever still waits beside this thread
            if self.meeting is not None:
                self.meeting.leave()
            self.host.forget_hooks()
            self.leave_opaque()
            self.lane.close()
            self.tickets.close()
            self.host.post.close()
        for wire in self.wires:
            wire.close()
        self.store = None
        for path in self.boards if self.rank.index == 0 else ():
            path.unlink(missing_ok=True)
        self.record.close()
