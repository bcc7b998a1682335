"""A virtual rank as a stage of a replica."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from workbench.host.passes.pipelining import WEIGHT_HALF, name_pass, run_batch
from workbench.rank import Op
from workbench.sim.clock.fiber import PARKED, PASS_OVER, Fiber
from workbench.sim.compute.bucket_delivery import BucketDelivery
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer
from workbench.sim.compute.tensor import TensorPerformer


class PipelinePerformer:
    """Computes it micro-batch by micro-batch."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, delivery: BucketDelivery,
                 tensor: TensorPerformer) -> None:  # fmt: skip
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._delivery, self._tensor = delivery, tensor
        self._rank, self._micros_in_flight = parts.rank, parts.micros_in_flight
        self._count = 1
        self._left: list[int] = []  # by piece, the remaining backwards of the present batch
        self._squares: float | None = None  # over the gradients of all stages, if the next update clips them
        self._takes: Fiber | None = None  # takes the buckets of the last backward

    async def run_batch_through(self, grad: float | None, micro: int, takes: Fiber | None = None) -> Any:
        """Runs one batch forward and backward through the stages. Returns PASS_OVER to the loop of `takes`, if any."""
        partition = self._parts.experiment.partition
        self._count = partition.micro_batches
        self._left = [self._count] * partition.pieces
        self._takes = takes
        batch = self._body.begin_batch(micro, partition)
        await self._tensor.meet_before(batch)
        share = (1.0 if grad is None else grad) / self._count
        loss = await run_batch(self._rank.group("stage"), partition, share, self._micros_in_flight, self._rank.step)
        self._body.store_loss(loss)
        return None if takes is None else PASS_OVER

    async def clipped_update(self, op: Op) -> Any:
        """Runs an update with clipping: first the stages of a replica add up their squared gradients."""
        x = torch.tensor(
            [self._body.sum_squares()], dtype=torch.float64, device=self._body.layout.order[0].param.device
        )
        await self._rank.inside.all_reduce(x, "sum", "gradient norm")
        self._squares = 0.0 if x.is_meta else float(x)
        return await Op("update", *op.args)

    def take_squares(self) -> float | None:
        squares, self._squares = self._squares, None
        return squares

    def _find_micro_share(self, chunk: int) -> float:
        """Returns the share of one micro-batch and piece in this stage's compute on a batch."""
        return float(self._body.shares[chunk]) / self._count

    def stage_forward(self, fiber: Fiber, op: Op) -> Any:
        x, micro, chunk = op.args
        name = name_pass("forward", self._micros_in_flight.number_micro(micro), chunk, len(self._left))
        if self._body.split is not None:
            passing = self._timing.begin_pass(fiber, "forward", [], self._find_micro_share(chunk), name, chunk)
            forward = partial(self._body.stage_forward, x, micro, chunk)
            return self._delivery.run_inner(fiber, self._tensor.joint_stage(name, forward, passing, chunk))
        made = self._body.stage_forward(x, micro, chunk)
        return self._timing.run_phase(fiber, "forward", made, self._find_micro_share(chunk), name, chunk)

    def stage_backward(self, fiber: Fiber, op: Op) -> Any:
        grad, micro, chunk = op.args
        return self._run_stage_backward(fiber, op, "backward", partial(self._body.stage_backward, grad), micro, chunk)

    def stage_inputs(self, fiber: Fiber, op: Op) -> Any:
        grad, micro, chunk = op.args
        came = self._body.stage_inputs(grad, micro, chunk)
        name = name_pass("backward", self._micros_in_flight.number_micro(micro), chunk, len(self._left))
        return self._timing.run_phase(fiber, "backward", came, 0.5 * self._find_micro_share(chunk), name, chunk)

    def stage_weights(self, fiber: Fiber, op: Op) -> Any:
        micro, chunk = op.args
        return self._run_stage_backward(fiber, op, WEIGHT_HALF, self._body.stage_weights, micro, chunk, 0.5)

    def _run_stage_backward(self, fiber: Fiber, op: Op, name: str, run: Callable[..., Any], micro: int, chunk: int,
                     part: float = 1.0) -> Any:  # fmt: skip
        """part: 0.5 for the second half, for gradients of parameters"""
        begun = sum(self._left) < self._count * len(self._left)
        self._left[chunk] -= 1
        takes = self._takes if not any(self._left) else None
        first = self._takes is not None and not begun and any(self._left)
        name, part = (
            name_pass(name, self._micros_in_flight.number_micro(micro), chunk, len(self._left)),
            part * self._find_micro_share(chunk),
        )
        backward = partial(run, micro, chunk, takes is not None, first)
        if self._body.split is not None:
            passing = self._timing.begin_pass(fiber, "backward", [], part, name, chunk)
            if takes is None:
                return self._delivery.run_inner(fiber, self._tensor.joint_stage(name, backward, passing, chunk))
            last = self._tensor.joint_last(fiber, name, backward, passing, chunk, takes)
            self._delivery.make_fiber(last, fiber.origin).resume(None)
            return PARKED
        came = backward()
        if takes is None:
            return self._timing.run_phase(fiber, "backward", came, part, name, chunk)
        passing = self._timing.begin_pass(takes, "backward", self._body.list_ready_shares(chunk), part, name, chunk)
        passing.continue_after(fiber, came)
        takes.begin_pass(passing)
        self._delivery.next_bucket(takes, op)
        return PARKED
