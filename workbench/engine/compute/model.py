"""Performs forward, backward, update and passes over sharded parameters on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.opaque import explaining
from workbench.engine.compute.hooks import GradientHooks
from workbench.engine.compute.parts import ComputeParts
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.engine.compute.timing import Timing
from workbench.host.core.drive import drive
from workbench.host.core.gradient_hooks import own_loss
from workbench.host.observe.curvature import Curvature
from workbench.host.placement.canonical import clipped, optimizer_tensors
from workbench.host.placement.slots import require_steppable, step_shard
from workbench.host.transfer.momentum import stilled
from workbench.host.transfer.tables import read, step_rows, taken
from workbench.rank import Bucket, Op, StrategyError


class ModelPerformer:
    """Computes forwards, backwards and updates of the model that this rank holds, and reads its sharded parameters.

    agree:           makes the ranks agree on the parameters that the last backward used
    perform_in_pass: performs an op that is possible inside torch, and refuses any other
    """

    def __init__(self, parts: ComputeParts, timing: Timing, tensor: TensorPerformer, pipeline: PipelinePerformer,
                 hooks: GradientHooks, agree: Callable[[], None], perform_in_pass: Callable[[Op], Any],
                 before_update: Callable[[], None]) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._pipeline = parts, timing, tensor, pipeline
        self._hooks, self._agree, self._perform_in_pass = hooks, agree, perform_in_pass
        self._before_update = before_update
        self._rank, self._at, self._pace, self._watch = parts.rank, parts.at, parts.pace, parts.watch
        self._layout, self._usage, self._narrowing = parts.layout, parts.usage, parts.narrowing
        self._reading, self._ledger = parts.reading, parts.ledger
        self.curvature = Curvature(parts.model, parts.learner.loss, parts.layout)
        self.open: dict[int, Tensor] = {}  # losses without a backward so far, by micro-batch
        self._looked: Any = None  # the batch of the next forward, if its rows were looked up

    def forward(self, x: Any, micro: int) -> Tensor | None:
        """Computes a loss, and returns it as it is recorded. A stage only keeps the batch for its backward."""
        parts, reading, group = self._parts, self._reading, self._tensor.group
        batch = self.batch() if x is None else x
        if self._pipeline.piece is not None:
            self._pipeline.keep_batch(micro, batch)
            return None
        self._tensor.meet_before(batch)
        self._tensor.begin_pass("forward")
        self._at("forward")
        self._timing.begin_pass("forward", "forward", self._pipeline.share * self._narrowing.share("forward"))
        with reading.passing("forward"), group.passing(None) if group else nullcontext():
            with explaining() if parts.module is not parts.model else nullcontext():
                loss = parts.learner.loss(parts.module, batch)
            if reading.sharded:
                drive(reading.end_forward(), self._perform_in_pass, parts.alone)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(f"the loss must be a scalar tensor with a gradient, not {_what(loss)}")
        self.open[micro] = loss
        shown = parts.show_loss(loss)
        self._timing.losses.append(shown)
        self.curvature.forward(batch)
        self._ledger.forward(batch)
        self.check_loss(shown, batch)
        self._timing.end_pass()
        return shown

    def check_loss(self, loss: Tensor, batch: Any) -> None:
        """Checks that a loss is finite, unless the chip runs ahead: then it is known some steps later."""
        if not self._parts.lane.chip.runs_ahead:
            self._parts.finite.passed(loss, batch)

    def batch(self) -> Any:
        """Returns the next batch."""
        self._at("data iterator")
        looked, self._looked = self._looked, None
        return self._parts.batches.next() if looked is None else looked

    def backward(self, grad: Any, micro: int, exchanged: bool = False) -> None:
        """Computes a forward's gradients. If `exchanged`, they go into buckets, which are handed out as they fill."""
        if isinstance(grad, Tensor):
            raise StrategyError("a rank's backward begins with its loss, or its replica's: give a number, or nothing")
        parts, reading = self._parts, self._reading
        self._layout.unused = set()
        self._usage.begin(self._rank.step)
        self._usage.require_trained(parts.strategy())
        if parts.module is not parts.model:  # torch exchanges this backward's gradients
            self._usage.step = self._rank.step
        if self._pipeline.piece is not None:
            with own_loss((place.param for place in self._layout.order), None):  # in parts, as micro-batches are
                self._timing.losses.append(self._pipeline.run_batch(grad, micro, exchanged))
            return
        self._narrowing.require_awaited(exchanged)
        if exchanged:
            self._hooks.open()
        self._at("backward")
        loss = self.open.pop(micro, None)
        if loss is None:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        self._tensor.begin_pass("backward")
        self.curvature.backward(grad)
        if parts.fully is not None:
            parts.fully.begin()
        share = self._pipeline.share * self._narrowing.share("backward")
        self._timing.begin_pass("backward", "backward", share, self._tensor.again("backward"))
        with self._ledger.backward(self._hooks.listening), reading.passing("backward"):
            with explaining() if parts.module is not parts.model else nullcontext():
                with own_loss((place.param for place in self._layout.order), grad):
                    parts.go_back(loss, grad)
        if parts.fully is not None:
            parts.fully.passed()
        if reading.sharded:
            drive(reading.close(), self._perform_in_pass, parts.alone)
        self._timing.end_pass()

    def read(self, buckets: Iterable[int], beside: Iterable[int], share: float) -> None:
        """Makes these sharded buckets whole before a pass reads them.

        beside: whole buckets that the same call reads; share: the part of the pass that is computed by then
        Runs inside torch; for a GPU's backward, on autograd's thread.
        """
        parts = self._parts
        with parts.lane.chip.inside(), torch.inference_mode(False), torch.no_grad(), self._ledger.aside():
            around = self._at.now
            if self._reading.phase != "evaluation":
                self._timing.reach(share)
            drive(self._reading.need(buckets, beside), self._perform_in_pass, parts.alone)
            self._at(*around[:2])

    def hold(self, bucket: Bucket) -> Bucket:
        """Gives a sharded bucket memory of its own."""
        self._reading.require_sharded()
        held = self._layout.hold(bucket)
        self._ledger.hold(self._layout.held)
        return held

    def move(self, op: Op) -> Any:
        """Performs a transfer to or from the place where a strategy keeps values off the device."""
        self._at(op.verb, waits=True)
        clock, watch = self._watch.clock, self._watch
        began, asked = clock.now(), watch.now()
        value = self._parts.away.perform(op, self._rank.step, None)
        waited, ended = clock.now() - began, watch.now()
        self._pace.put_off(waited)
        self._timing.note_wait(asked, ended, waited)
        return value

    def update(self, bucket: Bucket | None, by: Callable[[], None] | None, on: str) -> None:
        """Steps the optimizer: on everything, or on one bucket. by: makes the step instead of the optimizer"""
        if self._usage.step is not None:
            self._agree()
        self._before_update()
        self._at("update")
        self._mark_written()
        if on == "host":
            return self.move(Op("update", bucket, by, on))
        parts, pace, clock = self._parts, self._pace, self._watch.clock
        began, since = self._watch.now(), clock.now()
        with pace.within() if self._timing.computing else nullcontext():
            if bucket is None:
                pace.begin("update", self._rank.step, self._pipeline.share * self._narrowing.share("update"))
                parts.rollback.updates()
                self._update_all(by)
            else:
                pace.begin("update", self._rank.step, bucket.data.numel() / self._layout.numel)
                require_steppable(self._layout, parts.optimizer, bucket, parts.experiment())
                with parts.alone:
                    step_shard(self._layout, parts.optimizer, bucket)
            self._timing.reach(1.0)
        self._watch.span(self._rank.step, "update", began)
        self._timing.note_wait(began, self._watch.now(), clock.now() - since)

    def _mark_written(self) -> None:
        """Notes that parameters are about to be written."""
        self._tensor.mark_stale()
        self._pipeline.flow.versions.keep()

    def _update_all(self, by: Callable[[], None] | None) -> None:
        parts, narrowing, experiment = self._parts, self._narrowing, self._parts.experiment()
        if narrowing.narrow:
            with parts.alone:
                norm = narrowing.step(experiment.clip, by)
            self._ledger.part(narrowing.trained, narrowing.state)
            return self.sample("grad_norm", norm) if norm is not None else None
        self._layout.drop_unused() if parts.fully is None else parts.fully.drop_unused()
        if experiment.strategy.periodic and not self._usage.settled:
            self._layout.drop_frozen()
        if longest := experiment.clip:
            of_replica = self._pipeline.sum_of_replica if self._rank.mesh.inside else float
            norm = parts.fully.shorten(longest) if parts.fully else clipped(self._layout, longest, of_replica)
            self.sample("grad_norm", norm)
        with parts.alone:
            (by or parts.optimizer.step)()
            stilled(self._layout, parts.optimizer, self._rank.memory)
        parts.optimizer.zero_grad(set_to_none=True)
        self._layout.let_go()
        self.curvature.stepped()

    def sample(self, name: str, value: float) -> None:
        """Records one number."""
        self._watch.record.sample(self._rank.step, name, self._watch.clock.now(), float(value))

    def look_up(self) -> dict[str, Tensor]:
        """Draws the next batch, and returns the rows of tables that it reads."""
        batch = self._looked = self.batch()
        return self.rows_of(batch)

    def rows_of(self, batch: Any) -> dict[str, Tensor]:
        """Returns which rows of tables a batch reads."""
        return read(self._parts.learner, batch, self._layout)

    def row_grads(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes the gradients of these rows."""
        return taken(self._layout, rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> None:
        """Steps the optimizer on rows of a table."""
        with self._parts.alone:
            step_rows(self._layout, self._parts.optimizer, table, rows, grad, lr)

    def params(self) -> list[Bucket]:
        """Returns the parameters in buckets, which the strategy may write."""
        self._mark_written()
        return self._layout.params()

    def grads(self) -> list[Bucket]:
        """Returns the gradients in buckets."""
        self._narrowing.require_awaited(True)
        return self._layout.grads()

    def slots(self) -> list[Tensor]:
        """Returns the tensors of the optimizer's state."""
        return optimizer_tensors(self._layout, self._parts.optimizer)


def _what(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradient")
    return f"a {type(loss).__name__}"
