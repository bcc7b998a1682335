"""When a background comes round: at most once per step, for sooner there is nothing new."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from workbench.rank import Group, Op, StrategyError
from workbench.sim.clock.fiber import PARK, Fiber

if TYPE_CHECKING:
    from workbench.sim.compute.host import Host


class Rounds:
    """One rank's `again`. In a replay it is answered after the steps after which the engine's was."""

    def __init__(self, host: Host) -> None:
        self.host = host
        self.is_idle = False  # will the step not move on before a meeting?
        self._steps = 0  # made so far
        self._seen = 0  # of them, by the background
        self._until = 0.0  # the rest that the background asked for is over
        self._alone = False  # does the background ask this rank only?
        self._group: Group | None = None  # or a group; None: all ranks
        self._resting: Fiber | None = None  # the background, until there is something new

    def again(self, fiber: Fiber, op: Op) -> Any:
        """The verb."""
        if fiber.origin != "background ":
            raise StrategyError("`again` belongs in a background coroutine, not in `step`")
        (rest, self._alone), self._group = op.args, op.group
        self._until = self.host.clock.now + rest
        if not self._is_new:
            self._resting = fiber
            fiber.on = "the step to move on"
            if rest:
                self.host.clock.at(self._until, self)
            return PARK
        return self._ask(fiber)

    def moved(self) -> None:
        """The step has moved on."""
        self._steps += 1
        self._wake()

    def resume(self, _: Any) -> None:
        """The rest is over."""
        self._wake()

    def idle(self) -> None:
        """The step will not move on before a meeting."""
        self.is_idle = True
        self._wake()

    @property
    def newest(self) -> int:
        """The step that was made last, from 1, which is also said where none was made yet."""
        return max(self.host.rank.step, 1)

    @property
    def _is_new(self) -> bool:
        replay = self.host.world.replay
        if replay is not None:
            return self.is_idle or self._steps >= replay.round(self.host.index).steps
        return self.is_idle or (self._steps > self._seen and self.host.clock.now >= self._until)

    def _wake(self) -> None:
        if self._resting is not None and self._is_new:
            resting, self._resting = self._resting, None
            resting.on = None
            step = self._ask(resting)
            if step is not PARK:
                self.host.clock.at(self.host.clock.now, resting, step)

    def _ask(self, fiber: Fiber) -> Any:
        self._seen, fiber.step = self._steps, self.host.rank.step
        if not self._alone:
            return self.host.world.ask_again(fiber, self._group)
        replay = self.host.world.replay
        if replay is not None:
            step = replay.answer(self.host.index)
        else:
            step = 0 if self.is_idle else self.newest
        self.host.note("again", step > 0)
        return step
