"""A virtual rank's whole phases, and passes that a strategy gets bucket by bucket.

A pass stops at every bucket: in backward when its gradients are complete, in forward before its parameters are read.
The device is idle while the strategy waits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.host.placement.canonical_state import list_optimizer_tensors
from workbench.host.placement.optimizer_slots import require_steppable
from workbench.rank import Op
from workbench.sim.clock.fiber import PARKED, PASS_OVER, Fiber
from workbench.sim.compute.bucket_delivery import BucketDelivery
from workbench.sim.compute.bucket_pass import BucketPass
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.offload import OffloadTransfers
from workbench.sim.compute.pass_timer import PassTimer
from workbench.sim.compute.piecewise import PiecewiseCompute
from workbench.sim.compute.pipeline import PipelinePerformer
from workbench.sim.compute.tensor import TensorPerformer


class ModelPerformer:
    """Computes this rank's model."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, delivery: BucketDelivery, tensor: TensorPerformer,
                 pipeline: PipelinePerformer, piecewise: PiecewiseCompute,
                 offload: OffloadTransfers) -> None:  # fmt: skip
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._delivery, self._tensor = delivery, tensor
        self._pipeline, self._piecewise, self._offload = pipeline, piecewise, offload
        self._rank, self._unsharder, self._memory_account, self._usage = (
            parts.rank,
            parts.unsharder,
            parts.memory_account,
            parts.usage,
        )
        self._submodel, self._clock = parts.submodel, parts.clock
        self._held: tuple[Any, dict[int, int]] = None, {}  # a layout's buckets, bytes of held parameters by bucket

    def run_forward(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        if self._body.piece is not None:  # backward takes the batch through all stages
            return self._body.store_batch(*op.args)
        if self._body.split is not None:
            return self._delivery.run_inner(fiber, self._tensor.joint_forward(fiber, *op.args))
        if self._unsharder.sharded:
            return self._delivery.run_inner(
                fiber, self._run_sharded(fiber, "forward", lambda: self._body.run_forward(*op.args))
            )
        return self._timing.run_phase(fiber, "forward", self._body.run_forward(*op.args))

    def run_backward(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        if self._body.piece is not None:
            return self._delivery.run_inner(fiber, self._pipeline.run_batch_through(*op.args))
        if self._body.split is not None:
            grad, micro = op.args
            return self._delivery.run_inner(fiber, self._tensor.joint_backward(fiber, grad, micro, False))
        value = self._body.run_backward(*op.args, False)
        if self._unsharder.sharded:
            return self._delivery.run_inner(fiber, self._run_sharded(fiber, "backward", lambda: value))
        return self._timing.run_phase(fiber, "backward", value)

    def update_model(self, fiber: Fiber, op: Op) -> Any:
        bucket, by, on = op.args
        index = None if bucket is None else bucket.index
        if self._usage.must_agree(self._rank.replicas, index):
            return self._delivery.run_inner(fiber, self._agreed_update(op))
        self._tensor.mark_stale()
        self._parts.micros_in_flight.versions.keep_weights()
        if on == "host":
            return self._offload.update_on_host(fiber, bucket)
        share = 1.0 if bucket is None else bucket.data.numel() / self._body.layout.element_count
        self._body.activate_worker(fiber.origin)
        if self._parts.world.real:
            self._body.layout.adopt_replaced_data(index)
            self._drop_gradients()
        if bucket is not None:
            require_steppable(self._body.layout, self._body.optimizer, bucket, self._parts.experiment)
        if bucket is None and self._parts.rollback is not None:
            self._parts.rollback.note_update()
        clip, squares = self._parts.experiment.clip, self._pipeline.take_squares()
        if clip and self._rank.mesh.inside and squares is None:
            return self._delivery.run_inner(fiber, self._pipeline.clipped_update(op))
        if self._submodel.is_narrow:
            norm = self._piecewise.step_narrow(clip, by)
        else:
            norm = self._body.update_model(bucket, clip, by, squares)
        if norm is not None:
            self._parts.note("grad_norm", norm)
        return self._timing.run_phase(fiber, "update", None, share)

    async def _agreed_update(self, op: Op) -> Any:
        """Runs an update after the ranks have agreed on the used parameters."""
        await self._usage.agree_on_unused(self._parts)
        return await Op("update", *op.args)

    def _drop_gradients(self) -> None:
        """Drops gradients of unused parameters, and of frozen ones that this rank alone updates."""
        layout = self._body.layout
        layout.drop_unused()
        if self._parts.experiment.strategy.periodic and not self._usage.settled:
            layout.drop_frozen()

    def backward_buckets(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        grad, micro = op.args
        if self._parts.world.real:
            self._usage.begin_listening()
        if self._body.piece is not None:
            return self._delivery.run_inner(fiber, self._pipeline.run_batch_through(grad, micro, fiber))
        self._submodel.require_awaited(True)
        if self._body.split is not None:
            return self._delivery.run_inner(fiber, self._tensor.joint_backward(fiber, grad, micro, True))
        self._body.run_backward(*op.args, True)
        passing = self._timing.begin_pass(fiber, "backward", self._body.cut.ready)
        if self._unsharder.sharded:
            passing.follow_events(self._unsharder.list_events("backward"))
        fiber.begin_pass(passing)
        return self._delivery.next_bucket(fiber, op)

    def forward_buckets(self, fiber: Fiber, op: Op) -> Any:
        (forward,) = op.args
        forward.note_begun(self._timing.begin_pass(fiber, "forward", self._body.cut.needed))
        return self.next_params(fiber, op)

    def next_params(self, fiber: Fiber, op: Op) -> Any:
        (forward,) = op.args
        passing: BucketPass | None = forward._state
        if passing is None:
            return PASS_OVER
        index = passing.next
        if index == len(passing.shares):
            forward.note_ended(self._body.run_forward(forward.x, forward.micro))
            return self._timing.end_pass(fiber, passing)
        passing.take_next()
        params = self._body.list_params()
        self._clock.resume_at(
            self._timing.reach_fraction(fiber, passing, passing.shares[index]), fiber, params[len(params) - 1 - index]
        )
        return PARKED

    async def _run_sharded(self, fiber: Fiber, phase: str, computed: Callable[[], Any]) -> Any:
        passing = self._timing.begin_pass(fiber, phase, [])
        await self._delivery.pass_events(passing, self._unsharder.list_events(phase))
        if phase == "backward" or not self._parts.world.real:
            return computed()
        more = await self._unsharder.gather_unforeseen(phase)
        value = computed()
        await self._unsharder.reshard_buckets(more)
        await self._unsharder.reshard_written()
        return value

    def list_params(self, fiber: Fiber, op: Op) -> Any:
        self._tensor.mark_stale()
        self._parts.micros_in_flight.versions.keep_weights()
        return self._body.list_params()

    def list_grads(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        self._submodel.require_awaited(True)
        return self._body.list_grads()

    def list_slots(self, fiber: Fiber, op: Op) -> Any:
        return list_optimizer_tensors(self._body.layout, self._body.optimizer)

    def hold_bucket(self, fiber: Fiber, op: Op) -> Any:
        (bucket,) = op.args
        self._unsharder.require_sharded()
        layout = self._body.layout
        if self._parts.world.real:
            bucket = layout.hold_bucket(bucket)
            self._memory_account.note_held(layout.held + self._unsharder.count_copies())
        else:  # all ranks share one layout
            if self._held[0] is not layout.buckets:
                here = self._unsharder.whole
                self._held = (
                    layout.buckets,
                    {b.index: b.nbytes for b in self._body.list_params() if b.index in here},
                )
            self._held[1][bucket.index] = bucket.nbytes
            self._memory_account.note_held(sum(self._held[1].values()) + self._unsharder.count_copies())
        return bucket
