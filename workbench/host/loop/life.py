"""The loop of a rank on either host: boundary, step, evaluation, again.

The loop is a coroutine like a strategy's step, and the same host drives it. Each host implements the abstract methods,
which need a clock, a connection or a person.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

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
from workbench.host.placement.layout import Layout
from workbench.host.placement.spread import Spread
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.steering import Look, Steering
from workbench.host.reconfigure.unfreezing import settle, train_more
from workbench.host.sharding.reading import Reading
from workbench.host.sharding.trial import Trial
from workbench.host.sharding.usage import Usage
from workbench.host.transfer import residual
from workbench.host.transfer.shards import Cut
from workbench.rank import Bucket, Op, Rank
from workbench.settings import Change, Json
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class Life(Outliving, Ordering, Holding):
    """The part of a Session that goes from boundary to boundary. Each `views.py` says what others use of it.

    planned:       future changes, in the order of their steps
    pending_pause: seconds of a fault's pause before this rank's next step
    """

    experiment: Experiment
    rank: Rank
    state: Any  # the strategy's own
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
    _examples = -1  # of the last step, as recorded
    _laid = False  # whether all state is placed for the first step

    if TYPE_CHECKING:  # attributes in the engine, properties in the simulator

        @property
        def learner(self) -> Learner: ...
        @property
        def layout(self) -> Layout: ...
        @property
        def model(self) -> nn.Module: ...
        @property
        def optimizer(self) -> Optimizer: ...

    @property
    def apart(self) -> bool:
        """Whether ranks make steps without a meeting in every round."""
        strategy = self.experiment.strategy
        if self.rank.mesh.inside:  # a replica's stages exchange each batch, and all ranks get each ticket
            return False
        return not strategy.lockstep or strategy.propagation_in(self.rank.size, self.rank.step) > 0

    @property
    def due(self) -> int:
        """The number of planned changes that are due at this rank's step."""
        return sum(change.at_step <= self.rank.step for change in self.planned)

    async def live(self) -> None:
        """Trains from the first evaluation to the last step."""
        await self.lay_out()
        await self.saving.regain()
        self.steering.begin()
        await self.evaluate(together=True)
        self.saving.begin()
        self.say("running")
        self.ledger.stir()
        await self.on()

    async def on(self) -> None:
        """Makes steps and evaluations until the run is over."""
        self.go_on()
        while not await self.over():
            before = self.rank.step
            if not meeting.idle(self.experiment, self.rank):  # an idle rank only takes changes
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
        """Places all sharded state before the first step."""
        await self.share_out(ahead=True)
        self._laid = True
        self.mark_buckets()
        self.ledger.built()

    async def over(self) -> bool:
        """Takes what is due at this boundary. Returns whether this rank has made its last step."""
        await self.come_past()
        e = self.experiment
        return self.ended or (e.strategy.lockstep and 0 < e.steps <= self.rank.step)

    async def boundary(self) -> None:
        """Makes the changes that are due before the next step. Ranks that are `apart` meet for them first."""
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
        while self.due and not self.apart:  # ranks that met late are past their steps
            await self.take([self.planned.pop(0)])
        await self.listen(apart)
        if apart or self.apart:
            self.go_on()

    async def obey(self, change: Change) -> bool:
        """Makes or refuses one change, asks the policy, or makes a checkpoint. Returns whether a change was made."""
        if isinstance(change, Save):
            await self.saving.due(change)
            return False
        if isinstance(change, Look):
            made = await self.steering.look(change)
        else:
            with self.undoable(True):
                made = await self.steering.heeding(change, changes.obey(self, change))
        self.ledger.stir()
        self.saving.plan()
        return made

    async def step(self) -> None:
        """Makes one step, and the work that a step can cause."""
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
                await residual.flushed(self)
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
            await train_more(self, names)
        elif not (self.apart or self.usage.settled or self.usage.step is not None):
            if self.met or self.rank.size == 1:
                await settle(self)

    def _note_examples(self, count: int) -> None:
        """Records the number of this step's examples if it has changed; only on a replica's first rank."""
        first = not self.rank.mesh.inside or self.rank.inside.index == 0
        if first and self.experiment.batch and count != self._examples:
            self._examples = count
            self.sample("examples", count)

    async def evaluate(self, together: bool) -> None:
        """Records the held-out loss, outside step time.

        together: of the mean model, for which all ranks meet; if not, of the parameters that this rank knows
        """
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
        """What some rank has unfrozen joins, if ranks keep a step in common and have not agreed on it in that step."""
        if self.experiment.strategy.lockstep and not self.usage.settled:
            await settle(self)

    async def _caught_up(self) -> None:
        """Makes late updates of earlier steps, while the rate still is the one of their step."""
        strategy = self.experiment.strategy
        if strategy.late_update:
            await strategy.drain(self.rank.replicas, self.state)

    def mark_buckets(self) -> None:
        """Records the size of each bucket in bytes, on rank 0, from the first step on."""
        if self.rank.id == 0 and self._laid:
            self.mark("buckets", {"nbytes": [b.nbytes for b in self.layout.buckets]})

    # -- what a host implements --

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began."""

    @property
    @abstractmethod
    def sent(self) -> int:
        """Bytes that this rank has sent over its links."""

    @property
    @abstractmethod
    def drawn(self) -> int:
        """The number of batches that this rank has drawn."""

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether the run is over, at any step."""

    @property
    @abstractmethod
    def met(self) -> bool:
        """Whether all ranks have exchanged something in this step."""

    @property
    @abstractmethod
    def called_for(self) -> int:
        """The number of planned changes that are due on rank 0, after a meeting."""

    @abstractmethod
    async def make(self) -> int:
        """Makes the strategy's step. Returns the number of steps that it counts for."""

    @abstractmethod
    async def told(self, text: str, by: int = 0) -> str:
        """Broadcasts `text` of rank `by` to every rank."""

    @abstractmethod
    def tuned(self) -> None:
        """Applies new knobs of the partition, without moving the model."""

    @property
    @abstractmethod
    def reorders(self) -> bool:
        """Whether the first exchanged backward has just shown the order of gradients."""

    @abstractmethod
    async def learned(self) -> list[str]:
        """Returns the order of gradients, the same on all ranks that hold the same part of the model."""

    @property
    @abstractmethod
    def usage(self) -> Usage:
        """What this rank's steps use, and what the model has unfrozen."""

    @property
    def shown(self) -> Trial | None:
        """The parameters that a step reads, if the host knows them without its Reading."""
        return None

    @abstractmethod
    async def mean_evaluated(self) -> Evaluated:
        """Returns the held-out numbers of the mean model, on rank 0, and each rank's drift from it."""

    @abstractmethod
    async def known_evaluated(self, known: list[Bucket]) -> Evaluated:
        """Returns the held-out numbers of the parameters in `known`, without waiting for other ranks."""

    @abstractmethod
    async def called(self) -> bool:
        """Returns whether there is a meeting now. An idle rank waits for one."""

    @abstractmethod
    async def assemble(self) -> None:
        """Waits for all ranks, and for the end of their backgrounds."""

    async def listen(self, apart: bool) -> None:
        """Takes the requests of people."""

    async def rest(self) -> None:
        """Waits until the background has ended."""

    async def finish(self) -> None:
        """Reports how the run has ended on this rank."""

    def moved(self, made: int) -> None:
        """Notes that the rank has made `made` steps."""

    @abstractmethod
    def go_on(self) -> None:
        """Starts the background, or starts it again after a meeting."""

    @abstractmethod
    async def gather(self, number: int) -> list[int]: ...
    @abstractmethod
    def foreseen(self, cheaply: bool) -> Trial | None: ...
    @abstractmethod
    def able(self, wanted: Experiment) -> Experiment: ...
    @abstractmethod
    def example(self, wanted: Experiment) -> Any: ...
    @abstractmethod
    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer: ...
    @abstractmethod
    def use_optimizer(self, optimizer: Optimizer) -> None: ...
    @abstractmethod
    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None: ...
    @abstractmethod
    def choose_lane(self) -> None: ...
    @abstractmethod
    def relaid(self, names: set[str], spread: Spread | None, held: bool = True) -> None: ...
    @abstractmethod
    def sharded(self, buckets: Cut | None) -> None: ...
    @abstractmethod
    def restart_data(self, used: int) -> None: ...
    @abstractmethod
    async def rebucket(self, bucket_mb: float) -> None: ...
    @abstractmethod
    def switching(self, was: Experiment, wanted: Experiment) -> AbstractContextManager[None]: ...
    @abstractmethod
    async def leave(self, strategy: Strategy) -> None: ...
    @abstractmethod
    def enter(self, was: Experiment | None, wanted: Experiment) -> None: ...
    @abstractmethod
    def regrouped(self) -> None: ...
    @abstractmethod
    async def leave_opaque(self) -> None: ...
    @abstractmethod
    def enter_opaque(self) -> None: ...

    @abstractmethod
    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        """Records a span from `began` to now."""

    @abstractmethod
    def sample(self, name: str, value: float) -> None: ...
    @abstractmethod
    def mark(self, name: str, detail: Mapping[str, Json]) -> None: ...
    @abstractmethod
    def say(self, phase: str) -> None: ...
