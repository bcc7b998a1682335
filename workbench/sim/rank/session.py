"""A run on one virtual rank: the training loop as a coroutine, with the engine's rules.

Like a strategy, it sends requests to its host as Ops.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.host.checkpoint.checkpointer import Checkpointer
from workbench.host.checkpoint.whole_state import RecoveryCheckpoint
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.learning_rate import Rate
from workbench.host.core.planned_event import Planned
from workbench.host.elastic.leaving import hand_down_state, make_rank_report, return_to_boundary
from workbench.host.elastic.rollback import Rollback
from workbench.host.elastic.voting import NextGeneration, RankReport
from workbench.host.loop.generation import begin_generation
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.memory.memory_counts import RealMemoryCounts
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.held_out_numbers import Evaluated
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.host.transfer import residual
from workbench.rank import Bucket, Op, Rank
from workbench.settings import Json
from workbench.sim.clock.world import SimulationStopped
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.host import Host
from workbench.sim.model.evaluation_memory import count_evaluation_bytes
from workbench.sim.model.known_memory import KnownMemory
from workbench.sim.model.session_parts import SessionParts
from workbench.sim.rank.changes import Reconfigurable
from workbench.sim.rank.evaluate import evaluate_known, evaluate_mean
from workbench.sim.rank.joining import JoinEvent, end_generation
from workbench.sim.rank.rendezvous import Rendezvous
from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


class Session(Reconfigurable):
    """Changes use part of it (`host/transfer/change_view.py`). member: the rank's number in the run"""

    def __init__(
        self,
        world: VirtualWorld,
        index: int,
        experiment: Experiment,
        body: Any,
        before: Session | None = None,
        to: NextGeneration | None = None,
    ) -> None:
        """before: this rank in the previous generation; to: how this generation begins, None for the first"""
        self.world, self.body, self.member = world, body, world.members[index]
        self.rank = Rank(
            index, world.size, experiment.seed, step=to.membership.step if to else 0,
            lr=before.rank.lr if before else experiment.lr or rate(body.optimizer),
            members=tuple(world.members) if len(world.members) == world.size else (),
            density=world.costs.density if world.costs else None,
        )  # fmt: skip
        self.rate = Rate(experiment, body.optimizer)
        self.queue = ChangeQueue(world.planned, to.changes if to else 0)
        if before is not None and to is not None:
            self._enter_generation(before, to)
        self.policy_runner = before.policy_runner if before else PolicyRunner(self)
        self.policy_runner.follow_rank(self)
        self._report: Callable[[int], None] = before._report if before else lambda steps: None
        self.state: Any = None
        self.error_probe = CompressionErrorProbe()
        self.rollback = Rollback(self) if world.mortal else None
        self.checkpointer = Checkpointer(
            self, world.keeper and world.keeper.make_writer(self), world.saved and world.saved(index)
        )
        self.submodel = SubModelTraining(
            body.model, body.learner, self._make_for, lambda: self.experiment, lies=world.real
        )
        self.memory_account = MemoryAccount(self, self._make_counts(), body.away)
        self.unsharder = Unsharder(self, None, listens=world.real)
        self.non_finite_guard = NonFiniteGuard(
            self, self.handle_alarm, before.non_finite_guard.first if before else None
        )
        self.micros_in_flight = InFlight(
            lambda: body.layout, body.peek_batch, body.list_buffers, body.forget_micros, lambda: self.experiment.steps
        )
        self.meeting = Rendezvous(self)
        usage = ParameterUsage(world.make_unused_flags(index))
        body.begin_generation(
            SessionParts(
                self.rank, self.submodel, self.memory_account, self.unsharder, self.non_finite_guard,
                self.micros_in_flight, usage, lambda: self.experiment,
            )
        )  # fmt: skip
        parts = ComputeParts(
            world, self.rank, experiment, body, self.micros_in_flight, usage, self.policy_runner, self.rollback,
            self.submodel, self.memory_account, self.unsharder,
        )  # fmt: skip
        self.host = Host(parts, self.meeting.handle_end)
        if world.real:
            usage.take_layout(body.model, body.layout)
        if to is not None:
            self.restart_data(to.examples_used)
            return begin_generation(self)
        self.set_fabric(None, experiment)
        residual.start_compressor(self)
        self.choose_lane()

    def _make_counts(self) -> Any:
        if self.world.real:
            drawn = self.body.batches
            return RealMemoryCounts(
                self, self.body.list_open, lambda: drawn.nbytes, part=lambda: self.submodel.own_params
            )
        return KnownMemory(self.body, lambda: self.experiment.batch)

    def _make_for(self, params: list[Any]) -> Any:
        """Returns an optimizer at the present learning rate, without state."""
        optimizer = self.body.make_optimizer(self.experiment, params)
        at_rate(optimizer, self.rank.lr)
        return optimizer

    def report_steps(self, report: Callable[[int], None]) -> None:
        """Calls `report` with the number of steps after each step, also in later generations."""
        self._report = report

    # -- generations --

    def _enter_generation(self, before: Session, to: NextGeneration) -> None:
        """before: this rank in the previous generation"""
        self.rate = before.rate
        hand_down_state(before, self.rank, to)
        self.queue = ChangeQueue(before.queue.planned, to.changes)
        self.carried, self.held_out = before.carried._replace(former=None), before.held_out
        self.body.discard_step()

    def restore_images(self, former: RecoveryCheckpoint) -> None:
        """Lets this rank restore its part of a checkpoint's images."""
        self.carried = self.carried._replace(former=former)

    def leave_generation(self, saved: list[int]) -> RankReport:
        """Undoes the generation's state. saved: steps with checkpoints"""
        if self.common and self.world.real:
            self.body.unshare_memory()
        self.common = False
        parts = return_to_boundary(self)
        return make_rank_report(self, self.member, parts, saved if parts else ())

    async def confirm_formed(self) -> None:
        """All ranks pass at one time, so none crashes before every rank holds the full state."""
        await self.gather(0)
        self.body.forget_order()  # like real ranks, all ranks learn it again, because a new rank lacks it

    async def execute_change(self, change: Planned) -> bool:
        if not isinstance(change, JoinEvent):
            return await super().execute_change(change)
        await end_generation(self, change)
        return False

    # -- the loop of a rank --

    async def train_from_start(self) -> None:
        said = {"host": "simulated", "device": "cpu" if self.world.real else "sizes only",
                "parameters": self.layout.element_count, "nbytes": self.layout.byte_count}  # fmt: skip
        if (many := self.world.size // self.world.first) > 1:
            said["stands_for"] = many
        self.mark("start", said)
        changes.mark_idle_faults(self)
        if self.checkpointer.saved is not None:
            self.checkpointer.saved.begin_restore(self)
        self.enter_strategy(None, self.experiment)
        await super().train_from_start()

    @property
    def is_ended(self) -> bool:
        return self.world.over

    @property
    def drawn_batches(self) -> int:
        return int(self.body.taken_batches)

    @property
    def has_met(self) -> bool:
        return self.host.met

    @property
    def agreed_due_count(self) -> int:
        return self.world.due

    async def finish_run(self) -> None:
        self.set_phase("done")
        self.mark_end("done")

    async def step_strategy(self) -> int:
        host, strategy, clock = self.host, self.experiment.strategy, self.host.clock
        host.begin_step()
        began, made = clock.now, None
        if strategy.workers > 1:
            await self.meeting.run_workers()
        else:
            made = await Op("drive", self.non_finite_guard.guard_step(self.error_probe.measure_step(self)))
        if (costs := self.world.costs) is not None and costs.between:
            await Op("stand", costs.between)
        if said := host.timing.take_pace_news():
            self.mark("pace", said)
        host.span("step", type(strategy).__name__, began, began, clock.now, 0)
        self._report(self.rank.step + (made or 1))
        if losses := self.body.losses:
            host.note("loss", loss := sum(losses) / len(losses))
            losses.clear()
            self.non_finite_guard.check_step_loss(self.rank.step, loss)
        return made or 1

    @property
    def usage(self) -> ParameterUsage:
        return self.host.usage

    @property
    def has_new_order(self) -> bool:
        return bool(self.body.has_new_order)

    @property
    def access_trace(self) -> AccessTrace | None:
        return None if self.world.real else self.body.access_trace

    async def learn_order(self) -> list[str]:
        return await self.agree_on_order(self.body.learn_order())

    async def agree_on_order(self, names: list[str]) -> list[str]:
        """Returns the order of the first rank with this part of the model. That rank does not wait."""
        found: list[str] = await Op("told", "agree on an order", names, group=self.rank.replicas.within)
        return found

    async def reorder_parameters(self, names: list[str]) -> None:
        await self.share_again(partial(self.body.reorder_parameters, names))
        self.mark_buckets()

    def note_steps(self, made: int) -> None:
        self.host.rounds.note_step()

    async def check_meeting(self) -> bool:
        return await self.meeting.check_meeting()

    async def assemble_ranks(self) -> None:
        await self.meeting.assemble_ranks()

    async def await_background(self) -> None:
        await self.meeting.await_background()

    def start_background(self) -> None:
        self.meeting.start_background()

    async def evaluate_mean(self) -> Evaluated:
        lasts = costs.evaluate if (costs := self.world.costs) else 0.0
        found: Evaluated = await Op("together", "evaluate", self.body, self._evaluate_bodies, lasts)
        self._count_evaluation(together=True)
        return found

    def _evaluate_bodies(self, bodies: list[Any]) -> list[Evaluated]:
        return evaluate_mean(bodies) if self.world.real else [({}, None)] * len(bodies)

    async def evaluate_known(self, known: list[Bucket]) -> Evaluated:
        found = evaluate_known(self.body, known, self.rank.id == 0) if self.world.real else ({}, None)
        self._count_evaluation(together=False)
        return found

    def _count_evaluation(self, together: bool) -> None:
        """Counts an evaluation's memory, if each rank has its own memory."""
        if (
            self.memory_account.is_evaluation_measured
            and (nbytes := count_evaluation_bytes(self, together, self.body.measure_evaluation())) is not None
        ):
            self.memory_account.note_evaluation(nbytes)

    # -- ends --

    async def crash_rank(self, mine: bool) -> None:
        if not mine:
            return
        text = f"rank {self.member} crashed before step {self.rank.step}"
        about: dict[str, Json] = {"rank": self.member, "step": self.rank.step, "op": "between two steps",
                                  "type": "Crash", "text": text}  # fmt: skip
        self.mark("error", about)
        self.mark_end("failed")
        await Op("park", self.world.note_crash, "nothing, because it has crashed")

    def mark_end(self, state: str) -> None:
        self.mark("end", {"rank": self.member, "state": state})

    def handle_alarm(self, does: str) -> None:
        """Raises SimulationStopped if the run must stop for a loss that is not finite or has diverged."""
        if does == "stop":
            raise SimulationStopped

    def mark_stopped(self) -> None:
        self.set_phase("stopped")
        self.mark_end("stopped")
