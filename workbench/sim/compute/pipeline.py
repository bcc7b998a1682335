"""The compute of one virtual rank that is a stage of a replica: micro-batches on the virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.pipelining import WEIGHT_HALF, name_pass, run_batch
from workbench.rank import Op, Rank
from workbench.sim.clock.fiber import END, PARK, Fiber
from workbench.sim.compute.bucket_pass import BucketPass
from workbench.sim.compute.tensor import TensorPerformer

if TYPE_CHECKING:
    from workbench.experiment import Experiment


class PipelinePerformer(TensorPerformer):
    """The part of a Host that is a stage, if its body has a `piece`."""

    body: Any
    experiment: Experiment
    rank: Rank
    phase_seconds: Callable[..., float]
    _run_phase: Callable[..., Any]
    _next_bucket: Callable[..., Any]
    _begin_pass: Callable[..., BucketPass]
    _left: list[int]  # by piece, the remaining backwards of the present batch
    flow: InFlight
    _count = 1
    _squares: float | None = None  # of the gradients of all stages, if an update is about to clip them
    _takes: Fiber | None = None  # the fiber that takes the buckets of its last backward

    async def _through_stages(self, grad: float | None, micro: int, takes: Fiber | None = None) -> Any:
        """Runs one batch forward and backward through the stages. Returns END for the loop of `takes`, if given."""
        partition = self.experiment.partition
        self._count = partition.micro_batches
        self._left = [self._count] * partition.pieces
        self._takes = takes
        batch = self.body.begin_batch(micro, partition)
        await self._meet_before(batch)
        share = (1.0 if grad is None else grad) / self._count
        loss = await run_batch(self.rank.group("stage"), partition, share, self.flow, self.rank.step)
        self.body.store_loss(loss)
        return None if takes is None else END

    async def _clipped_update(self, op: Op) -> Any:
        """Runs an update with clipping. The stages of a replica add up their squared gradients first."""
        x = torch.tensor([self.body.sum_squares()], dtype=torch.float64, device=self.body.layout.order[0].param.device)
        await self.rank.inside.all_reduce(x, "sum", "gradient norm")
        self._squares = 0.0 if x.is_meta else float(x)
        return await Op("update", *op.args)

    def _find_micro_share(self, chunk: int) -> float:
        """Returns the share of one micro-batch through one piece in this stage's compute on a batch."""
        return float(self.body.shares[chunk]) / self._count

    def _stage_forward(self, fiber: Fiber, op: Op) -> Any:
        x, micro, chunk = op.args
        name = name_pass("forward", self.flow.number_micro(micro), chunk, len(self._left))
        if self.body.split is not None:
            passing = self._begin_pass(fiber, "forward", [], self._find_micro_share(chunk), name, chunk)
            forward = partial(self.body.stage_forward, x, micro, chunk)
            return self.run_inner(fiber, self._joint_stage(name, forward, passing, chunk))
        made = self.body.stage_forward(x, micro, chunk)
        return self._run_phase(fiber, "forward", made, self._find_micro_share(chunk), name, chunk)

    def _stage_backward(self, fiber: Fiber, op: Op) -> Any:
        grad, micro, chunk = op.args
        return self._run_stage_backward(fiber, op, "backward", partial(self.body.stage_backward, grad), micro, chunk)

    def _stage_inputs(self, fiber: Fiber, op: Op) -> Any:
        grad, micro, chunk = op.args
        came = self.body.stage_inputs(grad, micro, chunk)
        name = name_pass("backward", self.flow.number_micro(micro), chunk, len(self._left))
        return self._run_phase(fiber, "backward", came, 0.5 * self._find_micro_share(chunk), name, chunk)

    def _stage_weights(self, fiber: Fiber, op: Op) -> Any:
        micro, chunk = op.args
        return self._run_stage_backward(fiber, op, WEIGHT_HALF, self.body.stage_weights, micro, chunk, 0.5)

    def _run_stage_backward(self, fiber: Fiber, op: Op, name: str, run: Callable[..., Any], micro: int, chunk: int,
                     part: float = 1.0) -> Any:  # fmt: skip
        """Runs a backward, or the second half of one, that computes gradients of parameters."""
        begun = sum(self._left) < self._count * len(self._left)
        self._left[chunk] -= 1
        takes = self._takes if not any(self._left) else None
        first = self._takes is not None and not begun and any(self._left)
        name, part = (
            name_pass(name, self.flow.number_micro(micro), chunk, len(self._left)),
            part * self._find_micro_share(chunk),
        )
        backward = partial(run, micro, chunk, takes is not None, first)
        if self.body.split is not None:
            passing = self._begin_pass(fiber, "backward", [], part, name, chunk)
            if takes is None:
                return self.run_inner(fiber, self._joint_stage(name, backward, passing, chunk))
            last = self._joint_last(fiber, name, backward, passing, chunk, takes)
            Fiber(self, last, "step", fiber.origin).resume(None)  # type: ignore[arg-type]
            return PARK
        came = backward()
        if takes is None:
            return self._run_phase(fiber, "backward", came, part, name, chunk)
        takes.passing = self._begin_pass(takes, "backward", self.body.list_ready_shares(chunk), part, name, chunk)
        takes.passing.then = fiber, came
        self._next_bucket(takes, op)
        return PARK
