"""A virtual rank with slices of matrices.

With real tensors, all ranks of a group compute a pass at once, when its last rank begins it. On the virtual clock each
rank then meets the other ranks at the times that a pass on the meta device has shown. So a rank waits for late ranks at
the beginning of a backward, also with sizes only. On the engine it waits at the first layer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from workbench.host.passes import local_runner
from workbench.host.passes.pipelining import require_same_batch
from workbench.host.passes.tensor_parallel import refresh_common
from workbench.host.passes.tensor_schedule import PlannedMeeting
from workbench.host.sharding.access_trace import PassEvent
from workbench.rank import Op
from workbench.sim.clock.fiber import Fiber
from workbench.sim.compute.bucket_delivery import BucketDelivery
from workbench.sim.compute.bucket_pass import BucketPass
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class TensorPerformer:
    """Computes passes with the ranks of the other slices."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, delivery: BucketDelivery) -> None:
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._delivery, self._rank = delivery, parts.rank
        self._stale = True  # whether shared parameters may have changed since their last refresh
        self._refreshed_at = -1  # a step

    def mark_stale(self) -> None:
        self._stale = True

    async def meet_before(self, batch: Any) -> None:
        """Checks that a replica's ranks read the same data. Refreshes shared parameters."""
        body = self._body
        if body.take_fresh() and self._rank.mesh.inside:
            await require_same_batch(self._rank.inside, batch, body.layout.order[0].param.device)
        if body.split is not None and (self._stale or self._refreshed_at != self._rank.step):
            self._stale, self._refreshed_at = False, self._rank.step
            await refresh_common(self._rank.group("tensor"), body.common_params)

    async def joint_forward(self, fiber: Fiber, x: Any, micro: int) -> Any:
        """Runs a forward of all ranks of the group, and returns its loss."""
        body = self._body
        batch = body.draw_batch(x)
        await self.meet_before(batch)
        loss = await self._compute_jointly("forward", lambda: body.run_forward(batch, micro))
        await self._delivery.pass_events(
            self._timing.begin_pass(fiber, "forward", []), self._parts.pass_plans[0].meetings_of_phase("forward")
        )
        return loss

    async def joint_backward(self, fiber: Fiber, grad: Any, micro: int, exchanged: bool) -> Any:
        """Runs a backward of all ranks of the group. If exchanged, returns its first full bucket."""
        body = self._body
        await self._compute_jointly("backward", lambda: body.run_backward(grad, micro, exchanged))
        passing = self._timing.begin_pass(fiber, "backward", [])
        if not exchanged:
            return await self._delivery.pass_events(passing, self._parts.pass_plans[0].meetings_of_phase("backward"))
        plans = self._parts.pass_plans[0]
        passing.follow_events(_merge_events(plans.list_ready_shares(body.layout), plans.meetings_of_phase("backward")))
        fiber.begin_pass(passing)
        return await self._delivery.next_full(passing)

    async def joint_stage(self, what: str, compute: Callable[[], Any], passing: BucketPass, chunk: int) -> Any:
        """Runs a pass of a stage's ranks through a piece of the model, without buckets."""
        made = await self._compute_jointly(what, compute)
        await self._delivery.pass_events(
            passing, self._parts.pass_plans[chunk].meetings_of_phase(what.partition(" ")[0])
        )
        return made

    async def joint_last(self, fiber: Fiber, what: str, compute: Callable[[], Any], passing: BucketPass, chunk: int,
                         takes: Fiber) -> None:  # fmt: skip
        """Runs the last backward of a batch. `takes` gets its buckets, and `fiber` continues after them."""
        plans = self._parts.pass_plans[chunk]
        passing.continue_after(fiber, await self._compute_jointly(what, compute))
        ready = plans.list_ready_shares(self._body.layout)
        passing.follow_events(_merge_events(ready, plans.meetings_of_phase("backward")))
        takes.begin_pass(passing)
        self._delivery.next_in_turn(takes, passing)

    async def _compute_jointly(self, phase: str, compute: Callable[[], Any]) -> Any:
        """`compute` runs after the group's last rank has come."""
        group = self._rank.group("tensor").within
        return await Op("together", phase, (self._body, compute), self._compute_for_ranks, 0.0, group=group)

    def _compute_for_ranks(self, works: list[tuple[Any, Callable[[], Any]]]) -> list[Any]:
        if not self._parts.world.real:
            return [compute() for _, compute in works]

        return local_runner.run_together([partial(body.run_exchanging, compute=compute) for body, compute in works])


def _merge_events(ready: list[float], meetings: list[PlannedMeeting]) -> list[Any]:
    full = [PassEvent(share, "full", (index,)) for index, share in enumerate(ready)]
    return sorted([*full, *meetings], key=lambda event: event[0])
