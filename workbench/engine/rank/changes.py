"""The engine's part of a change; workbench/host/reconfigure/changes.py has its steps."""

from __future__ import annotations

import gc
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.torch_ddp import (
    choose_options,
    convert_to_mib,
    remove_hooks,
    require_all_grads,
    wrap_model,
)
from workbench.engine.control.canonical import broadcast_text, gather_numbers
from workbench.engine.rank.components import RankComponents
from workbench.experiment import Experiment
from workbench.experiment.partitioned import drawn
from workbench.fabric.load import crashed, pauses
from workbench.host.passes.checkpointing import list_units
from workbench.host.passes.recomputing import find_recomputed
from workbench.host.passes.tensor_schedule import PassPlan, find_plans
from workbench.host.placement.layout import ParameterLayout
from workbench.host.placement.spread import ReplicaSpread
from workbench.host.reconfigure.changes import has_common_step, take_role
from workbench.host.sharding.read_order import foresee_trace
from workbench.rank import Op
from workbench.settings import KnobError
from workbench.tasks import at_rate


class Reconfigurable(RankComponents):
    """One rank of a run as a change sees it; see workbench.host.transfer.views."""

    workers: Any

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        """Sets the Link, the pace and the faults. A new fault may halt its rank for a while, or end it."""
        self.port.fabric = wanted.fabric
        self.host.pace.set_pace(wanted.pace * 1e-3, wanted.fabric.faults)
        old, new = was.fabric.faults if was else (), wanted.fabric.faults
        self.pending_pause += pauses(old, new, self.rank.id)
        self.crashing = {*self.crashing, *crashed(old, new, self.rank.size)}

    def choose_lane(self) -> None:
        """Runs children on the caller's thread if a thread would have nothing to compute or to wait for."""
        alone = self.session.kind == "gloo" or self.rank.mesh.flat  # else two communicators would be under way at once
        quick = self.rank.compressor.immediate and not self.port.is_active and not self.experiment.strategy.offloads
        quick = quick and self.port.fabric.algorithm.native
        self.lane.eager = quick and alone

    def resize_own_buckets(self, bucket_mb: float) -> None:
        self.layout.resize_buckets(bucket_mb)

    def release_state(self, seed: int) -> None:
        self.host.take_part(None, seed)

    def reallocate_state(self) -> None:
        self.layout = ParameterLayout(self.model, self.experiment.bucket_mb)
        self.optimizer = self.make_optimizer(self.experiment)
        at_rate(self.optimizer, self.rank.lr)

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.host.parts.use_optimizer(optimizer)

    def sample(self, name: str, value: float) -> None:
        self.record.sample(self.rank.step, name, self.clock.now(), value)

    async def drive_step(self, strategy: Any) -> int:
        """Makes one step. Returns how many steps it counts for; 0 if none was made."""
        if strategy.workers > 1:
            self.host.at("workers")
            return await Op("do", self.workers.run_steps) or 1
        return await Op("drive", self.finite.guard_step(self.measuring.measure_step(self))) or 1

    async def resize_buckets(self, bucket_mb: float) -> None:
        self.shared.share_again(lambda: self.layout.resize_buckets(bucket_mb))
        self.mark_buckets()

    async def leave(self, strategy: Any) -> None:
        await strategy.leave(self.rank.replicas, self.state)
        self.shared.unshare_parameters()
        self.layout.drop_gradients()

    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None:
        """Enters another strategy."""
        if wanted.strategy.shared:
            self.shared.share_parameters()
        take_role(self, wanted)
        self.state = wanted.strategy.init(self.rank.replicas, self.layout.list_params())
        self.reset_groups()
        self.meeting.enter_strategy()

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None:
        """Lays out the parameters `names` here. held=False: they are to be sharded, and have no values yet."""
        self.host.hooks.detach_hooks()
        self.layout.take_parameters(self.model, names, held)
        seed = drawn(self.experiment, self.rank.id, self.rank.step)
        self.host.take_part(spread, seed)
        if (spread and spread.split) or (self.spread and self.spread.split):
            torch.manual_seed(seed)
        self.spread, self.evaluation_copy = spread, None
        self.tune_partition()
        self.mark_buckets()

    def tune_partition(self) -> None:
        """Applies new knobs of the partition; the model's layout stays."""
        e, split = self.experiment, self.spread.split if self.spread else None
        units = list_units(self.model, self.learner, e.partition)
        self.host.pipeline.tune_partition(
            self._plan_passes(self.spread), units, find_recomputed(e, self.learner, split)
        )

    def _plan_passes(self, spread: ReplicaSpread | None) -> tuple[PassPlan, ...]:
        """Returns the plans by piece of the model for ranks that hold slices; () if they are unknown."""
        if spread is None or spread.split is None:
            return ()
        try:
            return find_plans(self.experiment, self.learner, spread.split)
        except KnobError:  # the pace is then kept less finely
            return ()

    def sharded(self, buckets: Any) -> None:
        """Does nothing: the optimizer's state is already in place."""

    def reset_groups(self) -> None:
        """Closes wires of groups that ended, and counts children from 0 again."""
        for lane in self.host.lanes:
            self.peers.close_wires(lane.wires.forget_groups(self.rank.mesh.generation))
            lane.started = lane.completed = 0
        flat = self.rank.mesh.flat and not self.rank.mesh.inside
        self.tickets.enter_strategy(self.experiment.strategy, self.lane, flat)

    @property
    def sent_bytes(self) -> int:
        return self.host.lanes.sent_bytes

    async def gather(self, number: int) -> list[int]:
        """Returns every rank's number, by rank."""
        return gather_numbers(self.control, number)

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns the text of rank `by`, on every rank."""
        return self.broadcast_text_now(text, by)

    def broadcast_text_now(self, text: str, by: int = 0) -> str:
        """The same as `broadcast_text`, as a plain function."""
        return broadcast_text(self.control, text.encode(), by).decode() if self.control is not None else text

    @contextmanager
    def record_switch(self, was: Experiment, wanted: Experiment) -> Iterator[None]:
        """Records a switch of strategy, made in the block, as one span. Ranks that fell behind take the latest step."""
        if has_common_step(was):
            self.meeting.latest_step = self.rank.step
        self.rank.step = self.meeting.latest_step
        began, sent = self.now, self.sent_bytes
        self.lane.step = self.rank.step
        self.host.at(f"switch from {was.strategy} to {wanted.strategy}")
        yield
        self.host.hooks.detach_hooks()
        self.span("switch", type(wanted.strategy).__name__, began, self.sent_bytes - sent)

    def enter_opaque(self) -> None:
        """Wraps the model in torch's own DDP, or a copy in fully_shard. On an emulated Link both use our lane."""
        if self.peers.data is None:
            return
        self.host.hooks.detach_hooks()
        lane = self.lane if self.port.is_active else None
        if self.experiment.strategy.shards:
            from workbench.engine.baselines.fully_sharded import FullySharded  # takes a second to import

            fully = FullySharded(self, self.peers.data, lane)
            self.host.parts.wrap_model(fully.module, fully)
        else:
            options = choose_options(getattr(self.experiment.strategy, "find_unused_parameters", False))
            options["bucket_cap_mb"] = convert_to_mib(self.experiment.bucket_mb)
            with require_all_grads(self.layout):
                self.host.parts.wrap_model(wrap_model(self.model, self.peers.data, options, lane))

    async def leave_opaque(self) -> None:
        if self.host.parts.fully is not None:
            await self.host.parts.fully.return_state()
        self.unwrap_model()

    def unwrap_model(self) -> None:
        """Makes forward call the model itself again."""
        remove_hooks(self.host.parts.module)
        fully = self.host.parts.unwrap_model()
        if fully is not None:
            fully.end()
            del fully
            gc.collect()  # torch's hooks and the copy reference each other, and keep shards and sockets

    def _take_first_order(self, order: Tensor) -> Tensor:
        """Returns the order of the first rank that holds the same part of the model as this rank."""
        assert self.control is not None
        if self.spread is None:
            self.control.wait(self.control.broadcast(order, 0))
            return order
        trained = {name for name, p in self.model.named_parameters() if p.requires_grad}
        for place in range(len(self.spread)):
            count = len(self.spread.select_trained(place, trained))
            said = order if place == self.rank.id % len(self.spread) else torch.empty(count, dtype=torch.int64)
            self.control.wait(self.control.broadcast(said, place))
        return order

    def take_first_names(self, names: list[str]) -> list[str]:
        """Returns one order of gradients: rank 0's, or that of the first rank that holds the same parts."""
        index = {p.name: i for i, p in enumerate(self.layout.order)}
        order = torch.tensor([index[n] for n in names], dtype=torch.int64)
        if self.control is not None:
            if self.tickets.has_pending:
                self.early_requests = self.tickets.take_requests()
            order = self._take_first_order(order)
        return [self.layout.order[i].name for i in order.tolist()]

    def adopt_order(self, names: list[str]) -> None:
        """Lays parameters out in this order once, as torch's DDP does."""
        self.host.hooks.detach_hooks()
        self.shared.share_again(lambda: self.layout.reorder_buckets(names))
        self.mark_buckets()

    def foresee_reads(self, cheaply: bool) -> Any:
        """Predicts what a step reads; None if that is unknown."""
        return foresee_trace(self.learner, self.experiment, cheaply)

    def mark_start(self) -> None:
        """Records where this rank trains, and what."""
        self.mark("start", {
            "host": platform.node(), "pid": os.getpid(), "device": self.session.device, "backend": self.session.kind,
            "torch": torch.__version__, "python": platform.python_version(), "clock_error": self.peers.doubt,
            "clock_offset": self.peers.offset,
            "parameters": self.layout.element_count, "nbytes": self.layout.byte_count,
        })  # fmt: skip
