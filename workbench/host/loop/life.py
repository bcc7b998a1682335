"""A rank's life between steps, the same on both hosts: it takes the changes that are due, steps, evaluates, and ends.

A coroutine, as a strategy's step is, and driven by the same host. What only a clock, a wire or a person can say is
asked in the methods that are abstract here; each host has them.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from workbench.experiment import Experiment
from workbench.host.checkpoint.saving import Holding, Save
from workbench.host.core.rate import Rate
from workbench.host.loop import meeting
from workbench.host.loop.ordering import Ordering
from workbench.host.loop.outliving import Outliving
from workbench.host.memory.ledger import Ledger
from workbench.host.observe.evaluating import Evaluated
from workbench.host.observe.finite import Finite
from workbench.host.observe.measuring import Measuring
from workbench.host.passes.flow import Flow
from workbench.host.passes.pipelining import drained
from workbench.host.placement.spread import Spread
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.steering import Look, Steering
from workbench.host.reconfigure.unfreezing import settle, train_more
from workbench.host.sharding.reading import Reading
from workbench.host.sharding.trial import Trial
from workbench.host.sharding.usage import Usage
from workbench.host.transfer import residual
from workbench.rank import Bucket, Op, Rank
from workbench.settings import Change


class Life(Outliving, Ordering, Holding):
    """The part of a Session that goes on from boundary to boundary. `workbench.host.core.changing` is what changes see.

    planned:       changes to come, in the order of their steps
    pending_pause: seconds that a fault lets this rank stand still before its next step
    """

    experiment: Experiment
    rank: Rank
    layout: Any
    state: Any  # what the strategy remembers
    rate: Rate
    measuring: Measuring
    ledger: Ledger
    reading: Reading
    flow: Flow
    steering: Steering
    finite: Finite
    spread: Spread | None = None
    flushing = 0
    pending_pause = 0.0
    _examples = -1  # of the last step, as the record has it
    _laid = False  # has all come to lie where it belongs?

    @property
    def apart(self) -> bool:
        """Do the ranks go on without meeting in every round?"""
        strategy = self.experiment.strategy
        if self.rank.mesh.inside:  # a replica's stages pass each batch on to each other, and all hear each ticket
            return False
        return not strategy.lockstep or strategy.propagation_in(self.rank.size, self.rank.step) > 0

    @property
    def due(self) -> int:
        """How many of the planned changes are due at this rank's step."""
        return sum(change.at_step <= self.rank.step for change in self.planned)

    async def live(self) -> None:
        """From the first evaluation to the last step."""
        await self.lay_out()
        await self.saving.regain()
        self.steering.begin()
        await self.evaluate(together=True)
        self.saving.begin()
        self.say("running")
        self.ledger.stir()
        await self.on()

    async def on(self) -> None:
        """From step to step, to the last."""
        self.go_on()
        while not await self.over():
            before = self.rank.step
            if not meeting.idle(self.experiment, self.rank):  # such a one came here for changes only
                await self.step()
            if self.experiment.evaluates(before, self.rank.step):
                await self._settle_in_step()
                await self.evaluate(together=self.experiment.strategy.lockstep)
        await drained(self.flow)
        await self._settle_in_step()
        await self.rest()
        strategy = self.experiment.strategy
        if strategy.lockstep and strategy.can_drain:
            await strategy.drain(self.rank.replicas, self.state)
        if self.experiment.task.keeps:
            await self.saving.make(asked=False, last=True)
        await self.finish()

    async def lay_out(self) -> None:
        """Before the first step: all that the ranks share out comes to lie where it belongs."""
        await self.share_out(ahead=True)
        self._laid = True
        self.mark_buckets()
        self.ledger.built()

    async def over(self) -> bool:
        """Takes what is due at this boundary. Has this rank then made its last step?"""
        await self.come_past()
        e = self.experiment
        return self.ended or (e.strategy.lockstep and 0 < e.steps <= self.rank.step)

    async def boundary(self) -> None:
        """Makes the changes that are due before the next step; ranks that go on apart come together for them."""
        apart = self.apart
        if apart:
            if not await self.called():
                return
            await self.assemble()
        if apart or self.due:
            await settle(self)
        due = self.called_for if apart else self.due
        taken, self.planned = self.planned[:due], self.planned[due:]
        await self.take(taken)
        while self.due and not self.apart:  # ranks that came together later than that have passed these steps
            await self.take([self.planned.pop(0)])
        await self.listen(apart)
        if apart or self.apart:
            self.go_on()

    async def obey(self, change: Change) -> bool:
        """Makes one change, or refuses it in words; or asks the policy; or makes a checkpoint. Was something made?"""
        if isinstance(change, Save):
            await self.saving.due(change)
            return False
        if isinstance(change, Look):
            made = await self.steering.look(change)
        else:
            with self.undoable(True):
                made = await self.steering.heeding(change, changes.obey(self, change))  # type: ignore[arg-type]
        self.ledger.stir()
        self.saving.plan()
        return made

    async def step(self) -> None:
        """One step and what follows from it."""
        if self.pending_pause:
            seconds, self.pending_pause = self.pending_pause, 0.0
            stood = await Op("stand", seconds)
            self.mark("fault", {"text": f"stood still for {stood:.1f} s"})
        if (due := self.rate.due(self)) != self.rank.lr:
            await self._caught_up()
        self.rate.follow(self, due)
        self.rank.clip = self.experiment.clip
        if self.reads is not None:
            self.reads.at_boundary(self.rank.step)
        with self.undoable():
            self.ledger.begin()
            before = self.drawn
            made = await self.make()
            self.ledger.close()
            self._note_examples((self.drawn - before) * self.experiment.batch)
            if self.flushing and self.met:
                if self.experiment.strategy.in_flight:
                    await self.experiment.strategy.drain(self.rank.replicas, self.state)
                await residual.flushed(self)  # type: ignore[arg-type]
            if self.reading.learning:
                await self.reading.learn(self.shown)
            await self._train_unfrozen()
            if self.reorders:
                await self.reorder(await self.learned())
            self.rank.step += made
        self.steering.steps += 1
        self.moved(made)

    async def _train_unfrozen(self) -> None:
        """A parameter that the model has unfrozen joins, if the ranks have met in this step."""
        if names := list(self.usage.unfrozen):
            await train_more(self, names)  # type: ignore[arg-type]
        elif not (self.apart or self.usage.settled or self.usage.step is not None):
            if self.met or self.rank.size == 1:
                await settle(self)

    def _note_examples(self, count: int) -> None:
        """How many examples this rank's step was about, where that is new; a replica's first rank says it for all."""
        first = not self.rank.mesh.inside or self.rank.inside.index == 0
        if first and self.experiment.batch and count != self._examples:
            self._examples = count
            self.sample("examples", count)

    async def evaluate(self, together: bool) -> None:
        """The held-out loss outside step time: of the mean model, for which ranks meet, or of what this rank knows."""
        await self._caught_up()
        began = self.now
        if together:
            numbers, drift = await self.mean_evaluated()
        else:
            known = await self.experiment.strategy.known(self.rank, self.state)
            numbers, drift = await self.known_evaluated(known or self.layout.params())
        self.span("eval", "evaluate", began)
        if drift is not None:
            self.sample("drift", drift)
        self.held_out = numbers.get("loss", self.held_out)
        for name, value in numbers.items():
            self.sample("held_out" if name == "loss" else f"held_out:{name}", value)

    async def _settle_in_step(self) -> None:
        """All ranks are at the same step, if they keep one in common: what some rank has unfrozen joins."""
        if self.experiment.strategy.lockstep:
            await settle(self)

    async def _caught_up(self) -> None:
        """Every update of the steps so far is made, by the rate of its step."""
        strategy = self.experiment.strategy
        if strategy.late_update:
            await strategy.drain(self.rank.replicas, self.state)

    def mark_buckets(self) -> None:
        """The buckets as they are now, in bytes each, into rank 0's record; once they are those of the first step."""
        if self.rank.id == 0 and self._laid:
            self.mark("buckets", {"nbytes": [b.nbytes for b in self.layout.buckets]})

    # -- what only a host can do or say --

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""

    @property
    @abstractmethod
    def drawn(self) -> int:
        """How many batches this rank has drawn."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Is the run over, whatever step this rank is in?"""

    @property
    @abstractmethod
    def met(self) -> bool:
        """Did all ranks exchange something in the present step?"""

    @property
    @abstractmethod
    def called_for(self) -> int:
        """When ranks have come together: how many of the planned changes are due on rank 0."""

    @abstractmethod
    async def make(self) -> int:
        """The strategy's step; for how many steps it counts."""

    @abstractmethod
    async def told(self, text: str, by: int = 0) -> str:
        """What rank `by` says, on every rank."""

    @abstractmethod
    def tuned(self) -> None:
        """The partition has other knobs than before, and the model lies as it did."""

    @property
    @abstractmethod
    def reorders(self) -> bool:
        """Has the first exchanged backward just shown in which order gradients come?"""

    @abstractmethod
    async def learned(self) -> list[str]:
        """That order, the same on all ranks that hold the same of the model."""

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """What this rank's steps use, and what the model has unfrozen."""

    @property
    def shown(self) -> Trial | None:
        """What this host knows that a step reads, but from its Reading."""
        return None

    @abstractmethod
    async def mean_evaluated(self) -> Evaluated:
        """The held-out numbers of the mean of all ranks' models, on rank 0; how far this rank is from it, on each."""

    @abstractmethod
    async def known_evaluated(self, known: list[Bucket]) -> Evaluated:
        """The same of the parameters in `known`; nobody waits for anybody."""

    @abstractmethod
    async def called(self) -> bool:
        """Is there a meeting now? Waits for one where this rank has nothing else to do."""

    @abstractmethod
    async def assemble(self) -> None:
        """Waits for all ranks, and for their backgrounds to end."""

    async def listen(self, apart: bool) -> None:
        """Takes what people ask meanwhile."""

    async def rest(self) -> None:
        """Lets what runs beside the steps end."""

    async def finish(self) -> None:
        """Says how the run ended on this rank."""

    def moved(self, made: int) -> None:
        """The step has moved on by so many."""

    @abstractmethod
    def go_on(self) -> None:
        """What runs beside the steps begins, or begins again after a meeting."""

    @abstractmethod
    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        """What has lasted since `began` and is over now."""

    @abstractmethod
    def sample(self, name: str, value: float) -> None: ...
    @abstractmethod
    def mark(self, name: str, detail: dict[str, Any]) -> None: ...
    @abstractmethod
    def say(self, phase: str) -> None: ...
