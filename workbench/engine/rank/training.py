"""One rank's training loop on the wall clock: the engine's part of workbench/host/loop/rank_loop.py.

Between two steps or rounds, ranks take a due ticket with changes (see control/control_channel.py).
"""

from __future__ import annotations

import json
import os
import platform
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from workbench.engine.collectives.wire import Aborted
from workbench.engine.compute.cpu_seconds import CpuUsage
from workbench.engine.compute.workers import WorkerPool
from workbench.engine.control.script_position import ScriptLine
from workbench.engine.rank.components import RankComponents
from workbench.engine.rank.evaluate import evaluate_known, evaluate_mean
from workbench.engine.rank.model_setup import adopt_order, take_first_names, unwrap_run_model
from workbench.engine.rank.model_view import RankSessionView
from workbench.engine.record.leak_detector import LeakDetector
from workbench.experiment import Experiment
from workbench.host.checkpoint.whole_state import RecoveryCheckpoint
from workbench.host.core.planned_event import Planned
from workbench.host.core.request_answers import KNOWN_KIND, Done, RequestAnswer, remember_answer
from workbench.host.elastic.reentry import Membership
from workbench.host.elastic.voting import NextGeneration
from workbench.host.loop.generation import train_in_generation
from workbench.host.observe.held_out_numbers import Evaluated
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.changes import has_common_step, take_role
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.transfer import residual
from workbench.rank import Bucket, Op
from workbench.record.free_memory import MemoryRelease
from workbench.settings import Change

ANSWERED_KINDS = ("change", "resize")  # their sender waits for an answer
MIN_WAIT_SECONDS = 1e-3  # a shorter wait for the next step gets no row in the record


class RankTraining(RankComponents):
    """The constructor waits for the other ranks, and refuses what cannot be trained here.

    has_begun: whether all state is in place, so that the other ranks could go on if one is lost
    """

    has_begun = False
    _has_evaluated = False  # since the last ticket, all ranks

    def __init__(self, session: RankSessionView, before: RankTraining | None = None) -> None:
        super().__init__(session, before)
        self.step_seconds: deque[float] = deque([0.0], maxlen=16)  # of the last steps
        self.workers = WorkerPool(self)
        self.pending_requests: list[dict[str, Any]] = []  # received and not obeyed yet
        self.known_answers: Done = {}  # answers to recent requests
        self.cost, self.tidy = CpuUsage(session.record, self.clock), MemoryRelease()
        self.growth = LeakDetector(session.member, lambda found: session.mark("memory grows", found))
        self._wait_began: tuple[float, Any] | None = None  # when the wait for the next step began, on both watches

    def begin_training(self) -> None:
        self.set_fabric(None, self.experiment)
        residual.start_compressor(self)
        changes.mark_idle_faults(self)
        if self.checkpointer.saved is not None:
            self.checkpointer.saved.begin_restore(self)
        self.enter_strategy(None, self.experiment)
        if self.experiment.strategy.opaque:
            self.enter_opaque()
        self.choose_lane()
        self.mark_start()

    def mark_start(self) -> None:
        self.mark("start", {
            "host": platform.node(), "pid": os.getpid(), "device": self.session.device, "backend": self.session.kind,
            "torch": torch.__version__, "python": platform.python_version(), "clock_error": self.peers.doubt,
            "clock_offset": self.peers.offset,
            "parameters": self.layout.element_count, "nbytes": self.layout.byte_count,
        })  # fmt: skip

    def locate_script(self) -> ScriptLine | None:
        return self.lead.locate_script()

    @property
    def is_ended(self) -> bool:
        return self.session.stopping or self.meeting.has_ended

    @property
    def drawn_batches(self) -> int:
        return self.batches.taken

    @property
    def has_met(self) -> bool:
        return self.host.met

    @property
    def agreed_due_count(self) -> int:
        return self.meeting.due

    async def train_from_start(self) -> None:
        self.cost.restart_count()
        await super().train_from_start()

    async def train_in_generation(self, came: Membership) -> None:
        self.cost.restart_count()
        await train_in_generation(self, came)

    async def step_strategy(self) -> int:
        host, strategy = self.host, self.experiment.strategy
        self.lane.enter_step(self.rank.step)
        self.session.profiler.begin_step(self.rank.step)
        host.begin_step(strategy.opaque or self._has_ticket_each_step)
        since, began = self.clock.now(), self.lead.find_step_begin()
        made = await self.drive_step(strategy)
        if not made:
            return 0
        host.watch.write_span(self.rank.step, "step", type(strategy).__name__, began, began, host.watch.now(), 0)
        await Op("do", partial(host.timing.close_step, self.non_finite_guard.check_step_loss))
        self.step_seconds.append(self.clock.now() - since)  # includes the host's waits for its chip
        self.session.profiler.end(made)
        self.cost.write_if_due(self.rank.step)
        self.tidy.due()
        self.growth.take_reading(self.rank.step)
        return made

    def end_wait(self) -> Any:
        now, since, self._wait_began = self.host.watch.now(), self._wait_began, None
        if since is None or self.clock.now() - since[0] < MIN_WAIT_SECONDS:
            return now
        self.host.watch.write_span(self.rank.step, "wait", "next step", since[1], since[1], now, 0)
        return since[1]

    @property
    def _has_ticket_each_step(self) -> bool:
        """Whether ranks take a ticket each step, because no meeting of replicas brings requests."""
        size = self.rank.replicas.size
        return bool(self.rank.mesh.inside) and (size == 1 or self.experiment.strategy.propagation(size) > 0)

    @property
    def usage(self) -> ParameterUsage:
        return self.host.usage

    @property
    def has_new_order(self) -> bool:
        return self.host.hooks.knows_order

    async def learn_order(self) -> list[str]:
        return await self.agree_on_order(self.host.hooks.take_order())

    async def agree_on_order(self, names: list[str]) -> list[str]:
        found: list[str] = await Op("do", partial(take_first_names, self, names))
        return found

    async def reorder_parameters(self, names: list[str]) -> None:
        await Op("do", partial(adopt_order, self, names))

    def note_steps(self, made: int) -> None:
        self.before_update()  # if the step made no update
        self.host.end_step()
        if self.credit:
            self.credit = max(0, self.credit - made)
            self.paused = self.credit == 0

    async def crash_rank(self, mine: bool) -> None:
        await Op("do", partial(self.session.crash_rank, mine))

    async def leave(self, strategy: Any) -> None:
        await strategy.leave(self.rank.replicas, self.state)
        self.shared.unshare_parameters()
        self.layout.drop_gradients()

    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None:
        if wanted.strategy.shared:
            self.shared.share_parameters()
        take_role(self, wanted)
        self.state = wanted.strategy.init(self.rank.replicas, self.layout.list_params())
        self.reset_groups()
        self.meeting.enter_strategy()

    def reset_groups(self) -> None:
        for lane in self.host.lanes:
            self.peers.close_wires(lane.wires.forget_groups(self.rank.mesh.generation))
            lane.restart_count()
        flat = self.rank.mesh.flat and not self.rank.mesh.inside
        self.control_channel.enter_strategy(self.experiment.strategy, flat)

    @contextmanager
    def record_switch(self, was: Experiment, wanted: Experiment) -> Iterator[None]:
        """Records a switch as one span. Ranks that fell behind take the latest step."""
        if has_common_step(was):
            self.meeting.note_step(self.rank.step)
        self.rank.step = self.meeting.latest_step
        began, sent = self.now, self.sent_bytes
        self.lane.enter_step(self.rank.step)
        self.host.at(f"switch from {was.strategy} to {wanted.strategy}")
        yield
        self.host.hooks.detach_hooks()
        self.span("switch", type(wanted.strategy).__name__, began, self.sent_bytes - sent)

    def enter_opaque(self) -> None:
        self.trained.wrap_model()

    async def leave_opaque(self) -> None:
        if self.host.parts.fully is not None:
            await self.host.parts.fully.return_state()
        self.unwrap_model()

    def unwrap_model(self) -> None:
        with self.trained.keep_sums():
            unwrap_run_model(self)

    async def drive_step(self, strategy: Any) -> int:
        """Returns how many steps it counts for; 0 if none was made."""
        if strategy.workers > 1:
            self.host.at("workers")
            return await Op("do", self.workers.run_steps) or 1
        return await self.lead.drive_step(self.non_finite_guard.guard_step(self.error_probe.measure_step(self)))

    async def check_ended(self) -> bool:
        return await self.lead.check_loop_end(await super().check_ended())

    async def finish_run(self) -> None:
        await self.lead.finish_loop()
        await self.leave_opaque()
        await Op("do", partial(self.host.timing.catch_up, self.non_finite_guard.check_step_loss))
        await Op("do", self.checkpointer.end)
        self.host.at("wait for all ranks to end", waits=True)
        await Op("do", self.peers.await_ends)
        self.set_phase("stopped" if self.session.stopping else "done")

    def before_update(self) -> None:
        """Asks for the ticket if one is due, so that it overlaps the update."""
        channel = self.control_channel
        if self.host.met and not channel.has_pending:
            if channel.is_due(self.lane.completed) or self.host.lanes.used_other_lane:  # other lanes have no flag
                channel.publish_requests()

    async def evaluate_model(self, together: bool) -> None:
        began = self.now
        self.lane.enter_step(self.rank.step)
        self.host.at("evaluate")
        fully = self.host.parts.fully
        if fully is not None:
            with self.unsharder.run_pass("evaluation"):
                await fully.fetch_values()
        await super().evaluate_model(together)
        if fully is not None:
            fully.free_values()
        self.longest_evaluation = max(self.longest_evaluation, self.now - began)
        self._has_evaluated = together  # requests made during evaluation are obeyed before the next step

    async def evaluate_mean(self) -> Evaluated:
        return await Op("do", partial(evaluate_mean, self))

    async def evaluate_known(self, known: list[Bucket]) -> Evaluated:
        return await Op("do", partial(evaluate_known, self, known))

    def continue_run(self, to: NextGeneration, before: RankTraining | None, former: RecoveryCheckpoint | None) -> None:
        """former: the checkpoint from which the generation goes on, if it does"""
        self.queue.continue_count(to.changes)
        self.has_begun = True
        self.paused, self.credit = to.paused, to.credit
        self.known_answers.update(to.answers)
        if before is not None:
            self.carried = before.take_carried()._replace(former=former)
            self.step_seconds, self.longest_evaluation = before.step_seconds, before.longest_evaluation

    async def place_state(self) -> None:
        await super().place_state()
        self.has_begun = True

    async def confirm_formed(self) -> None:
        await Op("do", self.session.confirm_formed)

    async def make_due_changes(self) -> None:
        self.host.at("between two steps")
        await super().make_due_changes()

    async def check_meeting(self) -> bool:
        return await Op("do", self.meeting.check_meeting)

    async def assemble_ranks(self) -> None:
        await Op("do", self.meeting.assemble_ranks)

    def start_background(self) -> None:
        self.meeting.start_background()

    async def execute_change(self, change: Planned) -> bool:
        self.lane.enter_step(self.rank.step)
        return await self.trained.follow_change(change, super().execute_change(change))

    async def take_requests(self, apart: bool) -> None:
        if self.early_requests is not None:
            requests, self.early_requests = self.early_requests, None
            await self._execute_requests(requests)
        elif apart or self.control_channel.has_pending or self.rank.step == 0 or self.control is None:
            if not self.control_channel.has_pending:
                self.control_channel.publish_requests()
            since, quiet = (self.clock.now(), self.host.watch.now()), not apart
            while self.control_channel.pending_count > self.experiment.partition.ahead(0):
                requests = await Op("do", self.control_channel.take_requests)
                quiet = quiet and not requests
                await self._execute_requests(requests)
            self.control_channel.end_taking()
            self._wait_began = since if quiet and self.rank.step else None
        if self._has_evaluated and not (apart or self.experiment.partition.ahead(0)):
            await self._execute_requests(await Op("do", partial(self._receive_requests, 0.0)))
        self._has_evaluated = False
        if self.paused and not self.session.stopping:
            await Op("do", partial(self.host.timing.catch_up, self.non_finite_guard.check_step_loss))
            self.set_phase("paused")
            self._wait_began = None
            while self.paused and not self.session.stopping:
                await self._execute_requests(await Op("do", partial(self._receive_requests, 0.5)))
            self.set_phase("stopping" if self.session.stopping else "running")

    @property
    def unheeded_requests(self) -> list[dict[str, Any]]:
        """Requests that have left the inbox and that this rank has not obeyed yet."""
        return [*self.pending_requests, *(self.early_requests or []), *self.control_channel.unheard_requests]

    def _receive_requests(self, wait: float) -> list[dict[str, Any]]:
        """Rank 0 waits up to `wait` seconds for a request."""
        if not self.control_channel.has_pending:
            self.control_channel.publish_requests(wait)
        return self.control_channel.take_requests()

    async def _execute_requests(self, requests: list[dict[str, Any]]) -> None:
        requests = self.lead.accept_requests(requests)
        if self.leaving.is_set():  # a run of one rank has no wire that would raise this
            raise Aborted("told to leave")
        self.pending_requests = sorted(requests, key=lambda what: what["kind"] != KNOWN_KIND)
        while self.pending_requests:
            what, self.answer = self.pending_requests[0], None
            if what["kind"] in ANSWERED_KINDS and what.get("id") in self.known_answers:  # a repeated request
                self._answer_again(what["id"])
                del self.pending_requests[0]
                continue
            match what["kind"]:
                case "change":
                    await self.execute_change(Change.read(what))
                case "pause":
                    self.paused, self.credit = True, 0
                case "resume":
                    self.paused, self.credit = False, 0
                    self.non_finite_guard.forget_losses()
                case "step":
                    self.paused, self.credit = False, int(what.get("n", 1))
                    self.non_finite_guard.forget_losses()
                case "resize":
                    await self.session.resize_run(tuple(what["members"]), what.get("id", ""))
                case "preempt" if not self.session.stopping:
                    await self.session.remove_preempted(what["members"], what.get("id", ""))
                case "roll back":
                    await Op("do", partial(self.host.timing.catch_up, self.non_finite_guard.check_step_loss))
                    if not await self.back.restore_checkpoint(int(what.get("step", 0))):
                        self.paused, self.credit = True, 0
                    self.memory_account.recount_standing()
                case kind if kind == KNOWN_KIND:
                    self.answer = RequestAnswer(*what["answer"])
                case "checkpoint":
                    await self.checkpointer.make_checkpoint(asked=True)
                case "stop":
                    self.session.stop_early()
            remember_answer(self.known_answers, what.get("id", ""), self.answer)
            del self.pending_requests[0]
            if what["kind"] == "change":
                self.queue.count_obeyed()
                await self._crash_if_due()

    def _answer_again(self, name: str) -> None:
        """The rank that recorded the answer may be lost with its last rows."""
        if self.rank.id == 0 and (known := self.known_answers[name]):
            answer = RequestAnswer(*known)
            self.record.mark(answer.step, answer.name, answer.t, json.dumps({**answer.detail, "again": True}))

    def close(self) -> None:
        """The session closes the wires."""
        self.lead.close()
        self.cost.write_samples(self.rank.step)
        self.host.watch.record_reached(self.rank.step)
        self.leaving.set()  # for threads that still wait
        self.checkpointer.end(patience=5.0)
        self.meeting.close_background()
        self.host.hooks.detach_hooks()
        self.unwrap_model()
        self.host.lanes.close()
        self.control_channel.close()
        self.host.usage.close_flags()
        self.mailbox.close()
        self.peers.drop_store()
