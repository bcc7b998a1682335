"""Schedules a background's rounds: at most one per step, because nothing is new in between."""

from __future__ import annotations

from typing import Any

from workbench.rank import Group, Op, StrategyError
from workbench.sim.clock.fiber import PARKED, Fiber, HostView


class BackgroundRounds:
    """A rank's verb `again`. A replay answers it after the same steps as the engine."""

    def __init__(self, host: HostView) -> None:
        self.host = host
        self.is_idle = False  # whether the step waits for a meeting
        self._steps = 0  # steps so far
        self._seen = 0  # by the background
        self._until = 0.0  # the end of the rest that the background requested
        self._alone = False  # whether the background involves only this rank
        self._group: Group | None = None  # None: all ranks
        self._resting: Fiber | None = None  # the background, until a step is new

    def next_step(self, fiber: Fiber, op: Op) -> Any:
        if fiber.origin != "background ":
            raise StrategyError("`again` belongs in a background coroutine, not in `step`")
        (rest, self._alone), self._group = op.args, op.group
        self._until = self.host.clock.now + rest
        if not self._is_new:
            self._resting = fiber
            if rest:
                self.host.clock.resume_at(self._until, self)
            return fiber.park("the step to move on")
        return self._answer_round(fiber)

    def note_step(self) -> None:
        self._steps += 1
        self._wake_background()

    def resume(self, _: Any) -> None:
        self._wake_background()

    def note_idle(self) -> None:
        self.is_idle = True
        self._wake_background()

    def note_busy(self) -> None:
        self.is_idle = False

    @property
    def newest_step(self) -> int:
        """1 before the first step."""
        return max(self.host.rank.step, 1)

    @property
    def _is_new(self) -> bool:
        replay = self.host.world.replay
        if replay is not None and (recorded := replay.peek_round(self.host.index)) is not None:
            return self.is_idle or self._steps >= recorded.steps
        return self.is_idle or (self._steps > self._seen and self.host.clock.now >= self._until)

    def _wake_background(self) -> None:
        if self._resting is not None and self._is_new:
            resting, self._resting = self._resting, None
            step = self._answer_round(resting)
            if step is not PARKED:
                resting.wake_at(self.host.clock.now, step)

    def _answer_round(self, fiber: Fiber) -> Any:
        self._seen = self._steps
        fiber.enter_step()
        if not self._alone:
            return self.host.world.answer_round(fiber, self._group)
        replay = self.host.world.replay
        step = None if replay is None else replay.next_answer(self.host.index)
        if step is None:
            step = 0 if self.is_idle else self.newest_step
        self.host.note("again", step > 0)
        return step
