"""One run on one rank, from its thread to its record's last row: it sets up, trains, and gives everything back.

It answers while it trains, and leaves in words when something goes wrong. It knows nothing of clusters, sockets or
notebooks; the loop itself is in training.py.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.engine.compute.at import op_of, status
from workbench.engine.control.membership import Spare, gone
from workbench.engine.control.peers import removed
from workbench.engine.device.gauge import gauge
from workbench.engine.rank.children import Children
from workbench.engine.rank.following import Following
from workbench.engine.rank.forming import Forming
from workbench.engine.rank.generations import live_through
from workbench.engine.rank.keeping import Keeper
from workbench.engine.rank.outliving import refused
from workbench.engine.rank.preempting import Lookout, Preempted, announce
from workbench.engine.rank.training import Training
from workbench.engine.record.profile import Profiler
from workbench.engine.record.pulse import Pulse
from workbench.engine.record.recorder import Recorder
from workbench.engine.script.led import NoSteps
from workbench.engine.wire.collectives import Aborted, Leaving, Wire, connect_store, host_store, of_own, peer_left
from workbench.engine.wire.shaping import Clock, Naps
from workbench.experiment import Experiment
from workbench.experiment.light import lighten
from workbench.host.checkpoint.regain import Regained, regained
from workbench.host.elastic.voting import Next, Said
from workbench.host.placement.layout import Layout
from workbench.rank import Rank
from workbench.record.checkpoints import FOLDER, Bytes, Checkpoint
from workbench.record.run import FINAL
from workbench.settings import Change
from workbench.settings.said import class_of, text_of, traceback_of


class Session:
    """A run as one rank lives it. Constructing costs nothing; `start` returns at once.

    training: the loop with all that it needs, as soon as every rank has made its own
    member:   this rank's number for life; members: by place, those of all who are there
    rank, generation, leaving: of the present generation, which ends when a rank is lost
    voting:   where its members vote who of them is left; undone: how a next generation was to be that did not form
    words:    what this rank had when it left the generation, until the next has formed
    used:     how many examples of the data's order were used up when that began
    wires:    those that are open; files: those of this run that rank 0 removes at its end
    stopping: is the run to end before its last step? ours: may a fault end the process?
    """

    def __init__(
        self, experiment: Experiment, *, rank: int, size: int, store: tuple[str, int], generation: str,
        secret: bytes, epoch: float, run_dir: Path | None = None, push: Callable[..., None] | None = None,
        changes: tuple[Change, ...] = (), device: str = "cpu", kind: str = "gloo", loopback: bool = True,
        joins: bool = False, resume: str = "", ours: bool = False,
    ) -> None:
        self.began_with = experiment.checked()
        self.member, self.members = rank, tuple(range(size))
        self.rank = Rank(rank, size, experiment.seed)
        self.where, self.base, self.generation, self.secret = store, generation, generation, secret
        self.voting = generation
        self.undone: Next | None = None
        self.words: Said | None = None
        self.used = 0
        self.turn = 0  # how many generations there were before this one
        self.joins, self.ours = joins, ours
        self.device, self.kind, self.loopback = device, kind, loopback
        self.clock = Clock(epoch)
        self.naps = Naps(self.clock)
        self.record = Recorder(rank, run_dir, push)
        self.run_dir, self.resume = run_dir, resume
        self.profiler = Profiler(rank, run_dir, device, self.mark)
        self.planned = sorted(changes, key=lambda c: c.at_step)
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.leaving = Leaving()
        self.stopping = False
        self.phase = "starting"
        self.error: dict[str, Any] | None = None
        self.born = time.monotonic()  # when set-up began
        self.wires: list[Wire] = []
        self.files: list[Path] = []
        self.children = Children()
        self.training: Training | None = None
        self._asked = threading.Event()  # a person asked for the end: whoever loses a peer from now on has not failed
        self._told = False  # was it told to leave?
        self.outlives_next = False  # is a rank about to be put out, without whom the others go on?
        self.forming: Forming | None = None  # the next generation, until it has formed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._live, name=f"rank {rank} training", daemon=True)

    host_store = staticmethod(host_store)

    # -- asked from outside --

    def start(self) -> None:
        lighten()
        self._thread.start()

    def request(self, what: dict[str, Any]) -> None:
        """A change, pause, resume, step or stop, on rank 0; it travels with the next ticket."""
        self.inbox.put(what)

    def hurry(self) -> None:
        """A stop was asked: no more emulated delays, and a peer that leaves from now on is no failure."""
        self.naps.hurried = True
        self._asked.set()

    def abort(self, asked: bool = False) -> None:
        """Leave at once; the peers are freed, too. asked: by a person, so that it is no failure."""
        self.naps.hurried = True
        if asked:
            self.stopping = True
            self._asked.set()
        self._told = True
        self.leaving.set()
        self.cut()

    def outlive(self, so: bool) -> str:
        """A rank is about to be put out (or is not), and the others are to go on without it; why they cannot, or ""."""
        reason = refused(self)
        self.outlives_next = so and not reason
        return reason

    def leave_behind(self, members: Sequence[int]) -> None:
        """These are out of reach and nobody can end them: this one goes on without, as where they had died.

        Their word is not waited for in the vote. One that comes back later finds that the others went on.
        """
        here = [self.members.index(m) for m in members if m in self.members and m != self.member]
        store = connect_store(*self.where, self.voting)
        for place in here:
            gone(store, place)
        if here:
            self.cut()

    def preempt(self) -> None:
        """This rank's machine is about to be ended: it leaves after the step in hand, and the others go on."""
        if self.phase == "waiting":  # nobody counts on it yet
            return self.abort(asked=True)
        announce(self)

    @property
    def counted(self) -> tuple[int, ...]:
        """Who is to be named where it is lost: the members, and who was to come when one of them was."""
        undone = self.undone.came.members if self.undone is not None else ()
        return (*self.members, *(m for m in undone if m not in self.members))

    @property
    def ends(self) -> bool:
        """Is this rank to go on in no case?"""
        return self.stopping or self._told or self._asked.is_set()

    def cut(self) -> None:
        """Ends all that is under way with others; they hear of it."""
        for wire in self.wires:
            wire.cut()
        if self.training is not None:
            self.training.mailbox.cut()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end; whether it came. One that has not been started has not ended either."""
        if timeout == 0:
            return self._over.is_set()  # takes no lock: a signal's handler asks, whatever its thread is doing
        return self._over.wait(timeout)

    def status(self) -> dict[str, Any]:
        """Where this rank is. See `at.status`."""
        return status(self)

    # -- looked at from outside: by a cell, or a test --

    @property
    def experiment(self) -> Experiment:
        """As it is now, with the changes so far."""
        return self.training.experiment if self.training is not None else self.began_with

    @property
    def model(self) -> nn.Module:
        return self.set_up_already.model

    @property
    def optimizer(self) -> Any:
        return self.set_up_already.optimizer

    @property
    def layout(self) -> Layout:
        return self.set_up_already.layout

    @property
    def state(self) -> Any:
        """What the strategy remembers."""
        return self.set_up_already.state

    @property
    def set_up_already(self) -> Training:
        if self.training is None:
            raise RuntimeError(f"rank {self.member} is not set up: it has no model yet")
        return self.training

    # -- the thread --

    def _live(self) -> None:
        pulse = Pulse(lambda found: self.mark("stood still", found), f"rank {self.rank.id} pulse", Lookout(self))
        read = gauge(self.device, lambda name, v: self.record.sample(self.rank.step, name, self.clock.now(), v))
        self.born = time.monotonic()
        default = torch.get_default_dtype()
        try:
            with self.children.of_this_thread():
                live_through(self)
        except Spare as spare:
            self.say("stopped", str(spare))
        except NoSteps as end:
            if self.rank.id == 0:
                self.mark("warning", {"text": str(end)})
            self.say("done", str(end))
        except Aborted:
            self.say("stopped" if self.stopping else "failed", f"left in the middle of step {self.rank.step}")
        except BaseException as error:
            self._fail(error)
        finally:
            torch.set_default_dtype(default)  # a task's functions may have set another, which the next run would meet
            pulse.close()
            if read is not None:
                read.close()
            try:
                self.tear_down()
            finally:
                self._over.set()

    def set_up(self) -> Training:
        """Waits for the other ranks; then all stand before their first step. Raises in words what cannot be trained."""
        self.training = (Following if self.began_with.task.leads else Training)(self)
        self.training.begin()
        return self.training

    def keeper(self, training: Any) -> Keeper | None:
        """Who writes its checkpoints."""
        return Keeper(training, Path(self.run_dir) / FOLDER) if self.run_dir is not None else None

    def saved(self) -> Regained | None:
        """What this rank goes on from. Raises RunError where that cannot be read."""
        if not self.resume:
            return None
        checkpoint = Checkpoint.open(self.resume)
        return regained(checkpoint, Bytes(checkpoint), self.rank.id, alone=True)

    def tear_down(self) -> None:
        """Gives everything back; whatever fails on the way, the record's last row says that this rank has left."""
        for give_back in (self._give_back, self.children.end):
            try:
                give_back()
            except Exception:
                self.mark("log", {"stream": "stderr", "text": traceback.format_exc()})
        if self.phase not in FINAL:
            self.say("failed", "its training thread ended without a word")
        self.mark("end", {"rank": self.member, "state": self.phase})
        self.record.close()

    def _give_back(self) -> None:
        if self.training is not None:
            self.profiler.close()
            self.training.close()
        if self.rank.size > 1:
            with contextlib.suppress(RuntimeError):  # rank 0's host keeps the store, and may be gone
                gone(connect_store(*self.where, self.voting, timeout=1.0), self.rank.id)
        for wire in self.wires:
            wire.close()
        if self.rank.id == 0:
            removed(self.files)

    def _fail(self, error: BaseException) -> None:
        text, own = text_of(error), of_own(error)
        consequence = not own and peer_left(error, text)
        if consequence and not self.stopping:  # a peer left: if it was told to, so are we, any moment now
            self._asked.wait(0.4)
        if (self.stopping and self.naps.hurried) or (consequence and self._asked.is_set()):
            return self.say("stopped", f"left in the middle of step {self.rank.step}")
        self.error = {
            "rank": self.member, "step": self.rank.step, "op": op_of(self), "type": class_of(error),
            "text": text, "traceback": traceback_of(error), "consequence": consequence, "own": own,
        }
        BaseException.with_traceback(error, None)  # a kept traceback keeps the dead group's sockets open
        self.mark("error", self.error)
        self.say("preempted" if isinstance(error, Preempted) else "failed", text)
        if self.training is not None:
            self.training.meeting.retire()
        self.cut()

    # -- saying --

    def mark(self, name: str, detail: dict[str, Any], t: float | None = None) -> None:
        """Writes a Mark of the present moment, or of `t`; one of a generation that forms, once it has formed."""
        row = self.rank.step, name, self.clock.now() if t is None else t, json.dumps(detail)
        forming = self.forming
        if forming is not None and threading.current_thread() is self._thread:
            forming.marks.append(row)
        else:
            self.record.mark(*row)

    def say(self, phase: str, detail: str = "") -> None:
        """What this rank is in from now on; of the run, as far as rank 0 says it."""
        self.phase = phase
        if self.rank.id == 0:
            self.mark("state", {"state": phase, "detail": detail})
