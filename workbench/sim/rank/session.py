"""One run on one virtual rank: the training loop as a coroutine, with the engine's rules.

Before each step it applies the changes that are due; then it steps and evaluates. It sends requests to its host as Ops,
like a strategy.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.host.checkpoint.saving import Saving
from workbench.host.core.rate import Rate
from workbench.host.elastic.rollback import Rollback
from workbench.host.elastic.voting import Next
from workbench.host.loop import meeting
from workbench.host.memory.counted import Counted
from workbench.host.memory.ledger import Ledger
from workbench.host.observe.evaluating import Evaluated
from workbench.host.observe.finite import Finite
from workbench.host.observe.measuring import Measuring
from workbench.host.passes.narrowing import Narrowing
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.steering import Steering
from workbench.host.sharding.reading import Reading
from workbench.host.sharding.trial import Trial
from workbench.host.sharding.usage import Usage
from workbench.host.transfer import residual
from workbench.host.transfer.momentum import stilled
from workbench.rank import Bucket, Op
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.host import Host
from workbench.sim.model.evaluation import taken
from workbench.sim.model.known import Known
from workbench.sim.rank.evaluate import known_evaluated, mean_evaluated
from workbench.sim.rank.mortal import Mortal
from workbench.tasks import at_rate, rate

if TYPE_CHECKING:
    from workbench.sim.clock.world import World


class Session(Mortal):
    """A run on one virtual rank. Changes use part of it (`host/transfer/views.py`).

    member: this rank's number in the run
    """

    def __init__(self, world: World, index: int, experiment: Experiment, body: Any, before: Session | None = None,
                 to: Next | None = None) -> None:  # fmt: skip
        """before: the same rank in the generation before; to: how this generation begins, if it is not the first"""
        self.world, self.body, self.member = world, body, world.members[index]
        self.host = Host(world, index, experiment, body)
        self.rank, self.flow = self.host.rank, self.host.flow
        self.rank.density = (world.costs and world.costs.density) or self.rank.density
        self.rank.lr = experiment.lr or rate(body.optimizer)
        self.rate, self.planned = Rate(experiment, body.optimizer), list(world.planned)
        if to is not None:
            self.come(before, to)
        self.steering = self.host.steering = before.steering if before else Steering(self)
        self.steering.run = self
        self.stepped: Callable[[int], None] = before.stepped if before else lambda steps: None  # gets the step count
        self.state: Any = None
        self.measuring = Measuring()
        self.rollback = self.host.rollback = Rollback(self) if world.mortal else None
        self.saving = Saving(self, world.keeper and world.keeper.of(self), world.saved and world.saved(index))
        self.narrowing = self.host.narrowing = body.narrowing = Narrowing(
            body.model, body.learner, self._made_for, lambda: self.experiment, lies=world.real
        )
        self.ledger = self.host.ledger = body.ledger = Ledger(self, self._counts(), body.away)
        self.reading = self.host.reading = body.reading = Reading(self, None, listens=world.real)
        self.finite = body.finite = Finite(self, self.alarmed, before.finite.first if before else None)
        self.background: Fiber | None = None
        self.host.ended = self._ended
        self._awaiting: Fiber | None = None  # waits until workers or the background end
        self._workers = 0
        body.examples = lambda: self.experiment.batch
        if world.real:
            body.memory = self.rank.memory
            body.step_now = lambda: self.rank.step
            body.usage, body.strategy_now = self.host.usage, self.host.strategy
            self.host.usage.lie(body.model, body.layout)
            body.stepped = lambda: stilled(body.layout, body.optimizer, self.rank.memory)
        if to is not None:
            return self.begin_again()
        self.set_fabric(None, experiment)
        residual.begin(self)
        self.choose_lane()

    def _counts(self) -> Any:
        """Returns the source of this rank's memory figures."""
        if self.world.real:
            drawn = self.body.batches
            return Counted(self, self.body.opened, lambda: drawn.nbytes, part=lambda: self.narrowing.trained)
        return Known(self.body, lambda: self.experiment.batch)

    def _made_for(self, params: list[Any]) -> Any:
        """Returns the run's optimizer for these parameters, at the present learning rate, without state."""
        optimizer = self.body.made(self.experiment, params)
        at_rate(optimizer, self.rank.lr)
        return optimizer

    # -- the loop of a rank --

    async def live(self) -> None:
        """Runs the whole training on this rank."""
        said = {"host": "simulated", "device": "cpu" if self.world.real else "sizes only",
                "parameters": self.layout.numel, "nbytes": self.layout.nbytes}  # fmt: skip
        if (many := self.world.size // self.world.first) > 1:
            said["stands_for"] = many
        self.mark("start", said)
        changes.note_idle(self)
        if self.saving.saved is not None:
            self.saving.saved.begin(self)
        self.enter(None, self.experiment)
        await super().live()

    @property
    def ended(self) -> bool:
        return self.world.over

    @property
    def drawn(self) -> int:
        return int(self.body.taken)

    @property
    def met(self) -> bool:
        return self.host.met

    @property
    def called_for(self) -> int:
        return self.world.due

    async def finish(self) -> None:
        self.say("done")
        self.ends("done")

    async def make(self) -> int:
        host, strategy, clock = self.host, self.experiment.strategy, self.host.clock
        host.met = False
        began, made = clock.now, None
        if strategy.workers > 1:
            await self._all_workers()
        else:
            made = await Op("drive", self.finite.step(self.measuring.step(self)))
        if (costs := self.world.costs) is not None and costs.between:
            await Op("stand", costs.between)
        if said := host.pace_said():
            self.mark("pace", said)
        host.span("step", type(strategy).__name__, began, began, clock.now, 0)
        self.stepped(self.rank.step + (made or 1))
        if losses := self.body.losses:
            host.note("loss", loss := sum(losses) / len(losses))
            losses.clear()
            self.finite.told(self.rank.step, loss)
        return made or 1

    @property
    def usage(self) -> Usage:
        return self.host.usage

    @property
    def reorders(self) -> bool:
        return bool(self.body.to_learn)

    @property
    def shown(self) -> Trial | None:
        return None if self.world.real else self.body.trial

    async def learned(self) -> list[str]:
        return await self.agreed(self.body.learned())

    async def agreed(self, names: list[str]) -> list[str]:
        """The order that the first of the ranks with the same part of the model has seen; it waits for nobody."""
        op = Op("told", "agree on an order", names)
        op.group = self.rank.replicas.within
        found: list[str] = await op
        return found

    async def relay_in(self, names: list[str]) -> None:
        await self.relay(partial(self.body.learn, names))
        self.mark_buckets()

    def moved(self, made: int) -> None:
        self.host.rounds.moved()

    async def _all_workers(self) -> None:
        """Runs the step on every worker of this rank, and waits for all of them."""
        strategy, rank = self.experiment.strategy, self.rank
        self._workers = strategy.workers
        for worker in range(strategy.workers):
            mine = type(rank)(rank.id, rank.size)
            mine.__dict__.update(rank.__dict__, worker=worker, _groups={})
            Fiber(self.host, strategy.step(mine, self.state), f"worker {worker}", f"worker {worker} ").resume(None)
        if self._workers:
            await Op("park", self._await, "its workers")

    async def called(self) -> bool:
        """Returns whether a meeting takes place now. An idle rank waits for one. See the engine's meeting."""
        world, strategy, step = self.world, self.experiment.strategy, self.rank.step
        if world.missed:
            await Op("park", lambda fiber: None, "those who are left")
        due = bool(self.due)
        if strategy.lockstep:
            return due
        idle = meeting.idle(self.experiment, self.rank)
        propagation = strategy.propagation_in(self.rank.size, step)
        if idle:
            world.done.add(self.rank.id)
            self.host.rounds.idle()
            if len(world.done) == self.rank.size:
                world.over = True
                world.call(step)
        if not world.wanted and self.usage.found():
            world.want()
        while True:
            if self.rank.id == 0 and (due or world.wanted) and world.meets < 0:
                world.call(meeting.named(self.experiment, self.rank, self.state))
            if world.meets >= 0 and (not propagation or step == world.meets or idle):
                return True
            if not idle:
                return False
            await Op("park", world.listen, "a meeting or the end")

    async def assemble(self) -> None:
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
        await self.rest()
        await self.gather(0)

    async def rest(self) -> None:
        self.host.rounds.idle()
        self.host.leaving = True
        if self.background is not None:
            await Op("park", self._await, "its background")
        self.host.leaving = False

    def go_on(self) -> None:
        """Starts the background, at the beginning or after a meeting."""
        strategy = self.experiment.strategy
        if self.background is not None or not strategy.has_background or self.world.over:
            return
        host = self.host
        host.leaving = host.rounds.is_idle = False
        self.background = Fiber(host, strategy.background(self.rank, self.state), "background", "background ")
        self.background.lane = host.lane("background ")
        host.clock.at(host.clock.now, self.background)

    async def mean_evaluated(self) -> Evaluated:
        lasts = costs.evaluate if (costs := self.world.costs) else 0.0
        found: Evaluated = await Op("together", "evaluate", self.body, self._mean, lasts)
        self._count_evaluation(together=True)
        return found

    def _mean(self, bodies: list[Any]) -> list[Evaluated]:
        return mean_evaluated(bodies) if self.world.real else [({}, None)] * len(bodies)

    async def known_evaluated(self, known: list[Bucket]) -> Evaluated:
        found = known_evaluated(self.body, known, self.rank.id == 0) if self.world.real else ({}, None)
        self._count_evaluation(together=False)
        return found

    def _count_evaluation(self, together: bool) -> None:
        """Counts the memory of an evaluation, if each rank has memory of its own."""
        if self.ledger.looks and (nbytes := taken(self, together, self.body.evaluated())) is not None:
            self.ledger.evaluated(nbytes)

    def _await(self, fiber: Fiber) -> None:
        self._awaiting = fiber

    def _ended(self, fiber: Fiber) -> None:
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
