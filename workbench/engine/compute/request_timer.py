"""Times compute outside the passes of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.pipeline import PipelinePerformer


class RequestTimer:
    """The times of a strategy's requests to compute, each a span."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, pipeline: PipelinePerformer) -> None:
        self._rank, self._at, self._pace, self._watch = parts.rank, parts.at, parts.pace, parts.watch
        self._timing, self._pipeline = timing, pipeline

    @property
    def step(self) -> int:
        return self._rank.step

    @contextmanager
    def time_request(self, name: str, *phases: str) -> Iterator[None]:
        """Records the block as a span. With a pace, it lasts as long as these phases."""
        self._at(name)
        began = self._watch.now()
        for number, phase in enumerate(phases):
            if number:
                self._timing.reach_fraction(1.0)
            self._pace.begin_phase(phase, self._rank.step, self._pipeline.share)
        yield
        if phases:
            self._timing.reach_fraction(1.0)
        self._watch.end_span(self._rank.step, name, began)

    def sample(self, name: str, value: float) -> None:
        self._watch.record.sample(self._rank.step, name, self._watch.clock.now(), float(value))
