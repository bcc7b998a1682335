"""What a change asks of the engine; what it consists of is in workbench/changes.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from workbench.changes import in_step
from workbench.engine.canonical import all_equal
from workbench.engine.opaque import unwrap, wrap
from workbench.experiment import Experiment
from workbench.fabric.load import pauses
from workbench.optimizers import built


class Turnable:
    """The part of a Session that changes reach into."""

    def set_fabric(self: Any, was: Experiment | None, wanted: Experiment) -> None:
        """The Link, the pace and the faults; a fault that is new may stand its rank still."""
        self.port.fabric = wanted.fabric
        self.host.pace.seconds = wanted.pace * 1e-3
        self.host.pace.faults = wanted.fabric.faults
        self.pending_pause += pauses(was.fabric.faults if was else (), wanted.fabric.faults, self.rank.index)

    def choose_lane(self: Any) -> None:
        """Children run on the caller's thread where a thread would have nothing to compute or sleep for."""
        self.lane.eager = self.rank.compressor.immediate and not self.lane.shaper.active

    def make_optimizer(self: Any, wanted: Experiment) -> Any:
        params = [p for p in self.model.parameters() if p.requires_grad]
        return built(wanted.optimizer, self.learner.optimizer, params, wanted.lr)

    def use_optimizer(self: Any, optimizer: Any) -> None:
        self.optimizer = self.host.optimizer = optimizer

    def sample(self: Any, name: str, value: float) -> None:
        self.record.sample(self.rank.step, name, self.clock.now(), value)

    async def rebucket(self: Any, bucket_mb: float) -> None:
        self.commons.relay(lambda: self.layout.rebucket(bucket_mb))
        self.mark_buckets()

    async def leave(self: Any, strategy: Any) -> None:
        await strategy.leave(self.rank, self.state)
        self.commons.leave()

    def enter(self: Any, was: Experiment, wanted: Experiment) -> None:
        """Another strategy takes over."""
        if wanted.strategy.shared:
            self.commons.enter()
        self.state = wanted.strategy.init(self.rank)
        self.tickets.enter(wanted.strategy, self.lane)
        self.meeting.enter()

    async def gather(self: Any, number: int) -> list[int]:
        """Every rank's number, by rank."""
        return all_equal(self.control, number)

    @contextmanager
    def switching(self: Any, was: Experiment, wanted: Experiment) -> Iterator[None]:
        """A switch of strategy happens inside, as one span; ranks that fell behind go on with the step of the first."""
        if in_step(was):
            self.meeting.latest = self.rank.step
        self.rank.step = self.meeting.latest
        began, sent = self.clock.now(), self.lane.sent
        self.lane.step = self.rank.step
        self.host.op = f"switch from {was.strategy} to {wanted.strategy}"
        yield
        self.host.forget_hooks()
        self.record.span(self.rank.step, "switch", type(wanted.strategy).__name__, began, began, self.clock.now(),
                         self.lane.sent - sent)

    def enter_opaque(self: Any) -> None:
        """Wraps the model in torch's own DDP; on an emulated Link its buckets go over our lane."""
        if self.rank.size == 1:
            return
        self.host.forget_hooks()
        lane = self.lane if self.lane.shaper.active else None
        self.host.module = wrap(self.host.model, self.data_wire, self.experiment.bucket_mb, lane)

    def leave_opaque(self: Any) -> None:
        if self.host.module is not self.host.model:
            unwrap(self.host.module)
            self.host.module = self.host.model


def adopt(run: Any, names: list[str]) -> None:
    """Rank 0's order of gradients on all ranks, once, as torch's DDP rebuilds its buckets once."""
    index = {p.name: i for i, p in enumerate(run.layout.order)}
    order = torch.tensor([index[n] for n in names], dtype=torch.int64)
    if run.control is not None:
        if run.tickets.asked:
            run.pocket = run.tickets.take()
        run.control.wait(run.control.broadcast(order, 0))
    if (strategy := run.experiment.strategy).crosses:
        run.host.drive(strategy.settle(run.rank, run.state))
    run.host.forget_hooks()
    run.commons.relay(lambda: run.layout.reorder([run.layout.order[i].name for i in order.tolist()]))
    run.mark_buckets()
