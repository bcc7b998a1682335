"""The simulator's part of a change; the rest is in workbench/host/reconfigure/changes.py."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from workbench.compressors import inside
from workbench.experiment import Experiment, closure_rules, momentum_rules, sharding_rules, sparse_rules
from workbench.experiment.mesh_rules import list_shard_groups
from workbench.experiment.partition_rules import find_data_shard, find_random_seed
from workbench.fabric.load import crashed, pauses
from workbench.host.loop.rank_loop import RankLoop
from workbench.host.memory.batches import Numbers, make_example, numbers
from workbench.host.memory.offload import OffloadStore
from workbench.host.passes.tensor_schedule import find_plans
from workbench.host.placement.replica_spread import ReplicaSpread, find_spread
from workbench.host.reconfigure.changes import has_common_step, take_role
from workbench.host.reconfigure.validation import require_trainable
from workbench.host.sharding.read_order import foresee_trace
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.rank import Op
from workbench.settings import Json, KnobError
from workbench.sim.compute.host import Host
from workbench.sim.costs.costs import Costs

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


class Reconfigurable(RankLoop):
    """The part of a Session that changes use."""

    world: VirtualWorld
    host: Host
    body: Any
    common: bool = False  # whether all ranks share the memory of their parameters

    @property
    def experiment(self) -> Experiment:
        return self.host.parts.experiment

    @experiment.setter
    def experiment(self, wanted: Experiment) -> None:
        self.host.parts.experiment = wanted

    @property
    def layout(self) -> Any:
        return self.body.layout

    @property
    def model(self) -> Any:
        return self.body.model

    @property
    def optimizer(self) -> Any:
        return self.body.optimizer

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this model cannot be simulated under it."""
        if reason := explain_refusal(wanted, self.world.costs, lambda: self.body.make_optimizer(wanted)):
            raise KnobError(reason)
        require_trainable(self, wanted)
        if wanted.partition.slices > 1 and (spread := find_spread(wanted, self.model, self.learner)) and spread.split:
            find_plans(wanted, self.learner, spread.split)
        return wanted

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        old, new = was.fabric.faults if was else (), wanted.fabric.faults
        self.pending_pause += pauses(old, new, self.rank.id)
        self.crashing = {*self.crashing, *crashed(old, new, self.rank.size)}

    def choose_lane(self) -> None:
        """Looks up the compressor's prices, and records assumptions. Children run as on the engine."""
        costs, compressor = self.world.costs, self.rank.compressor
        if costs is None:
            self.host.use_prices((), ())
        else:
            self.host.use_prices(costs.list_codec_prices(compressor), costs.list_prices_beside(compressor))
        held = list(inside(compressor))
        taken = "; ".join(dict.fromkeys(f"{type(c).__name__}: {c.assumes}" for c in held if c.assumes))
        if not self.world.real and self.rank.id == 0 and (taken or any(c.varies for c in held)):
            detail = {"density": self.rank.density, "measured": bool(costs and costs.density)}
            self.mark("estimate", detail | ({"text": taken} if taken else {}))

    def restart_data(self, used: int) -> None:
        self.body.shard_data(*find_data_shard(self.experiment, self.rank.id))
        self.body.restart_data(self.experiment.batch, self.experiment.seed, self.rank.step, used)

    @property
    def reads(self) -> Any:
        return getattr(self.body, "batches", None)

    @property
    def rng_states(self) -> Numbers | None:
        return None if self.body.random_state is None else (self.body.random_state, *numbers()[1:])

    def restore_rng(self, states: Numbers | None) -> None:
        if states is not None:
            self.body.random_state = states[0]

    @property
    def slice_rng(self) -> tuple[int, int] | None:
        return self.body.slice_rng

    def restore_slice_rng(self, at: tuple[int, int] | None) -> None:
        if at is not None:
            self.body.slice_rng = at

    def make_optimizer(self, wanted: Experiment, params: list[Any] | None = None) -> Any:
        return self.body.make_optimizer(wanted, params)

    @property
    def learner(self) -> Any:
        return self.body.learner

    def make_example(self, wanted: Experiment) -> Any:
        """Returns the same batch on all ranks, without a draw from the training data."""
        return make_example(self.learner, wanted, "cpu" if self.world.real else "meta")

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None:
        """held: False if the parameters' shards come later"""
        seed = find_random_seed(self.experiment, self.rank.id, self.rank.step)
        if (spread and spread.split) or (self.spread and self.spread.split):
            self.body.reseed_rng(seed)
        self.spread = spread
        self.host.tensor.mark_stale()
        self.body.lay_out_parameters(names, spread, self.rank.id, self.experiment, seed, held)
        if not self.world.real:
            self.body.take_optimizer(self.body.make_optimizer(self.experiment))
        else:
            self.host.usage.take_layout(self.model, self.layout, whole=spread is None)
        self.mark_buckets()

    def tune_partition(self) -> None:
        self.body.tune_partition(self.experiment)

    @property
    def offloaded_state(self) -> OffloadStore:
        return self.body.away

    def resize_own_buckets(self, bucket_mb: float) -> None:
        self.body.resize_buckets(bucket_mb)

    def release_state(self, seed: int) -> None:
        self.body.release_state(self.experiment, seed)

    def reallocate_state(self) -> None:
        self.spread = None
        self.body.reallocate_state(self.experiment)

    def use_optimizer(self, optimizer: Any) -> None:
        self.body.use_optimizer(optimizer)

    def sample(self, name: str, value: float) -> None:
        self.host.note(name, value)

    async def resize_buckets(self, bucket_mb: float) -> None:
        await self.share_again(lambda: self.body.resize_buckets(bucket_mb))
        self.mark_buckets()

    async def share_again(self, lay: Callable[[], None]) -> None:
        """If the parameters were shared, shares them again after `lay`."""
        if self.common:
            await self.gather(0)
        lay()
        if self.common:
            await self.gather(0)
            self.share_parameters()

    def share_parameters(self) -> None:
        """All ranks use rank 0's memory. They must stand still and hold equal values."""
        self.common = True
        if self.world.real:
            self.body.share_memory(self.world.sessions[0].body)

    def foresee_reads(self, cheaply: bool) -> Any:
        """Returns None if unknown."""
        if self.world.real:
            return foresee_trace(self.learner, self.experiment, cheaply)
        return self.body.access_trace if (self.body.is_cheap and self.learner.pure) or not cheaply else None

    async def leave(self, strategy: Any) -> None:
        await self.await_background()
        await strategy.leave(self.rank.replicas, self.state)
        if self.common and self.world.real:
            self.body.unshare_memory()
        self.common = False
        self.body.free_gradients()

    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None:
        strategy = wanted.strategy
        take_role(self, wanted)
        shared = "gradients" in strategy.shards
        self.body.gradient_shards = len(list_shard_groups(strategy, self.rank.size)[0]) if shared else 1
        if strategy.offloads and not wanted.clip:  # ranks offload summed gradients
            self.body.gradient_shards = sys.maxsize
        if strategy.shared and self.rank.size > 1:
            self.share_parameters()
        self.state = strategy.init(self.rank.replicas, self.body.list_params())
        self.reset_groups()

    def sharded(self, buckets: ShardLayout | None) -> None:
        """With sizes only, ranks share one optimizer."""
        self.body.shards = buckets

    def reset_groups(self) -> None:
        """Counts differ between stages."""
        for lane in self.host.lanes.values():
            lane.reset_counts()

    def enter_opaque(self) -> None:
        raise AssertionError("refused before it starts")

    async def leave_opaque(self) -> None:
        self.enter_opaque()

    @contextmanager
    def record_switch(self, was: Experiment, wanted: Experiment) -> Iterator[None]:
        """Records a switch as one span. Late ranks continue with the step of the first rank."""
        if has_common_step(was):
            self.world.latest = self.rank.step
        self.rank.step = self.world.latest
        began, sent = self.now, self.sent_bytes
        yield
        self.span("switch", type(wanted.strategy).__name__, began, self.sent_bytes - sent)

    async def gather(self, number: int) -> list[int]:
        numbers: list[int] = await Op("together", "agree", number, lambda each: [each] * len(each), 0.0)
        return numbers

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        said: str = await Op("together", "tell", text, lambda each: [each[by]] * len(each), 0.0)
        return said

    # -- recording --

    @property
    def now(self) -> float:
        return self.host.clock.now

    @property
    def sent_bytes(self) -> int:
        return self.host.sent_bytes

    def span(self, lane: str, name: str, began: float, nbytes: int = 0) -> None:
        self.host.span(lane, name, began, began, self.now, nbytes)

    def mark(self, name: str, detail: Mapping[str, Json]) -> None:
        self.world.record.mark(self.rank.id, self.rank.step, name, self.host.clock.now, json.dumps(detail))

    def set_phase(self, phase: str) -> None:
        if self.rank.id == 0:
            self.mark("state", {"state": phase, "detail": ""})


def explain_refusal(e: Experiment, costs: Costs | None, made: Callable[[], Any] | None = None) -> str | None:
    """Returns why `e` cannot be simulated, with a remedy; None if it can.

    Call it again when a model exists. made: makes the model's optimizer
    """
    name = type(e.strategy).__name__
    if made is not None:
        for why in (momentum_rules, sharding_rules, sparse_rules, closure_rules):
            if reason := why.explain_refusal(e, made):
                return str(reason)
    if e.strategy.opaque:
        return (
            f"strategy={name}: only torch itself can run its exchange, on the wall clock; simulate "
            f"{'ZeRO3, which shards the same state' if e.strategy.shards else 'DDP, which sends the same bytes'}"
        )
    if not e.pace and costs is None:
        return (
            "pace=0: the duration of compute is unknown; give costs=Costs.measured(run) of a recorded run, "
            "or an experiment with a pace in ms"
        )
    return None
