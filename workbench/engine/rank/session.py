"""One run on one rank: a thread that sets up, trains, and gives everything back.

A session answers requests while it trains. If it fails, it ends with a reason in words. It uses no cluster, socket or
notebook code.
"""

from __future__ import annotations

import contextlib
import json
import queue
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from workbench.engine.collectives.shaping import Clock, PacedSleep
from workbench.engine.collectives.wire import (
    Aborted,
    LeaveEvent,
    Wire,
    connect_store,
    host_store,
    is_own_error,
    is_peer_loss,
)
from workbench.engine.compute.activity import current_op, describe_rank
from workbench.engine.control.membership import NotNeeded, report_gone
from workbench.engine.control.peers import remove_files
from workbench.engine.device.gpu_monitor import start_gpu_monitor
from workbench.engine.rank.checkpoints import CheckpointWriter
from workbench.engine.rank.children import ChildProcesses
from workbench.engine.rank.forming import FormingGeneration
from workbench.engine.rank.generations import run_generations
from workbench.engine.rank.preempting import Preempted, PreemptionWatch, announce_preemption
from workbench.engine.rank.surviving import explain_refusal
from workbench.engine.rank.training import RankTraining
from workbench.engine.record.recorder import Recorder
from workbench.engine.record.stall_detector import StallDetector
from workbench.engine.record.step_profiler import StepProfiler
from workbench.engine.script.loop import NoSteps
from workbench.experiment import Experiment
from workbench.experiment.compiler_import import put_off_compiler
from workbench.host.checkpoint.restore import RestoredState, open_image
from workbench.host.elastic.voting import NextGeneration, RankReport
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Rank
from workbench.record.checkpoints import FOLDER, Checkpoint, CheckpointFiles
from workbench.record.run import FINAL
from workbench.settings import Change, Json
from workbench.settings.describe_error import class_of, text_of, traceback_of


class Session:
    """One rank's part in a run. The constructor does no work; `start` returns at once.

    training: the loop with all its parts, as soon as every rank has made its own
    member:   this rank's number, the same in all generations; members: the numbers of all members, by place
    rank, generation, leaving: of the present generation, which ends when a rank is lost
    voting:   the store in which the members vote; undone: the plan of a next generation that did not form
    words:    this rank's report since it left its generation, until the next has formed
    used:     how many examples of the data's order were used up when this generation began
    wires:    open wires; files: the run's files that rank 0 removes at its end
    stopping: whether the run ends before its last step; ours: whether a fault may end the process
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        rank: int,
        size: int,
        store: tuple[str, int],
        generation: str,
        secret: bytes,
        epoch: float,
        run_dir: Path | None = None,
        push: Callable[..., None] | None = None,
        changes: tuple[Change, ...] = (),
        device: str = "cpu",
        kind: str = "gloo",
        loopback: bool = True,
        joins: bool = False,
        resume: str = "",
        ours: bool = False,
    ) -> None:
        self.began_with = experiment.checked()
        self.member, self.members = rank, tuple(range(size))
        self.rank = Rank(rank, size, experiment.seed)
        self.where, self.base, self.generation, self.secret = store, generation, generation, secret
        self.voting = generation
        self.undone: NextGeneration | None = None
        self.words: RankReport | None = None
        self.used = 0
        self.turn = 0  # how many generations came before this one
        self.joins, self.ours = joins, ours
        self.device, self.kind, self.loopback = device, kind, loopback
        self.clock = Clock(epoch)
        self.naps = PacedSleep(self.clock)
        self.record = Recorder(rank, run_dir, push)
        self.before_end: Callable[[], None] = lambda: None  # tear_down calls it while the record is still open
        self.run_dir, self.resume = run_dir, resume
        self.profiler = StepProfiler(rank, run_dir, device, self.mark)
        self.planned = sorted(changes, key=lambda c: c.at_step)
        self.inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self.leaving = LeaveEvent()
        self.stopping = False
        self.phase = "starting"
        self.error: dict[str, Any] | None = None
        self.born = time.monotonic()  # when set-up began
        self.wires: list[Wire] = []
        self.files: list[Path] = []
        self.children = ChildProcesses()
        self.training: RankTraining | None = None
        self._end_asked = threading.Event()  # set once a person wants the end: a lost peer is then no failure
        self._must_leave = False
        self.outlives_next = False  # whether a rank is about to be removed
        self.forming: FormingGeneration | None = None  # the next generation, until it has formed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=f"rank {rank} training", daemon=True)

    host_store = staticmethod(host_store)

    def start(self) -> None:
        try:
            put_off_compiler()
            self._thread.start()
        except BaseException:
            self.record.close()  # its thread would stay, and publish rows under the job of another run
            raise

    def request(self, what: dict[str, Any]) -> None:
        """Queues a change, pause, resume, step or stop on rank 0. The next ticket carries it to all ranks."""
        self.inbox.put(what)

    def hurry(self) -> None:
        """Ends emulated delays before a stop. From now on a lost peer is no failure."""
        self.naps.hurried = True
        self._end_asked.set()

    def abort(self, asked: bool = False) -> None:
        """Leaves at once, and frees the peers. asked: a person wants this, so it is no failure."""
        self.naps.hurried = True
        if asked:
            self.stopping = True
            self._end_asked.set()
        self._must_leave = True
        self.leaving.set()
        self.cut_connections()

    def set_outliving(self, so: bool) -> str:
        """Sets whether the other ranks go on after one rank is removed. Returns why they cannot, or ""."""
        reason = explain_refusal(self)
        self.outlives_next = so and not reason
        return reason

    def leave_behind(self, members: Sequence[int]) -> None:
        """Goes on without unreachable `members`, as if they had died.

        The vote does not wait for their reports. A member that comes back later leaves the run.
        """
        here = [self.members.index(m) for m in members if m in self.members and m != self.member]
        store = connect_store(*self.where, self.voting)
        for place in here:
            report_gone(store, place)
        if here:
            self.cut_connections()

    def preempt(self) -> None:
        """Leaves after the current step, because this rank's machine is about to end."""
        if self.phase == "waiting":  # no rank counts on this one yet
            return self.abort(asked=True)
        announce_preemption(self)

    @property
    def counted_members(self) -> tuple[int, ...]:
        """The ranks to report if they are lost: the members, and ranks with a join that was undone."""
        undone = self.undone.came.members if self.undone is not None else ()
        return (*self.members, *(m for m in undone if m not in self.members))

    @property
    def is_ending(self) -> bool:
        """Whether this rank ends in any case, even if the other ranks go on."""
        return self.stopping or self._must_leave or self._end_asked.is_set()

    def cut_connections(self) -> None:
        for wire in self.wires:
            wire.cut_connections()
        if self.training is not None:
            self.training.mailbox.cut_connections()

    def join(self, timeout: float | None = None) -> bool:
        """Waits for the end. Returns whether it came; a session that has not started has not ended."""
        if timeout == 0:
            return self._over.is_set()  # takes no lock: a signal handler calls this in any state of its thread
        return self._over.wait(timeout)

    def status(self) -> dict[str, Any]:
        return describe_rank(self)

    # -- read from outside: by a cell, or a test --

    @property
    def experiment(self) -> Experiment:
        """The experiment with all changes so far."""
        return self.training.experiment if self.training is not None else self.began_with

    @property
    def model(self) -> nn.Module:
        return self.set_up_already.model

    @property
    def optimizer(self) -> Any:
        return self.set_up_already.optimizer

    @property
    def layout(self) -> ParameterLayout:
        return self.set_up_already.layout

    @property
    def state(self) -> Any:
        return self.set_up_already.state

    @property
    def set_up_already(self) -> RankTraining:
        if self.training is None:
            raise RuntimeError(f"rank {self.member} is not set up: it has no model yet")
        return self.training

    def _run_thread(self) -> None:
        pulse = StallDetector(
            lambda found: self.mark("stood still", found), f"rank {self.rank.id} pulse", PreemptionWatch(self)
        )
        read = start_gpu_monitor(
            self.device, lambda name, v: self.record.sample(self.rank.step, name, self.clock.now(), v)
        )
        self.born = time.monotonic()
        default = torch.get_default_dtype()
        try:
            with self.children.collect_started():
                run_generations(self)
        except NotNeeded as spare:
            self.set_phase("stopped", str(spare))
        except NoSteps as end:
            if self.rank.id == 0:
                self.mark("warning", {"text": str(end)})
            self.set_phase("done", str(end))
        except Aborted:
            asked = self.stopping or self._end_asked.is_set()
            self.set_phase("stopped" if asked else "failed", f"left in the middle of step {self.rank.step}")
        except BaseException as error:
            self._report_failure(error)
        finally:
            torch.set_default_dtype(default)  # a task may have set another default, which the next run would inherit
            pulse.close()
            if read is not None:
                read.close()
            try:
                self.tear_down()
            finally:
                self._over.set()

    def set_up(self) -> RankTraining:
        """Waits for the other ranks, and prepares the first step. Raises an error if this run cannot be trained."""
        self.training = RankTraining(self)
        self.training.begin_training()
        return self.training

    def make_writer(self, training: Any) -> CheckpointWriter | None:
        return CheckpointWriter(training, Path(self.run_dir) / FOLDER) if self.run_dir is not None else None

    def open_resumed(self) -> RestoredState | None:
        """Raises RunError if the checkpoint from which this rank resumes cannot be read."""
        if not self.resume:
            return None
        checkpoint = Checkpoint.open(self.resume)
        return open_image(checkpoint, CheckpointFiles(checkpoint), self.rank.id, alone=True)

    def tear_down(self) -> None:
        """Gives everything back, each part even if another fails. The record's last row states that this rank left."""
        parts = (
            self.profiler.stop_profile,
            self._close_training,
            self._report_gone,
            *(wire.close for wire in self.wires),
            self._remove_files,
            self.children.end,
            self.profiler.close,
            self.before_end,
        )
        for give_back in parts:
            try:
                give_back()
            except Exception:
                self.mark("log", {"stream": "stderr", "text": traceback.format_exc()})
        if self.phase not in FINAL:
            self.set_phase("failed", "its training thread ended without a word")
        self.mark("end", {"rank": self.member, "state": self.phase})
        self.record.close()

    def _close_training(self) -> None:
        if self.training is not None:
            self.training.close()

    def _report_gone(self) -> None:
        if self.rank.size > 1:
            with contextlib.suppress(RuntimeError):  # rank 0's host holds the store and may be gone
                report_gone(connect_store(*self.where, self.voting, timeout=1.0), self.rank.id)

    def _remove_files(self) -> None:
        if self.rank.id == 0:
            remove_files(self.files)

    def _report_failure(self, error: BaseException) -> None:
        text, own = text_of(error), is_own_error(error)
        consequence = not own and is_peer_loss(error, text)
        if consequence and not self.stopping:  # the request to leave may follow
            self._end_asked.wait(0.4)
        if (self.stopping and self.naps.hurried) or (consequence and self._end_asked.is_set()):
            return self.set_phase("stopped", f"left in the middle of step {self.rank.step}")
        self.error = {
            "rank": self.member,
            "step": self.rank.step,
            "op": current_op(self),
            "type": class_of(error),
            "text": text,
            "traceback": traceback_of(error),
            "consequence": consequence,
            "own": own,
        }
        BaseException.with_traceback(error, None)  # a kept traceback keeps the dead group's sockets open
        self.mark("error", self.error)
        self.set_phase("preempted" if isinstance(error, Preempted) else "failed", text)
        if self.training is not None:
            self.training.meeting.retire_rank()
        self.cut_connections()

    def mark(self, name: str, detail: Mapping[str, Json], t: float | None = None) -> None:
        """Writes a Mark. While a generation forms, the training thread's Marks wait until it has formed."""
        row = self.rank.step, name, self.clock.now() if t is None else t, json.dumps(detail)
        forming = self.forming
        if forming is not None and threading.current_thread() is self._thread:
            forming.marks.append(row)
        else:
            self.record.mark(*row)

    def set_phase(self, phase: str, detail: str = "") -> None:
        """Sets this rank's phase; rank 0 records it as the run's state."""
        self.phase = phase
        if self.rank.id == 0:
            self.mark("state", {"state": phase, "detail": detail})
