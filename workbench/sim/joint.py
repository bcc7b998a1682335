"""What one virtual rank computes where it has slices of each matrix, together with those that have the rest.

Where there are values, all ranks of a group compute a pass at once, as soon as the last of them has come to it; on the
virtual clock each then goes through it, and meets the others, as one pass on the meta device has shown. So a rank waits
at the beginning of a backward for who comes later, where on the engine it would wait at the first layer: with values
and without alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from workbench.host import crew
from workbench.host.meetings import Planned
from workbench.host.pipelining import same_batch
from workbench.host.together import refreshed
from workbench.host.trial import Event
from workbench.rank import Op, Rank
from workbench.sim.fiber import END, Fiber
from workbench.sim.passing import Pass

if TYPE_CHECKING:
    from workbench.sim.world import World


class Joint:
    """The part of a Host that computes together with others, while its body has a `split`."""

    world: World
    body: Any
    rank: Rank
    _passing: Callable[..., Pass]
    _next_full: Callable[..., Any]

    async def _joint_forward(self, fiber: Fiber, x: Any, micro: int) -> Any:
        """A forward of all ranks of the group; its loss."""
        body, group = self.body, self.rank.group("tensor")
        batch = body.drawn(x)
        if body.fresh:
            await same_batch(group, batch, body.layout.order[0].param.device)
            body.fresh = False
        await refreshed(group, body.model, body.split)
        loss = await self._jointly("forward", lambda: body.forward(batch, micro))
        passing = self._passing(fiber, "forward", [])
        passing.events = deque(body.plans.of("forward", body.layout))
        while await self._next_full(passing) is not END:
            pass
        return loss

    async def _joint_backward(self, fiber: Fiber, grad: Any, micro: int, exchanged: bool) -> Any:
        """A backward of all ranks of the group; where it is exchanged, its first full bucket."""
        body = self.body
        await self._jointly("backward", lambda: body.backward(grad, micro, exchanged))
        passing = self._passing(fiber, "backward", [])
        full = [Event(share, "full", (i,)) for i, share in enumerate(body.cut.ready)] if exchanged else []
        passing.events = deque(sorted([*full, *body.plans.of("backward", body.layout)], key=lambda event: event[0]))
        if exchanged:
            fiber.passing = passing
            return await self._next_full(passing)
        while await self._next_full(passing) is not END:
            pass
        return None

    async def _jointly(self, phase: str, compute: Callable[[], Any]) -> Any:
        """What `compute` makes on this rank, once all ranks of the group have come to it."""
        op = Op("together", phase, (self.body, compute), self._computed_by, 0.0)
        op.group = self.rank.group("tensor").within
        return await op

    def _computed_by(self, works: list[tuple[Any, Callable[[], Any]]]) -> list[Any]:
        if not self.world.real:
            return [compute() for _, compute in works]

        def work(body: Any, compute: Callable[[], Any]) -> crew.Work:
            def pass_(ask: Any) -> Any:
                body.ask = ask
                return compute()

            return pass_

        return crew.together([work(body, compute) for body, compute in works])

    async def _meet(self, planned: Planned) -> None:
        """A meeting in the middle of a pass: its values are known already, its bytes cross the network now."""
        meeting, group = planned.meeting, self.rank.group("tensor")
        brings: Tensor = planned.brings.new_empty(planned.brings.numel(), device="meta")
        if meeting.what == "sum":
            await group.all_reduce(brings, "sum", meeting.name)
        elif meeting.what == "gather":
            await group.all_gather(brings, meeting.name)
