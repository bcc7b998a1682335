"""When compute happened: read from the clock on CPUs, from events after the step on CUDA."""

from __future__ import annotations

from typing import Any

import torch

from workbench.engine.shaping import Clock


class Watch:
    """Times compute by the host's clock: on a CPU an operation is over when its call returns."""

    def __init__(self, clock: Clock, record: Any) -> None:
        self.clock, self.record = clock, record

    def now(self) -> Any:
        return self.clock.now()

    def span(self, step: int, name: str, began: Any) -> None:
        self.record.span(step, "compute", name, began, began, self.clock.now(), 0)

    def settle(self) -> None:
        """Called once a step is over."""


class CudaWatch(Watch):
    """Times compute by CUDA events, read after the step: calls return long before the work is done."""

    def __init__(self, clock: Clock, record: Any) -> None:
        super().__init__(clock, record)
        self._spans: list[tuple[int, str, torch.cuda.Event, torch.cuda.Event]] = []
        self._base()

    def now(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def span(self, step: int, name: str, began: torch.cuda.Event) -> None:
        self._spans.append((step, name, began, self.now()))

    def settle(self) -> None:
        torch.cuda.synchronize()
        spans, self._spans = self._spans, []
        for step, name, first, last in spans:
            t0, t1 = self._at(first), self._at(last)
            self.record.span(step, "compute", name, t0, t0, t1, 0)
        self._base()

    def _base(self) -> None:
        """Ties an event to the clock anew after every step: elapsed times are single precision."""
        torch.cuda.synchronize()
        self._zero = self.now()
        torch.cuda.synchronize()
        self._zero_at = self.clock.now()

    def _at(self, event: torch.cuda.Event) -> float:
        return self._zero_at + self._zero.elapsed_time(event) * 1e-3


def watch(device: str, clock: Clock, record: Any) -> Watch:
    """The watch for this device."""
    return CudaWatch(clock, record) if device.startswith("cuda") else Watch(clock, record)
