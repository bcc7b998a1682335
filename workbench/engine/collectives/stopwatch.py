"""Times of operations: the host's clock on a CPU, events read steps later on a GPU."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.engine.collectives.shaping import Clock
from workbench.engine.device import Chip

MAX_STEPS_AHEAD = 2  # steps that the host may be ahead of the chip
TIE_INTERVAL = 10.0  # seconds between 2 ties of events to the host's clock: elapsed times are single precision
MAX_TIE_SECONDS = 1e-3  # longer ties are not used
MIN_CODEC_SECONDS = 100e-6  # a child's own work that takes less gets no span


class Stopwatch:
    """An operation is over when its call returns. losses: (step, mean loss) not recorded yet"""

    def __init__(self, clock: Clock, record: Any) -> None:
        self.clock, self.record = clock, record
        self.now: Callable[[], Any] = clock.now
        self.write_span: Callable[..., None] = record.span
        self.losses: deque[tuple[int, float]] = deque()
        self.check_peers: Callable[[], None] = lambda: None

    def end_span(self, step: int, name: str, began: Any) -> None:
        self.write_span(step, "compute", name, began, began, self.now(), 0)

    def queue_loss(self, step: int, values: list[Tensor]) -> None:
        numbers = [float(v) for v in values]
        self.losses.append((step, sum(numbers) / len(numbers)))

    def end_step(self) -> None:
        """Ends a step."""

    def await_events(self) -> None:
        """Waits for all open events, and records their times."""

    def record_reached(self, step: int) -> None:
        """Records all known times after a failure."""


class TimedEvent:
    """An event, and the origin of its time: (event, host's seconds)."""

    __slots__ = ("event", "zero")

    def __init__(self, event: Any, zero: tuple[Any, float]) -> None:
        self.event, self.zero = event, zero


class EventStopwatch(Stopwatch):
    """For a chip that runs ahead: the host reads an event after the chip has reached it.

    look: called while the host waits for the end of an earlier step; raises if the rank must leave
    """

    def __init__(self, chip: Chip, clock: Clock, record: Any, look: Callable[[], None]) -> None:
        super().__init__(clock, record)
        self.chip = chip
        self.check_peers = look
        self.now, self.write_span = self._record_event, self._queue_span
        self._rows: deque[tuple[Any, ...]] = deque()
        self._numbers: deque[tuple[int, Tensor, Any]] = deque()
        self._ends: deque[Any] = deque()  # at the ends of the latest steps
        self._idle = chip.make_stream()  # no work is queued here, so the chip reaches its events at once
        self._zero = (None, 0.0)
        self._tie_clocks(sure=False)

    def queue_loss(self, step: int, values: list[Tensor]) -> None:
        mean = values[0] if len(values) == 1 else torch.stack(values).double().mean()
        self._numbers.append((step, *self.chip.copy_out(mean)))

    def end_step(self) -> None:
        self._ends.append(self.chip.record_event())
        while len(self._ends) > MAX_STEPS_AHEAD:
            self.chip.block_until(self._ends.popleft(), self.check_peers)
        self._read_events()
        if self.clock.now() - self._zero[1] > TIE_INTERVAL:
            self._tie_clocks(sure=True)

    def await_events(self) -> None:
        while self._ends:
            self.chip.block_until(self._ends.popleft(), self.check_peers)
        for _, _, event in self._numbers:
            self.chip.block_until(event, self.check_peers)
        for row in self._rows:
            self.chip.block_until(row[-1], self.check_peers)
        self._read_events()

    def record_reached(self, step: int) -> None:
        with contextlib.suppress(RuntimeError):  # a chip that failed answers no more
            self._read_events()
            if peak := self.chip.peak_bytes():
                self.record.sample(step, "gpu_bytes_peak", self.clock.now(), peak)

    def _record_event(self) -> TimedEvent:
        return TimedEvent(self.chip.record_timed_event(), self._zero)

    def _queue_span(self, step: int, lane: str, name: str, asked: Any, t0: Any, t1: Any, nbytes: int) -> None:
        if not isinstance(t1, TimedEvent):
            return self.record.span(step, lane, name, asked, t0, t1, nbytes)
        self._rows.append((step, lane, name, asked, t0, t1, nbytes, t1.event))

    def _read_events(self) -> None:
        """Records rows and losses in order, while the chip has reached their events."""
        reached = self.chip.has_reached
        while self._numbers and reached(self._numbers[0][2]):
            step, there, _ = self._numbers.popleft()
            self.losses.append((step, float(there)))
        while self._rows and reached(self._rows[0][-1]):
            step, lane, name, asked, t0, t1, nbytes, _ = self._rows.popleft()
            times = [self._time_of(t) for t in (asked, t0, t1)]
            if lane not in ("codec", "measuring") or nbytes or times[2] - times[1] > MIN_CODEC_SECONDS:
                self.record.span(step, lane, name, *times, nbytes)

    def _time_of(self, moment: Any) -> float:
        event, since = moment.zero
        return since + self.chip.seconds_between(event, moment.event)

    def _tie_clocks(self, sure: bool) -> None:
        """Uses an event on an idle stream, which the chip reaches within microseconds."""
        with self.chip.use_stream(self._idle):
            before = self.clock.now()
            event = self.chip.record_timed_event()
            self.chip.block_until(event, self.check_peers)
            after = self.clock.now()
        if not sure or after - before < MAX_TIE_SECONDS:
            self._zero = (event, (before + after) / 2)


def make_stopwatch(chip: Chip, clock: Clock, record: Any, look: Callable[[], None]) -> Stopwatch:
    """Returns an EventStopwatch if the chip runs ahead, else a Stopwatch."""
    return EventStopwatch(chip, clock, record, look) if chip.runs_ahead else Stopwatch(clock, record)
