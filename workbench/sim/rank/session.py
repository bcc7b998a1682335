"""One run on one virtual rank: the training loop as a coroutine, with the engine's rules.

Before each step it applies the changes that are due; then it steps and evaluates. It sends requests to its host as Ops,
like a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.host.checkpoint.saving import Checkpointer
from workbench.host.core.rate import Rate
from workbench.host.elastic.rollback import Rollback
from workbench.host.elastic.voting import NextGeneration
from workbench.host.loop import asynchronous
from workbench.host.memory.account import MemoryAccount
from workbench.host.memory.memory_counts import RealMemoryCounts
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.evaluating import Evaluated
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.policy_runner import PolicyRunner
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.sharding.unsharder import Unsharder
from workbench.host.sharding.usage import ParameterUsage
from workbench.host.transfer import residual
from workbench.host.transfer.momentum import subtract_gradients
from workbench.rank import Bucket, Op
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.host import Host
from workbench.sim.model.evaluation import count_evaluation_bytes
from workbench.sim.model.known_memory import KnownMemory
from workbench.sim.rank.evaluate import evaluate_known, evaluate_mean
from workbench.sim.rank.mortal import MortalRank
from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


class Session(MortalRank):
    """A run on one virtual rank. Changes use part of it (`host/transfer/views.py`).

    member: this rank's number in the run
    """

    def __init__(
        self,
        world: VirtualWorld,
        index: int,
        experiment: Experiment,
        body: Any,
        before: Session | None = None,
        to: NextGeneration | None = None,
    ) -> None:
        """before: the same rank in the generation before; to: how this generation begins, if it is not the first"""
        self.world, self.body, self.member = world, body, world.members[index]
        self.host = Host(world, index, experiment, body)
        self.rank, self.flow = self.host.rank, self.host.flow
        self.rank.density = (world.costs and world.costs.density) or self.rank.density
        self.rank.lr = experiment.lr or rate(body.optimizer)
        self.rate, self.planned = Rate(experiment, body.optimizer), list(world.planned)
        if to is not None:
            self.enter_generation(before, to)
        self.steering = self.host.steering = before.steering if before else PolicyRunner(self)
        self.steering.run = self
        self.stepped: Callable[[int], None] = before.stepped if before else lambda steps: None  # gets the step count
        self.state: Any = None
        self.measuring = CompressionErrorProbe()
        self.rollback = self.host.rollback = Rollback(self) if world.mortal else None
        self.saving = Checkpointer(
            self, world.keeper and world.keeper.make_writer(self), world.saved and world.saved(index)
        )
        self.narrowing = self.host.narrowing = body.narrowing = SubModelTraining(
            body.model, body.learner, self._make_for, lambda: self.experiment, lies=world.real
        )
        self.ledger = self.host.ledger = body.ledger = MemoryAccount(self, self._make_counts(), body.away)
        self.reading = self.host.reading = body.reading = Unsharder(self, None, listens=world.real)
        self.finite = body.finite = NonFiniteGuard(self, self.handle_alarm, before.finite.first if before else None)
        self.background: Fiber | None = None
        self.host.ended = self._handle_end
        self._awaiting: Fiber | None = None  # waits until workers or the background end
        self._workers = 0
        body.examples = lambda: self.experiment.batch
        if world.real:
            body.memory = self.rank.memory
            body.step_now = lambda: self.rank.step
            body.usage, body.strategy_now = self.host.usage, self.host.strategy
            self.host.usage.take_layout(body.model, body.layout)
            body.stepped = lambda: subtract_gradients(body.layout, body.optimizer, self.rank.memory)
        if to is not None:
            return self.begin_generation()
        self.set_fabric(None, experiment)
        residual.start_compressor(self)
        self.choose_lane()

    def _make_counts(self) -> Any:
        """Returns the source of this rank's memory figures."""
        if self.world.real:
            drawn = self.body.batches
            return RealMemoryCounts(
                self, self.body.list_open, lambda: drawn.nbytes, part=lambda: self.narrowing.own_params
            )
        return KnownMemory(self.body, lambda: self.experiment.batch)

    def _make_for(self, params: list[Any]) -> Any:
        """Returns the run's optimizer for these parameters, at the present learning rate, without state."""
        optimizer = self.body.make_optimizer(self.experiment, params)
        at_rate(optimizer, self.rank.lr)
        return optimizer

    # -- the loop of a rank --

    async def train_from_start(self) -> None:
        """Runs the whole training on this rank."""
        said = {"host": "simulated", "device": "cpu" if self.world.real else "sizes only",
                "parameters": self.layout.element_count, "nbytes": self.layout.byte_count}  # fmt: skip
        if (many := self.world.size // self.world.first) > 1:
            said["stands_for"] = many
        self.mark("start", said)
        changes.mark_idle_faults(self)
        if self.saving.saved is not None:
            self.saving.saved.begin_restore(self)
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
    def called_count(self) -> int:
        return self.world.due

    async def finish_run(self) -> None:
        self.set_phase("done")
        self.mark_end("done")

    async def step_strategy(self) -> int:
        host, strategy, clock = self.host, self.experiment.strategy, self.host.clock
        host.met = False
        began, made = clock.now, None
        if strategy.workers > 1:
            await self._run_workers()
        else:
            made = await Op("drive", self.finite.guard_step(self.measuring.measure_step(self)))
        if (costs := self.world.costs) is not None and costs.between:
            await Op("stand", costs.between)
        if said := host.take_pace_news():
            self.mark("pace", said)
        host.span("step", type(strategy).__name__, began, began, clock.now, 0)
        self.stepped(self.rank.step + (made or 1))
        if losses := self.body.losses:
            host.note("loss", loss := sum(losses) / len(losses))
            losses.clear()
            self.finite.check_step_loss(self.rank.step, loss)
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
        """The order that the first of the ranks with the same part of the model has seen; it waits for nobody."""
        op = Op("told", "agree on an order", names)
        op.group = self.rank.replicas.within
        found: list[str] = await op
        return found

    async def reorder_parameters(self, names: list[str]) -> None:
        await self.share_again(partial(self.body.reorder_parameters, names))
        self.mark_buckets()

    def note_steps(self, made: int) -> None:
        self.host.rounds.note_step()

    async def _run_workers(self) -> None:
        """Runs the step on every worker of this rank, and waits for all of them."""
        strategy, rank = self.experiment.strategy, self.rank
        self._workers = strategy.workers
        for worker in range(strategy.workers):
            mine = type(rank)(rank.id, rank.size)
            mine.__dict__.update(rank.__dict__, worker=worker, _groups={})
            Fiber(self.host, strategy.step(mine, self.state), f"worker {worker}", f"worker {worker} ").resume(None)
        if self._workers:
            await Op("park", self._store_waiting, "its workers")

    async def check_meeting(self) -> bool:
        """Returns whether a meeting takes place now. An idle rank waits for one. See the engine's meeting."""
        world, strategy, step = self.world, self.experiment.strategy, self.rank.step
        if world.missed:
            await Op("park", lambda fiber: None, "those who are left")
        due = bool(self.due_count)
        if strategy.lockstep:
            return due
        idle = asynchronous.is_idle(self.experiment, self.rank)
        propagation = strategy.propagation_in(self.rank.size, step)
        if idle:
            world.done.add(self.rank.id)
            self.host.rounds.note_idle()
            if len(world.done) == self.rank.size:
                world.over = True
                world.call_meeting(step)
        if not world.wanted and self.usage.list_unfrozen():
            world.request_meeting()
        while True:
            if self.rank.id == 0 and (due or world.wanted) and world.meets < 0:
                world.call_meeting(asynchronous.choose_meeting_step(self.experiment, self.rank, self.state))
            if world.meets >= 0 and (not propagation or step == world.meets or idle):
                return True
            if not idle:
                return False
            await Op("park", world.add_listener, "a meeting or the end")

    async def assemble_ranks(self) -> None:
        """Waits for all ranks, and for their backgrounds to end."""
        world = self.world

        def joint(steps: list[int]) -> list[None]:
            world.latest, world.meets = max(steps), -1
            world.done.clear()
            world.wanted = False
            world.due = sum(c.at_step <= steps[0] for c in self.planned)
            return [None] * len(steps)

        propagation = self.experiment.strategy.propagation_in(world.size, self.rank.step)
        await Op("together", "meet between steps", self.rank.step, joint, 0.0)
        if propagation and self.rank.role == "server":  # a server makes no steps of its own
            self.rank.step = world.latest
        await self.await_background()
        await self.gather(0)

    async def await_background(self) -> None:
        self.host.rounds.note_idle()
        self.host.leaving = True
        if self.background is not None:
            await Op("park", self._store_waiting, "its background")
        self.host.leaving = False

    def start_background(self) -> None:
        """Starts the background, at the beginning or after a meeting."""
        strategy = self.experiment.strategy
        if self.background is not None or not strategy.has_background or self.world.over:
            return
        host = self.host
        host.leaving = host.rounds.is_idle = False
        self.background = Fiber(host, strategy.background(self.rank, self.state), "background", "background ")
        self.background.lane = host.open_lane("background ")
        host.clock.resume_at(host.clock.now, self.background)

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
        """Counts the memory of an evaluation, if each rank has memory of its own."""
        if (
            self.ledger.is_evaluation_measured
            and (nbytes := count_evaluation_bytes(self, together, self.body.measure_evaluation())) is not None
        ):
            self.ledger.note_evaluation(nbytes)

    def _store_waiting(self, fiber: Fiber) -> None:
        self._awaiting = fiber

    def _handle_end(self, fiber: Fiber) -> None:
        """Handles the end of a worker or of the background."""
        if fiber.waiter is not None:
            fiber.waiter.resumed = self.host.clock.now
            return fiber.waiter.resume(fiber.value)
        if fiber is self.background:
            self.background = None
        elif fiber.origin.startswith("worker"):
            self._workers -= 1
        if self._awaiting is not None and not self._workers and (not self.host.leaving or self.background is None):
            waiting, self._awaiting = self._awaiting, None
            waiting.on = None
            waiting.resume(None)
