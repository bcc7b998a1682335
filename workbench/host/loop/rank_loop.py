"""The loop of a rank on either host: boundary, step, evaluation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.host.checkpoint.checkpointer import Checkpointer, CheckpointEvent
from workbench.host.core.change_queue import ChangeQueue
from workbench.host.core.learning_rate import Rate
from workbench.host.core.planned_event import Planned
from workbench.host.core.request_answers import RequestAnswer
from workbench.host.elastic.carried_state import CarriedState
from workbench.host.elastic.rollback import Rollback
from workbench.host.loop import asynchronous
from workbench.host.loop.bucket_order import reorder_buckets, split_state
from workbench.host.loop.evaluation import make_late_updates, record_evaluation
from workbench.host.memory.batches import BatchReader
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.observe.compression_error import CompressionErrorProbe
from workbench.host.observe.held_out_numbers import Evaluated
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.pipelining import drain_pipeline
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.reconfigure import changes
from workbench.host.reconfigure.policy_runner import PolicyRunner, PolicyTick
from workbench.host.reconfigure.unfreezing import agree_in_common_step, agree_on_unfrozen, train_unfrozen_in_step
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.host.transfer import residual
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.rank import Bucket, Op, Rank
from workbench.settings import Change, Json
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class RankLoop(ABC):
    """The part of a rank that goes from boundary to boundary. Each `*_view.py` lists the members that its users need.

    queue:         its planned changes, and the number made so far
    rollback:      the way back to the last boundary; None if no rank is ever lost
    carried:       its own state between 2 generations
    crashing:      ranks that a fault ends at this boundary or the next
    answer:        the result of the last change, the same on every rank
    held_out:      the last held-out loss that this rank knows
    pending_pause: seconds of a fault's pause before this rank's next step
    """

    experiment: Experiment
    rank: Rank
    state: Any  # the strategy's own
    rate: Rate
    error_probe: CompressionErrorProbe
    memory_account: MemoryAccount
    unsharder: Unsharder
    micros_in_flight: InFlight
    policy_runner: PolicyRunner
    non_finite_guard: NonFiniteGuard
    checkpointer: Checkpointer
    queue: ChangeQueue
    rollback: Rollback | None = None
    carried = CarriedState()
    crashing: Collection[int] = frozenset()
    answer: RequestAnswer | None = None
    held_out: float | None = None
    spread: ReplicaSpread | None = None
    flushing = 0
    pending_pause = 0.0
    _examples = -1  # of the last step, as recorded
    _laid = False  # whether state is placed for the first step

    if TYPE_CHECKING:  # the engine has attributes, the simulator properties

        @property
        def learner(self) -> Learner: ...
        @property
        def layout(self) -> ParameterLayout: ...
        @property
        def model(self) -> nn.Module: ...
        @property
        def optimizer(self) -> Optimizer: ...

    @property
    def is_asynchronous(self) -> bool:
        return asynchronous.is_apart(self.experiment, self.rank)

    @property
    def due_count(self) -> int:
        """How many planned changes are due at this rank's step."""
        return self.queue.count_due(self.rank.step)

    def take_carried(self) -> CarriedState:
        carried, self.carried = self.carried, CarriedState()
        return carried

    def adopt_settings(self, wanted: Experiment, step: int) -> None:
        """Trains with other settings from now on. A different rate factor begins before `step`."""
        self.rate.change_factor(self.experiment, wanted, step)
        self.experiment = wanted

    def exchange_by(self, compressor: Compressor, flushing: int = 0) -> None:
        """Exchanges by `compressor` from now on; flushing: the next steps that send an unused residual"""
        self.rank.compressor, self.flushing = compressor, flushing

    async def train_from_start(self) -> None:
        await self.place_state()
        await self.checkpointer.restore_state()
        self.policy_runner.plan_first()
        await self.evaluate_model(together=True)
        self.checkpointer.finish_restore()
        self.set_phase("running")
        self.memory_account.recount_standing()
        await self.run_steps()

    async def run_steps(self) -> None:
        self.start_background()
        while not await self.check_ended():
            before = self.rank.step
            if not asynchronous.is_idle(self.experiment, self.rank):  # an idle rank only takes changes
                await self.make_step()
            if self.experiment.evaluates(before, self.rank.step):
                await agree_in_common_step(self)
                await self.evaluate_model(together=self.experiment.strategy.lockstep)
        await drain_pipeline(self.micros_in_flight)
        await agree_in_common_step(self)
        await self.await_background()
        strategy = self.experiment.strategy
        if strategy.lockstep and strategy.can_drain:
            await strategy.drain(self.rank.replicas, self.state)
        if self.experiment.task.keeps:
            await self.checkpointer.make_checkpoint(asked=False, last=True)
        await self.finish_run()

    async def place_state(self) -> None:
        """Places all sharded state before the first step."""
        await split_state(self, ahead=True)
        self._laid = True
        self.mark_buckets()
        self.memory_account.note_model_cut()

    async def check_ended(self) -> bool:
        """Makes what is due at this boundary. Returns whether this rank has made its last step."""
        await self._crash_if_due()
        await self.make_due_changes()
        await self._crash_if_due()
        e = self.experiment
        return self.is_ended or (e.strategy.lockstep and 0 < e.steps <= self.rank.step)

    async def make_due_changes(self) -> None:
        """Makes due changes. Asynchronous ranks meet first."""
        apart = self.is_asynchronous
        if apart:
            if not await self.check_meeting():
                return
            await self.assemble_ranks()
        if apart or self.due_count:
            await agree_on_unfrozen(self)
        due = self.agreed_due_count if apart else self.due_count
        await self._make_changes(due)
        while self.due_count and not self.is_asynchronous:  # ranks that met late are past their steps
            await self._make_changes(1)
        await self.take_requests(apart)
        if apart or self.is_asynchronous:
            self.start_background()

    async def _make_changes(self, count: int) -> None:
        """Makes the first `count` planned changes. The remaining ones stay in `queue.taken`."""
        queue = self.queue
        queue.take_changes(count)
        while queue.taken:
            await self.execute_change(queue.taken[0])
            queue.count_obeyed(queue.taken.pop(0))
            await self._crash_if_due()  # the next change may end the generation

    async def _crash_if_due(self) -> None:
        if self.crashing:
            mine, self.crashing = self.rank.id in self.crashing, frozenset()
            if mine:
                self.mark("fault", {"text": "crashed by an injected fault"})
            await self.crash_rank(mine)

    def guard_step(self, changes: bool = False) -> AbstractContextManager[None]:
        """A context for a step or a change. This rank can go back if another is lost inside."""
        return nullcontext() if self.rollback is None else self.rollback.guard_step(changes)

    async def execute_change(self, change: Planned) -> bool:
        """Makes a change, a policy's tick or a checkpoint. Returns whether a change was made."""
        if isinstance(change, CheckpointEvent):
            await self.checkpointer.make_planned(change)
            return False
        if isinstance(change, PolicyTick):
            made = await self.policy_runner.run_tick(change)
        else:
            assert isinstance(change, Change)
            with self.guard_step(True):
                made = await self.policy_runner.follow_change(change, changes.execute_change(self, change))
        self.memory_account.recount_standing()
        self.checkpointer.plan_next()
        return made

    async def make_step(self) -> None:
        if self.pending_pause:
            seconds, self.pending_pause = self.pending_pause, 0.0
            stood = await Op("stand", seconds)
            self.mark("fault", {"text": f"stood still for {stood:.1f} s"})
        if (due := self.rate.compute_rate(self)) != self.rank.lr:
            await make_late_updates(self)
        self.rate.set_rate(self, due)
        self.rank.clip = self.experiment.clip
        if self.reads is not None:
            self.reads.note_boundary(self.rank.step)
        with self.guard_step():
            self.memory_account.begin_step()
            before = self.drawn_batches
            made = await self.step_strategy()
            self.memory_account.end_step()
            self._note_examples((self.drawn_batches - before) * self.experiment.batch)
            if self.flushing and self.has_met:
                await residual.count_flush_step(self)
            if self.unsharder.learning:
                await self.unsharder.learn_trace(self.access_trace)
            await train_unfrozen_in_step(self)
            if self.has_new_order:
                await reorder_buckets(self, await self.learn_order())
            self.rank.step += made
        self.policy_runner.count_step()
        self.note_steps(made)

    def _note_examples(self, count: int) -> None:
        """Only a replica's first rank records it."""
        first = not self.rank.mesh.inside or self.rank.inside.index == 0
        if first and self.experiment.batch and count != self._examples:
            self._examples = count
            self.sample("examples", count)

    async def evaluate_model(self, together: bool) -> None:
        """Records the held-out loss. together: of the mean model of all ranks"""
        loss = await record_evaluation(self, together)
        self.held_out = self.held_out if loss is None else loss

    def mark_buckets(self) -> None:
        """Records bucket sizes in bytes, from the first step."""
        if self.rank.id == 0 and self._laid:
            self.mark("buckets", {"nbytes": [b.nbytes for b in self.layout.buckets]})

    # -- what a host implements --

    @property
    @abstractmethod
    def now(self) -> float: ...
    @property
    @abstractmethod
    def sent_bytes(self) -> int: ...
    @property
    @abstractmethod
    def usage(self) -> ParameterUsage: ...
    @property
    @abstractmethod
    def reads(self) -> BatchReader | None: ...
    @property
    @abstractmethod
    def drawn_batches(self) -> int: ...

    @property
    @abstractmethod
    def is_ended(self) -> bool:
        """Whether the run ended."""

    @property
    @abstractmethod
    def has_met(self) -> bool:
        """Whether all ranks have exchanged data in this step."""

    @property
    @abstractmethod
    def agreed_due_count(self) -> int:
        """Counts rank 0's due changes, after a meeting."""

    @abstractmethod
    async def step_strategy(self) -> int:
        """Returns how many steps it counts for."""

    @abstractmethod
    async def broadcast_text(self, text: str, by: int = 0) -> str: ...
    @abstractmethod
    def tune_partition(self) -> None: ...

    @property
    @abstractmethod
    def has_new_order(self) -> bool:
        """Whether the first exchanged backward has just shown an order."""

    @abstractmethod
    async def crash_rank(self, mine: bool) -> None:
        """Crashes this rank if `mine`, or another one, once all ranks have made the fault's change."""

    @abstractmethod
    async def learn_order(self) -> list[str]:
        """Returns the order of gradients, the same on all ranks with the same part."""

    @property
    def access_trace(self) -> AccessTrace | None:
        """A step's reads, if known without an Unsharder."""
        return None

    @abstractmethod
    async def evaluate_mean(self) -> Evaluated: ...
    @abstractmethod
    async def evaluate_known(self, known: list[Bucket]) -> Evaluated: ...
    @abstractmethod
    async def check_meeting(self) -> bool:
        """Returns whether ranks meet now. An idle rank waits."""

    @abstractmethod
    async def assemble_ranks(self) -> None:
        """Waits for all ranks and their background work."""

    async def take_requests(self, apart: bool) -> None:
        """Takes people's requests."""

    async def await_background(self) -> None:
        """Waits for its end."""

    async def finish_run(self) -> None:
        """Reports the end."""

    def note_steps(self, made: int) -> None:
        """Notes made steps."""

    @abstractmethod
    def start_background(self) -> None:
        """Starts or restarts it."""

    @abstractmethod
    async def gather(self, number: int) -> list[int]: ...
    @abstractmethod
    def foresee_reads(self, cheaply: bool) -> AccessTrace | None: ...
    @abstractmethod
    def require_trainable(self, wanted: Experiment) -> Experiment: ...
    @abstractmethod
    async def agree_on_order(self, names: list[str]) -> list[str]: ...
    @abstractmethod
    async def reorder_parameters(self, names: list[str]) -> None: ...
    @abstractmethod
    def make_example(self, wanted: Experiment) -> Any: ...
    @abstractmethod
    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer: ...
    @abstractmethod
    def use_optimizer(self, optimizer: Optimizer) -> None: ...
    @abstractmethod
    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None: ...
    @abstractmethod
    def choose_lane(self) -> None: ...
    @abstractmethod
    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None: ...
    @abstractmethod
    def sharded(self, buckets: ShardLayout | None) -> None: ...
    @abstractmethod
    def restart_data(self, used: int) -> None: ...
    @abstractmethod
    async def resize_buckets(self, bucket_mb: float) -> None: ...
    @abstractmethod
    def record_switch(self, was: Experiment, wanted: Experiment) -> AbstractContextManager[None]: ...
    @abstractmethod
    async def leave(self, strategy: Strategy) -> None: ...
    @abstractmethod
    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None: ...
    @abstractmethod
    def reset_groups(self) -> None: ...
    @abstractmethod
    async def leave_opaque(self) -> None: ...
    @abstractmethod
    def enter_opaque(self) -> None: ...

    @abstractmethod
    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        """Records until now."""

    @abstractmethod
    def sample(self, name: str, value: float) -> None: ...
    @abstractmethod
    def mark(self, name: str, detail: Mapping[str, Json]) -> None: ...
    @abstractmethod
    def set_phase(self, phase: str) -> None: ...
