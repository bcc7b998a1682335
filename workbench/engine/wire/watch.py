"""Times of operations: from the host's clock on a CPU, from events read steps later on a GPU."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workbench.engine.device import Chip
from workbench.engine.wire.shaping import Clock

AHEAD = 2  # steps that the host may be ahead of the chip
TIE_EVERY = 10.0  # seconds between 2 ties of events to the host's clock: elapsed times are single precision
SURE = 1e-3  # seconds: a tie that takes longer is not used
CODEC_FLOOR = 100e-6  # seconds: a child's own work that takes less gets no span


class Watch:
    """Times by the host's clock: an operation is over when its call returns.

    losses: (step, mean loss) not recorded yet
    """

    def __init__(self, clock: Clock, record: Any) -> None:
        self.clock, self.record = clock, record
        self.now: Callable[[], Any] = clock.now
        self.write: Callable[..., None] = record.span
        self.losses: deque[tuple[int, float]] = deque()
        self.look: Callable[[], None] = lambda: None

    def span(self, step: int, name: str, began: Any) -> None:
        self.write(step, "compute", name, began, began, self.now(), 0)

    def loss(self, step: int, values: list[Tensor]) -> None:
        """Queues the mean of the losses of a step's micro-batches."""
        numbers = [float(v) for v in values]
        self.losses.append((step, sum(numbers) / len(numbers)))

    def settle(self) -> None:
        """Ends a step."""

    def flush(self) -> None:
        """Waits for all open events, and records their times."""

    def salvage(self, step: int) -> None:
        """Records all known times after a failure."""


class Moment:
    """An event, and the origin of its time: (event, host's seconds)."""

    __slots__ = ("event", "zero")

    def __init__(self, event: Any, zero: tuple[Any, float]) -> None:
        self.event, self.zero = event, zero


class LateWatch(Watch):
    """Times by events of a chip that runs ahead. The host reads an event after the chip has reached it.

    look: called while the host waits for the end of an earlier step; raises if the rank must leave
    """

    def __init__(self, chip: Chip, clock: Clock, record: Any, look: Callable[[], None]) -> None:
        super().__init__(clock, record)
        self.chip = chip
        self.look = look
        self.now, self.write = self._now, self._write
        self._rows: deque[tuple[Any, ...]] = deque()
        self._numbers: deque[tuple[int, Tensor, Any]] = deque()
        self._ends: deque[Any] = deque()  # events at the ends of the latest steps
        self._idle = chip.stream()  # no work is ever queued here, so the chip reaches its events at once
        self._zero = (None, 0.0)
        self._tie(sure=False)

    def loss(self, step: int, values: list[Tensor]) -> None:
        mean = values[0] if len(values) == 1 else torch.stack(values).double().mean()
        self._numbers.append((step, *self.chip.out(mean)))

    def settle(self) -> None:
        self._ends.append(self.chip.mark())
        while len(self._ends) > AHEAD:
            self.chip.await_host(self._ends.popleft(), self.look)
        self._read()
        if self.clock.now() - self._zero[1] > TIE_EVERY:
            self._tie(sure=True)

    def flush(self) -> None:
        while self._ends:
            self.chip.await_host(self._ends.popleft(), self.look)
        for _, _, event in self._numbers:
            self.chip.await_host(event, self.look)
        for row in self._rows:
            self.chip.await_host(row[-1], self.look)
        self._read()

    def salvage(self, step: int) -> None:
        with contextlib.suppress(RuntimeError):  # a chip that failed answers no more
            self._read()
            if peak := self.chip.peak():
                self.record.sample(step, "gpu_bytes_peak", self.clock.now(), peak)

    def _now(self) -> Moment:
        return Moment(self.chip.moment(), self._zero)

    def _write(self, step: int, lane: str, name: str, asked: Any, t0: Any, t1: Any, nbytes: int) -> None:
        if not isinstance(t1, Moment):
            return self.record.span(step, lane, name, asked, t0, t1, nbytes)
        self._rows.append((step, lane, name, asked, t0, t1, nbytes, t1.event))

    def _read(self) -> None:
        """Records the rows and losses with events that the chip has reached, in order."""
        reached = self.chip.reached
        while self._numbers and reached(self._numbers[0][2]):
            step, there, _ = self._numbers.popleft()
            self.losses.append((step, float(there)))
        while self._rows and reached(self._rows[0][-1]):
            step, lane, name, asked, t0, t1, nbytes, _ = self._rows.popleft()
            times = [self._at(t) for t in (asked, t0, t1)]
            if lane not in ("codec", "measuring") or nbytes or times[2] - times[1] > CODEC_FLOOR:
                self.record.span(step, lane, name, *times, nbytes)

    def _at(self, moment: Any) -> float:
        event, since = moment.zero
        return since + self.chip.seconds(event, moment.event)

    def _tie(self, sure: bool) -> None:
        """Ties events to the host's clock, by an event on an idle stream: it is reached within microseconds."""
        with self.chip.inside(self._idle):
            before = self.clock.now()
            event = self.chip.moment()
            self.chip.await_host(event, self.look)
            after = self.clock.now()
        if not sure or after - before < SURE:
            self._zero = (event, (before + after) / 2)


def watch(chip: Chip, clock: Clock, record: Any, look: Callable[[], None]) -> Watch:
    """Returns a LateWatch if the chip runs ahead, else a Watch."""
    return LateWatch(chip, clock, record, look) if chip.runs_ahead else Watch(clock, record)
