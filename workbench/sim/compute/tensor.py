"""The compute of one virtual rank that holds slices of matrices, together with the ranks of the other slices.

With real tensors, all ranks of a group compute a pass at once, when the last of them begins it. On the virtual clock
each rank then goes through the pass and meets the other ranks, at the times that a pass on the meta device has shown.
So a rank waits for late ranks at the beginning of a backward, and not at the first layer as on the engine. This also
holds with sizes only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.host.passes import local_runner
from workbench.host.passes.pipelining import require_same_batch
from workbench.host.passes.tensor_parallel import refresh_common
from workbench.host.passes.tensor_schedule import PassPlan, PlannedMeeting, find_plans
from workbench.host.sharding.access_trace import PassEvent
from workbench.rank import Op, Rank
from workbench.sim.clock.fiber import END, PARK, Fiber
from workbench.sim.compute.bucket_pass import BucketPass

if TYPE_CHECKING:
    from workbench.experiment import Experiment
    from workbench.sim.clock.world import VirtualWorld


class TensorPerformer:
    """The part of a Host that computes together with other ranks, if its body has a `split`."""

    world: VirtualWorld
    body: Any
    experiment: Experiment
    rank: Rank
    stale = True  # may parameters have changed since all that have them were told?
    _refreshed_at = -1  # in which step they were
    _begin_pass: Callable[..., BucketPass]
    _next_full: Callable[..., Any]
    run_inner: Callable[..., Any]

    @property
    def _pass_plans(self) -> tuple[PassPlan, ...]:
        """By piece of the model: when ranks meet in a pass through it, with the present batch size."""
        stage, stages = self.body.stage
        return find_plans(self.experiment, self.body.learner, self.body.split)[stage::stages]

    async def _meet_before(self, batch: Any) -> None:
        """Before a batch, checks that a replica's ranks read the same data, and refreshes their shared parameters."""
        body = self.body
        if body.fresh and self.rank.mesh.inside:
            await require_same_batch(self.rank.inside, batch, body.layout.order[0].param.device)
        body.fresh = False
        if body.split is not None and (self.stale or self._refreshed_at != self.rank.step):
            self.stale, self._refreshed_at = False, self.rank.step
            await refresh_common(self.rank.group("tensor"), body.common_params)

    async def _joint_forward(self, fiber: Fiber, x: Any, micro: int) -> Any:
        """Runs a forward of all ranks of the group, and returns its loss."""
        body = self.body
        batch = body.draw_batch(x)
        await self._meet_before(batch)
        loss = await self._compute_jointly("forward", lambda: body.run_forward(batch, micro))
        await self._pass_meetings(
            self._begin_pass(fiber, "forward", []), self._pass_plans[0].meetings_of_phase("forward")
        )
        return loss

    async def _joint_backward(self, fiber: Fiber, grad: Any, micro: int, exchanged: bool) -> Any:
        """Runs a backward of all ranks of the group. If exchanged, returns its first full bucket."""
        body = self.body
        await self._compute_jointly("backward", lambda: body.run_backward(grad, micro, exchanged))
        passing = self._begin_pass(fiber, "backward", [])
        if not exchanged:
            return await self._pass_meetings(passing, self._pass_plans[0].meetings_of_phase("backward"))
        passing.events = _merge_events(
            self._pass_plans[0].list_ready_shares(body.layout), self._pass_plans[0].meetings_of_phase("backward")
        )
        fiber.passing = passing
        return await self._next_full(passing)

    async def _joint_stage(self, what: str, compute: Callable[[], Any], passing: BucketPass, chunk: int) -> Any:
        """Runs a pass of all ranks of a stage through a piece of the model, without buckets."""
        made = await self._compute_jointly(what, compute)
        await self._pass_meetings(passing, self._pass_plans[chunk].meetings_of_phase(what.partition(" ")[0]))
        return made

    async def _joint_last(self, fiber: Fiber, what: str, compute: Callable[[], Any], passing: BucketPass, chunk: int,
                          takes: Fiber) -> None:  # fmt: skip
        """Runs the last backward of a batch. `takes` gets its buckets, and `fiber` goes on after the last one."""
        plans = self._pass_plans[chunk]
        passing.then = fiber, await self._compute_jointly(what, compute)
        passing.events = _merge_events(plans.list_ready_shares(self.body.layout), plans.meetings_of_phase("backward"))
        takes.passing = passing
        self.next_in_turn(takes, passing)

    def next_in_turn(self, takes: Fiber, passing: BucketPass) -> Any:
        """Answers `takes` with the next full bucket. If none is left, resumes the fiber that waits for the pass."""
        takes.on = inner = Fiber(self, self._next_full(passing), "step", takes.origin)  # type: ignore[arg-type]
        inner.waiter = _BucketTurn(takes, passing)  # type: ignore[assignment]
        inner.resume(None)
        return PARK

    async def _pass_meetings(self, passing: BucketPass, meetings: list[PlannedMeeting]) -> None:
        passing.events = deque(meetings)
        while await self._next_full(passing) is not END:
            pass

    async def _compute_jointly(self, phase: str, compute: Callable[[], Any]) -> Any:
        """Returns this rank's result of `compute`, which runs when all ranks of the group have come."""
        op = Op("together", phase, (self.body, compute), self._compute_for_ranks, 0.0)
        op.group = self.rank.group("tensor").within
        return await op

    def _compute_for_ranks(self, works: list[tuple[Any, Callable[[], Any]]]) -> list[Any]:
        if not self.world.real:
            return [compute() for _, compute in works]

        def work(body: Any, compute: Callable[[], Any]) -> local_runner.Work:
            def pass_(ask: Any) -> Any:
                body.ask = ask
                return compute()

            return pass_

        return local_runner.run_together([work(body, compute) for body, compute in works])

    async def _perform_meeting(self, planned: PlannedMeeting) -> None:
        """Performs a meeting in the middle of a pass. Its values are already known; its bytes cross the network now."""
        meeting, group = planned.meeting, self.rank.group("tensor")
        brings = _make_flat(planned.brings.numel(), planned.brings.dtype)
        if meeting.what == "sum":
            await group.all_reduce(brings, "sum", meeting.name)
        elif meeting.what == "gather":
            await group.all_gather(brings, meeting.name)
        elif meeting.what == "scatter":
            await group.reduce_scatter(brings, meeting.name)
        elif meeting.what == "swap":
            await group.all_to_all(brings.view(group.size, -1), meeting.name)


@cache
def _make_flat(numel: int, dtype: torch.dtype) -> Tensor:
    """Returns `numel` numbers without values, shared by all ranks."""
    return torch.empty(numel, dtype=dtype, device="meta")


class _BucketTurn:
    """Resumes the fiber that takes a bucket, or at the end of the pass the fiber that waits for it."""

    def __init__(self, takes: Fiber, passing: BucketPass) -> None:
        self._takes, self._passing = takes, passing

    def resume(self, value: Any) -> None:
        assert self._passing.then is not None
        fiber, came = self._passing.then
        self._takes.resume(value) if value is not END else fiber.resume(came)


def _merge_events(ready: list[float], meetings: list[PlannedMeeting]) -> deque[Any]:
    """Returns the events of a backward in order: full buckets and meetings."""
    full = [PassEvent(share, "full", (index,)) for index, share in enumerate(ready)]
    return deque(sorted([*full, *meetings], key=lambda event: event[0]))
