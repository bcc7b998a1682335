"""Delivers the buckets of a pass, each when it is full."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.host.passes.tensor_schedule import PlannedMeeting
from workbench.rank import Op
from workbench.sim.clock.fiber import PARKED, PASS_OVER, Fiber, Waiter
from workbench.sim.compute.bucket_pass import BucketPass
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class MakeFiber(Protocol):
    """Makes a fiber of this rank. waiter: gets its result"""

    def __call__(self, coro: Coroutine[Op, Any, Any], origin: str, waiter: Waiter | None = None) -> Fiber: ...


class BucketDelivery:
    """Takes a virtual rank's passes from bucket to bucket.

    make_fiber: makes a fiber that runs in the step
    run_inner:  answers a fiber with a coroutine's result
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, make_fiber: MakeFiber,
                 run_inner: Callable[[Fiber, Coroutine[Op, Any, Any]], Any]) -> None:  # fmt: skip
        self._parts, self._body, self._timing = parts, parts.body, timing
        self._unsharder, self._rank = parts.unsharder, parts.rank
        self.make_fiber, self.run_inner = make_fiber, run_inner

    def next_bucket(self, fiber: Fiber, op: Op) -> Any:
        passing: BucketPass = fiber.passing
        if passing.events is not None:
            turn = passing.then is not None  # one micro-batch's pass; another fiber waits for its end
            return self.next_in_turn(fiber, passing) if turn else self.run_inner(fiber, self.next_full(passing))
        index = passing.next
        if index == len(passing.shares):
            return self._timing.end_pass(fiber, passing)
        reached = self._timing.reach_fraction(fiber, passing, passing.shares[passing.take_next()])
        self._parts.clock.resume_at(reached, fiber, self._body.get_full_bucket(index))
        return PARKED

    def next_in_turn(self, takes: Fiber, passing: BucketPass) -> Any:
        """Answers `takes` with the next full bucket. After the last, resumes the fiber that waits for the pass."""
        inner = self.make_fiber(self.next_full(passing), takes.origin, _BucketTurn(takes, passing))
        takes.park(inner)
        inner.resume(None)
        return PARKED

    async def next_full(self, passing: BucketPass) -> Any:
        """Returns the next full bucket in a pass of sharded or sliced parameters, or PASS_OVER."""
        reading, events = self._unsharder, passing.events
        assert events is not None
        reading.enter_phase(passing.phase)
        while events:
            event = events.popleft()
            await Op("reach", passing, event.share)
            if isinstance(event, PlannedMeeting):
                await self._perform_meeting(event)
                continue
            if event.kind == "full":
                await reading.note_filled(event.buckets[0])
                return self._body.get_full_bucket(event.buckets[0])
            if not reading.whole.issuperset(event.buckets):
                await reading.gather_buckets(event.buckets)
        await Op("reach", passing, 1.0)
        self._timing.record_stretch(passing)
        if passing.phase == "backward":
            await reading.reshard_all()
        reading.enter_phase("")
        return PASS_OVER

    async def pass_events(self, passing: BucketPass, events: Iterable[Any]) -> None:
        """Takes a pass to its end, without handing out buckets."""
        passing.follow_events(events)
        while await self.next_full(passing) is not PASS_OVER:
            pass

    async def _perform_meeting(self, planned: PlannedMeeting) -> None:
        """The meeting's values are already known, and its bytes cross the network now."""
        meeting, group = planned.meeting, self._rank.group("tensor")
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
    return torch.empty(numel, dtype=dtype, device="meta")


class _BucketTurn:
    """Resumes the fiber that takes a bucket, or after the pass the one that waits for it."""

    def __init__(self, takes: Fiber, passing: BucketPass) -> None:
        self._takes, self._passing = takes, passing

    def answer(self, value: Any, now: float) -> None:
        assert self._passing.then is not None
        fiber, came = self._passing.then
        self._takes.resume(value) if value is not PASS_OVER else fiber.resume(came)
