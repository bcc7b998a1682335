"""Records what a host knows at the end of a phase or a step; a chip that runs ahead delays this."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.engine.wire.lane import Lane
from workbench.engine.wire.shaping import Pace
from workbench.engine.wire.watch import Watch
from workbench.rank import Rank


class StepEnd:
    """The part of a Host that ends phases and steps."""

    at: Any
    clock: Any
    lane: Lane
    losses: list[Tensor]
    pace: Pace
    rank: Rank
    record: Any
    watch: Watch

    def paced(self, fraction: float) -> None:
        """Notes that `fraction` of a phase is computed. With a pace or a fault, waits for a chip that runs ahead."""
        if not self.pace.active:
            return
        if self.lane.chip.runs_ahead:
            self.lane.chip.await_host(self.lane.chip.mark(), self.watch.look)
        self.pace.reach(fraction)

    def close_step(self, told: Callable[[int, float], None]) -> None:
        """Ends the step on this thread: records its loss and its pace, as far as they are known."""
        if self.losses:  # a step without a forward has none
            self.watch.loss(self.rank.step, self.losses)
            self.losses.clear()
        if self.lane.chip.runs_ahead:
            self.at("its chip", waits=True)
        self.watch.settle()
        if said := self.pace.over():
            self.record.mark(self.rank.step, "pace", self.clock.now(), json.dumps(said))
        self._tell(told)

    def catch_up(self, told: Callable[[int, float], None]) -> None:
        """Waits for this rank's chip to finish, and records the losses."""
        self.watch.flush()
        self._tell(told)

    def _tell(self, told: Callable[[int, float], None]) -> None:
        """Records the losses known by now, and passes them to `told`. Each is the mean of a step's."""
        while self.watch.losses:
            step, loss = self.watch.losses.popleft()
            self.record.sample(step, "loss", self.clock.now(), loss)
            told(step, loss)
