"""The fields of one rank's part in a run, and how a generation replaces them."""

from __future__ import annotations

import json
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from workbench.engine.collectives.shaping import Clock, PacedSleep
from workbench.engine.collectives.wire import Aborted, LeaveEvent, Wire, connect_store
from workbench.engine.control import membership
from workbench.engine.rank.children import ChildProcesses
from workbench.engine.rank.training import RankTraining
from workbench.engine.record.recorder import Recorder
from workbench.engine.record.step_profiler import StepProfiler
from workbench.experiment import Experiment
from workbench.host.elastic.leaving import StateBefore
from workbench.host.elastic.voting import NextGeneration, RankReport
from workbench.rank import Rank
from workbench.settings import Change, Json

GENERATION_FIELDS = (
    "rank",
    "members",
    "generation",
    "voting",
    "began_with",
    "used",
    "training",
    "report",
    "outlives_next",
)


class FormingGeneration:
    """The next generation of one rank, until it has formed.

    to:    how it begins
    place: this rank's place in it; None: this rank is not needed and only waits
    former_fields: the session's values of GENERATION_FIELDS
    state: this rank's former state; None for a new rank, and until the ranks have met
    marks: rows of the record that count only if the generation forms
    """

    def __init__(self, session: SessionState, to: NextGeneration) -> None:
        members = to.membership.members
        self.to, self.began = to, session.clock.now()
        self.place = members.index(session.member) if session.member in members else None
        self.former_fields = {name: getattr(session, name) for name in GENERATION_FIELDS}
        self.state: StateBefore | None = None
        self.marks: list[tuple[int, str, float, str]] = []
        self.name = f"{session.run_id}+{session.generation_number}"

    def keep_state(self, before: RankTraining) -> None:
        self.state = StateBefore(before, self.to)

    def open_store(self, session: SessionState, timeout: float = 60.0) -> Any:
        return connect_store(*session.store_address, self.name, timeout)

    def await_ranks(self, session: SessionState, what: str) -> None:
        """Waits until all ranks of the next generation have reported `what`. Raises ConnectionError if one is lost."""
        members, see = self.to.membership.members, partial(check_leaving, session)
        membership.await_reports(self.open_store(session), what, self.place, self.to.processes, see, members)


def check_leaving(session: SessionState) -> None:
    """Raises Aborted if this rank must leave."""
    if session.is_ending:
        raise Aborted("told to leave while the ranks that are left were looking for each other")


class SessionState(ABC):
    """One rank's part in a run, as its generations see it.

    training: the loop with all its parts, as soon as every rank has made its own
    member:   this rank's number, the same in all generations; members: the numbers of all members, by place
    run_id:   the run's name in the store, and its first generation's name
    generation_number: how many generations came before
    rank, generation, leaving: of the present generation, which ends when a rank is lost
    voting:   the store in which the members vote; undone: the plan of a next generation that did not form
    report:   this rank's report since it left its generation, until the next has formed
    used:     examples of the data's order that were used up when this generation began
    wires:    open wires; files: the run's files that rank 0 removes at its end
    stopping: whether the run ends before its last step; owns_process: whether a fault may end the process
    """

    def __init__(
        self,
        experiment: Experiment,
        *,
        rank: int,
        size: int,
        store: tuple[str, int],
        run_id: str,
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
        owns_process: bool = False,
    ) -> None:
        self.began_with = experiment.checked()
        self.member, self.members = rank, tuple(range(size))
        self.rank = Rank(rank, size, experiment.seed)
        self.store_address, self.run_id, self.generation, self.secret = store, run_id, run_id, secret
        self.voting = run_id
        self.undone: NextGeneration | None = None
        self.report: RankReport | None = None
        self.used = 0
        self.generation_number = 0
        self.joins, self.owns_process = joins, owns_process
        self.device, self.kind, self.loopback = device, kind, loopback
        self.clock = Clock(epoch)
        self.paced_sleep = PacedSleep(self.clock)
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
        self.setup_began_at = time.monotonic()
        self.wires: list[Wire] = []
        self.files: list[Path] = []
        self.children = ChildProcesses()
        self.training: RankTraining | None = None
        self._end_asked = threading.Event()  # a person wants the end: a lost peer is then no failure
        self._must_leave = False
        self.outlives_next = False  # whether a rank is about to be removed
        self.forming: FormingGeneration | None = None  # the next generation, until it has formed
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run_thread, name=f"rank {rank} training", daemon=True)

    @abstractmethod
    def _run_thread(self) -> None: ...

    @abstractmethod
    def confirm_formed(self) -> None: ...
    @abstractmethod
    def crash_rank(self, mine: bool) -> None: ...
    @abstractmethod
    async def resize_run(self, members: tuple[int, ...], number: str) -> None: ...
    @abstractmethod
    async def remove_preempted(self, members: Sequence[int], number: str) -> None: ...

    @property
    def experiment(self) -> Experiment:
        """The experiment with all changes so far."""
        return self.training.experiment if self.training is not None else self.began_with

    @property
    def set_up_already(self) -> RankTraining:
        if self.training is None:
            raise RuntimeError(f"rank {self.member} is not set up: it has no model yet")
        return self.training

    def make_training(self, before: RankTraining | None = None) -> RankTraining:
        """Waits for the other ranks. Raises an error if this run cannot be trained."""
        self.training = RankTraining(self, before)
        return self.training

    def set_up(self) -> RankTraining:
        """Makes the training, and prepares the first step."""
        training = self.make_training()
        training.begin_training()
        return training

    def request(self, what: dict[str, Any]) -> None:
        """Queues a change, pause, resume, step or stop on rank 0. The next ticket carries it to all ranks."""
        self.inbox.put(what)

    def stop_early(self) -> None:
        self.stopping = True

    def abort(self, asked: bool = False) -> None:
        """Leaves at once, and frees the peers. asked: a person wants this, so it is no failure"""
        self.paced_sleep.hurry()
        if asked:
            self.stopping = True
            self._end_asked.set()
        self._must_leave = True
        self.leaving.set()
        self.cut_connections()

    @property
    def counted_members(self) -> tuple[int, ...]:
        """The ranks to report if they are lost: the members, and ranks with a join that was undone."""
        undone = self.undone.membership.members if self.undone is not None else ()
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

    def mark(self, name: str, detail: Mapping[str, Json], t: float | None = None) -> None:
        """While a generation forms, the training thread's Marks wait until it has formed."""
        row = self.rank.step, name, self.clock.now() if t is None else t, json.dumps(detail)
        forming = self.forming
        if forming is not None and threading.current_thread() is self._thread:
            forming.marks.append(row)
        else:
            self.record.mark(*row)

    def set_phase(self, phase: str, detail: str = "") -> None:
        """Rank 0 records it as the run's state."""
        self.phase = phase
        if self.rank.id == 0:
            self.mark("state", {"state": phase, "detail": detail})

    # -- between two generations --

    def note_joining(self, phase: str) -> None:
        """No record shows a joining rank's phase."""
        self.phase = phase

    def accept_invitation(self, turn: int, planned: list[Change]) -> None:
        self.generation_number, self.planned = turn, planned

    def keep_report(self, report: RankReport) -> None:
        """Until the next generation has formed."""
        self.report = report

    def begin_forming(self, to: NextGeneration) -> FormingGeneration:
        self.generation_number += 1
        self.forming = FormingGeneration(self, to)
        return self.forming

    def end_forming(self) -> FormingGeneration | None:
        """Returns the generation that does not form with this rank."""
        forming, self.forming = self.forming, None
        return forming

    def enter_generation(self, forming: FormingGeneration, rank: Rank, used: int) -> None:
        """Takes the fields of the next generation, whose ranks have met."""
        self.rank, self.members, self.leaving = rank, forming.to.membership.members, LeaveEvent()
        self.generation = self.voting = forming.name
        self.began_with, self.used = forming.to.experiment, used

    def note_formed(self) -> NextGeneration | None:
        """The generation has formed. Returns the plan of an earlier one that did not."""
        undone, self.undone = self.undone, None
        self.forming, self.report, self.outlives_next = None, None, False
        return undone

    def restore_generation(self, forming: FormingGeneration) -> None:
        for name, value in forming.former_fields.items():
            setattr(self, name, value)

    def begin_vote(self, undone: NextGeneration) -> str:
        """Begins a vote after `undone` did not form. Returns the name of the previous vote's store."""
        before, self.voting = self.voting, f"{self.generation} after {self.generation_number}"
        self.undone = self.undone if self.undone and "id" in self.undone.mark else undone
        return before

    def take_wires(self) -> list[Wire]:
        """The caller closes them."""
        wires, self.wires = self.wires, []
        return wires
