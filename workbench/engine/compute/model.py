"""Performs forward, backward and update on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.torch_ddp import explain_errors
from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.gradient_hooks import GradientHooks
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.core.drive import drive_coroutine
from workbench.host.core.gradient_hooks import BackwardInLoss, ModuleHooks, unscale_grads
from workbench.host.placement.canonical_state import clip_gradients, list_optimizer_tensors
from workbench.host.placement.optimizer_slots import require_steppable, step_shard
from workbench.host.transfer.momentum import subtract_gradients
from workbench.rank import Bucket, Op, StrategyError
from workbench.rank.errors import explain_missing_forward
from workbench.strategies.second_order.curvature import CurvatureEstimator


class ModelPerformer:
    """Computes forwards, backwards and updates of the model that this rank holds, and reads its sharded parameters.

    agree:           makes the ranks agree on the parameters that the last backward used
    perform_in_pass: performs an op that is possible inside torch, and refuses any other
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, tensor: TensorPerformer, pipeline: PipelinePerformer,
                 hooks: GradientHooks, agree: Callable[[], None], perform_in_pass: Callable[[Op], Any],
                 before_update: Callable[[], None]) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._pipeline = parts, timing, tensor, pipeline
        self._hooks, self._agree, self._perform_in_pass = hooks, agree, perform_in_pass
        self._before_update = before_update
        self._rank, self._at, self._pace, self._watch = parts.rank, parts.at, parts.pace, parts.watch
        self._layout, self._usage, self._submodel = parts.layout, parts.usage, parts.submodel
        self._unsharder, self._memory_account = parts.unsharder, parts.memory_account
        self.curvature = CurvatureEstimator(parts.model, parts.learner.loss, parts.layout)
        self._module_hooks = ModuleHooks(parts.model)
        trained = lambda: ((place.name, place.param) for place in self._layout.order)  # noqa: E731
        self._backward_in_loss = BackwardInLoss(trained, parts.learner.scripted)
        self.open_losses: dict[int, Tensor] = {}  # losses without a backward so far, by micro-batch
        self._drawn_batch: Any = None  # the batch of the next forward, if its rows were looked up

    def run_forward(self, x: Any, micro: int) -> Tensor | None:
        """Computes a loss, and returns it as it is recorded. A stage only keeps the batch for its backward."""
        parts, reading, group = self._parts, self._unsharder, self._tensor.group
        batch = self.next_batch() if x is None else x
        if self._pipeline.piece is not None:
            self._pipeline.keep_batch(micro, batch)
            return None
        self._tensor.meet_before(batch)
        self._tensor.begin_pass("forward")
        self._at("forward")
        self._timing.begin_pass("forward", "forward", self._pipeline.share * self._submodel.compute_share("forward"))
        joint = group.run_pass(None) if group else nullcontext()
        with reading.run_pass("forward"), joint, self._module_hooks.wrap_hooks():
            explain = explain_errors() if parts.module is not parts.model else nullcontext()
            with explain, self._backward_in_loss.watch_forward():
                loss = parts.learner.loss(parts.module, batch)
            if reading.sharded:
                drive_coroutine(reading.end_forward(), self._perform_in_pass, parts.alone)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(f"the loss must be a scalar tensor with a gradient, not {_describe_loss(loss)}")
        self.open_losses[micro] = loss
        shown = parts.show_loss(loss)
        self._timing.losses.append(shown)
        self.curvature.note_forward(batch)
        self._memory_account.note_forward(batch)
        self.check_loss(shown, batch)
        self._timing.end_pass()
        return shown

    def check_loss(self, loss: Tensor, batch: Any) -> None:
        """Checks that a loss is finite, unless the chip runs ahead: then it is known some steps later."""
        if not self._parts.lane.chip.runs_ahead:
            self._parts.non_finite_guard.check_forward(loss, batch)

    def next_batch(self) -> Any:
        self._at("data iterator")
        looked, self._drawn_batch = self._drawn_batch, None
        return self._parts.batches.next_batch() if looked is None else looked

    def draw_ahead(self) -> Any:
        """Draws the batch of the next forward before it."""
        self._drawn_batch = self.next_batch()
        return self._drawn_batch

    def run_backward(self, grad: Any, micro: int, exchanged: bool = False) -> None:
        """Computes a forward's gradients. If `exchanged`, they go into buckets, which are handed out as they fill."""
        if isinstance(grad, Tensor):
            raise StrategyError("a rank's backward begins with its loss, or its replica's: give a number, or nothing")
        parts, reading = self._parts, self._unsharder
        self._layout.note_unused(set())
        self._usage.begin_backward(self._rank.step)
        self._usage.require_trained(parts.strategy())
        if parts.module is not parts.model:  # torch exchanges this backward's gradients
            self._usage.note_backward(self._rank.step)
        if self._pipeline.piece is not None:
            with unscale_grads((place.param for place in self._layout.order), None):  # in parts, as micro-batches are
                self._timing.losses.append(self._pipeline.run_batch(grad, micro, exchanged))
            return
        self._submodel.require_awaited(exchanged)
        if exchanged:
            self._hooks.begin_exchange()
        self._at("backward")
        loss = self.open_losses.pop(micro, None)
        if loss is None:
            raise StrategyError(explain_missing_forward(micro))
        self._backward_in_loss.require_scale(grad)
        self._tensor.begin_pass("backward")
        self.curvature.note_backward(grad)
        if parts.fully is not None:
            parts.fully.begin_backward()
        share = self._pipeline.share * self._submodel.compute_share("backward")
        self._timing.begin_pass("backward", "backward", share, self._tensor.recomputed_share("backward"))
        with self._memory_account.measure_backward(self._hooks.is_exchanging), reading.run_pass("backward"):
            with explain_errors() if parts.module is not parts.model else nullcontext():
                with (
                    unscale_grads((p.param for p in self._layout.order), grad),
                    self._module_hooks.wrap_hooks(grad),
                ):
                    parts.run_loss_backward(loss, grad)
        if parts.fully is not None:
            parts.fully.end_backward()
        if reading.sharded:
            drive_coroutine(reading.reshard_all(), self._perform_in_pass, parts.alone)
        self._timing.end_pass()

    def unshard_buckets(self, buckets: Iterable[int], beside: Iterable[int], share: float) -> None:
        """Makes these sharded buckets whole before a pass reads them.

        beside: whole buckets that the same call reads; share: the part of the pass that is computed by then
        Runs inside torch; for a GPU's backward, on autograd's thread.
        """
        parts = self._parts
        with (
            parts.lane.chip.use_stream(),
            torch.inference_mode(False),
            torch.no_grad(),
            self._memory_account.exclude_fetched(),
        ):
            around = self._at.now
            if self._unsharder.phase != "evaluation":
                self._timing.reach_fraction(share)
            drive_coroutine(self._unsharder.gather_buckets(buckets, beside), self._perform_in_pass, parts.alone)
            self._at(*around[:2])

    def hold_bucket(self, bucket: Bucket) -> Bucket:
        self._unsharder.require_sharded()
        held = self._layout.hold_bucket(bucket)
        self._memory_account.note_held(self._layout.held + self._unsharder.count_copies())
        return held

    def move_values(self, op: Op) -> Any:
        """Moves values to or from the place where a strategy keeps them off the device."""
        self._at(op.verb, waits=True)
        clock, watch = self._watch.clock, self._watch
        began, asked = clock.now(), watch.now()
        value = self._parts.away.perform_op(op, self._rank.step, None)
        waited, ended = clock.now() - began, watch.now()
        self._pace.exclude_wait(waited)
        self._timing.note_wait(asked, ended, waited)
        return value

    def update_model(self, bucket: Bucket | None, by: Callable[[], None] | None, on: str) -> None:
        """Steps the optimizer on all parameters, or on one bucket. by: makes the step instead of the optimizer"""
        index = None if bucket is None else bucket.index
        if self._usage.must_agree(self._rank.replicas, index):
            self._agree()
        self._before_update()
        self._at("update")
        self._layout.adopt_replaced_data(index)
        self._mark_written()
        if on == "host":
            return self.move_values(Op("update", bucket, by, on))
        parts, pace, clock = self._parts, self._pace, self._watch.clock
        began, since = self._watch.now(), clock.now()
        with pace.pause_phase() if self._timing.is_computing else nullcontext():
            if bucket is None:
                pace.begin_phase(
                    "update", self._rank.step, self._pipeline.share * self._submodel.compute_share("update")
                )
                parts.rollback.note_update()
                self._update_all(by)
            else:
                pace.begin_phase("update", self._rank.step, bucket.data.numel() / self._layout.element_count)
                require_steppable(self._layout, parts.optimizer, bucket, parts.experiment())
                with parts.alone:
                    step_shard(self._layout, parts.optimizer, bucket)
            self._timing.reach_fraction(1.0)
        self._watch.end_span(self._rank.step, "update", began)
        self._timing.note_wait(began, self._watch.now(), clock.now() - since)

    def _mark_written(self) -> None:
        """Notes that parameters are about to be written."""
        self._tensor.mark_stale()
        self._pipeline.micros_in_flight.versions.keep_weights()

    def _update_all(self, by: Callable[[], None] | None) -> None:
        parts, submodel, experiment = self._parts, self._submodel, self._parts.experiment()
        if submodel.is_narrow:
            with parts.alone:
                norm = submodel.step_optimizer(experiment.clip, by)
            self._memory_account.note_submodel(submodel.own_params, submodel.optimizer_state)
            return self.sample("grad_norm", norm) if norm is not None else None
        self._layout.drop_unused() if parts.fully is None else parts.fully.drop_unused()
        if experiment.strategy.periodic and not self._usage.settled:
            self._layout.drop_frozen()
        if longest := experiment.clip:
            of_replica = self._pipeline.sum_over_stages if self._rank.mesh.inside else float
            norm = (
                parts.fully.clip_gradients(longest)
                if parts.fully
                else clip_gradients(self._layout, longest, of_replica)
            )
            self.sample("grad_norm", norm)
        with parts.alone:
            (by or parts.optimizer.step)()
            subtract_gradients(self._layout, parts.optimizer, self._rank.memory)
        parts.optimizer.zero_grad(set_to_none=True)
        self._layout.release_gradients()
        self.curvature.note_update()

    def sample(self, name: str, value: float) -> None:
        self._watch.record.sample(self._rank.step, name, self._watch.clock.now(), float(value))

    def list_params(self) -> list[Bucket]:
        """Returns the parameters in buckets, which the strategy may write."""
        self._mark_written()
        return self._layout.list_params()

    def list_grads(self) -> list[Bucket]:
        self._submodel.require_awaited(True)
        return self._layout.list_grads()

    def list_slots(self) -> list[Tensor]:
        return list_optimizer_tensors(self._layout, self._parts.optimizer)


def _describe_loss(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradient")
    return f"a {type(loss).__name__}"
