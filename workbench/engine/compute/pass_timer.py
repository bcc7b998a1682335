"""Keeps the pace of passes and records their times, later if the chip runs ahead."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.shaping import ComputePace
from workbench.engine.collectives.stopwatch import MIN_CODEC_SECONDS, Stopwatch
from workbench.engine.compute.activity import Activity
from workbench.rank import Rank


class PassTimer:
    """A pass is a forward or a backward, of the model or of a part of it. losses: of the present step"""

    def __init__(self, rank: Rank, lane: Lane, pace: ComputePace, watch: Stopwatch, at: Activity) -> None:
        self._rank, self._chip, self._pace, self._watch, self._at = rank, lane.chip, pace, watch, at
        self._pass: tuple[str, Any] | None = None  # its name, and since when it computes without a wait
        self.losses: list[Tensor] = []

    def begin_pass(self, name: str, phase: str, share: float, again: float = 0.0) -> None:
        """share, again: the parts of the phase and of the forward that it recomputes. See `ComputePace`."""
        self._pass = name, self._watch.now()
        self._pace.begin_phase(phase, self._rank.step, share, again)

    def end_pass(self) -> None:
        self.reach_fraction(1.0)
        self._write_pass()

    def reach_fraction(self, fraction: float) -> None:
        """Notes that `fraction` of a phase is computed. With a pace or a fault, waits for a chip that runs ahead."""
        if not self._pace.is_active:
            return
        if self._chip.runs_ahead:
            self._chip.block_until(self._chip.record_event(), self._watch.check_peers)
        self._pace.reach_fraction(fraction)

    def _write_pass(self) -> None:
        assert self._pass is not None
        name, since = self._pass
        self._watch.end_span(self._rank.step, name, since)
        self._pass = None

    @property
    def is_computing(self) -> bool:
        return self._pass is not None

    @contextmanager
    def interrupt_pass(self, name: str) -> Iterator[None]:
        """Runs another pass in the middle of the present one, as a span of its own."""
        around = self._pass
        if around is not None:
            self._write_pass()
        since = self._watch.now()
        yield
        self._watch.end_span(self._rank.step, name, since)
        if around is not None:
            self._pass = around[0], self._watch.now()

    def note_wait(self, asked: Any, ended: Any, seconds: float) -> None:
        """Turns the compute before a wait into a span, as on a virtual clock."""
        if self._pass is not None and (self._chip.runs_ahead or seconds > MIN_CODEC_SECONDS):
            name, since = self._pass
            self._watch.write_span(self._rank.step, "compute", name, since, since, asked, 0)
            self._pass = name, ended

    def run_codec(self, name: str, work: Callable[[], Any], nbytes: int) -> Any:
        """Runs a codec on `nbytes` that cross between or inside stages."""
        began = self._watch.now()
        value = work()
        self._watch.write_span(self._rank.step, "codec", name, began, began, self._watch.now(), nbytes)
        return value

    def close_step(self, told: Callable[[int, float], None]) -> None:
        """Records the step's loss and pace, as far as they are known."""
        if self.losses:  # none in a step without a forward
            self._watch.queue_loss(self._rank.step, self.losses)
            self.losses.clear()
        if self._chip.runs_ahead:
            self._at("its chip", waits=True)
        self._watch.end_step()
        if missed := self._pace.end_step():
            self._watch.record.mark(self._rank.step, "pace", self._watch.clock.now(), json.dumps(missed))
        self._record_losses(told)

    def catch_up(self, told: Callable[[int, float], None]) -> None:
        self._watch.await_events()
        self._record_losses(told)

    def _record_losses(self, told: Callable[[int, float], None]) -> None:
        """Records and passes to `told` each step's mean loss known by now."""
        while self._watch.losses:
            step, loss = self._watch.losses.popleft()
            self._watch.record.sample(step, "loss", self._watch.clock.now(), loss)
            told(step, loss)
