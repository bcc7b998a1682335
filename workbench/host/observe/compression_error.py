"""Measures the error of compression, at the same steps on every rank.

Every `measure_every` steps a stand-in replaces the compressor for one step, never in two exchanges in a row. Rank 0
records the Samples "compression_error", "compression_cosine" and "residual_ratio".
"""

from __future__ import annotations

from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from workbench.compressors._gain import Gain, feeds, gains
from workbench.compressors._measured import Measured, lossy
from workbench.experiment import Experiment
from workbench.host.observe.measuring_view import MeasuringView
from workbench.rank import Op, Rank

S = TypeVar("S", Gain, Measured)  # a compressor's stand-in


class CompressionErrorProbe:
    """Decides by steps and exchanges when to measure, so ranks in step agree."""

    def __init__(self) -> None:
        self.last = 0  # last measured step
        self.rests = False

    def measure_step(self, run: MeasuringView) -> Coroutine[Op, Any, int | None]:
        """Returns the strategy's step, measured if it is due."""
        e = run.experiment
        step = e.strategy.step(run.rank.replicas, run.state)
        if run.flushing:
            return step
        if "gradient_sent" in run.policy_runner.names and _exchanges_in_step(e) and gains(e.compressor):
            step = _run_weighed(run, step)
        return self._run_measured(run, step) if is_measurable(e) else step

    async def _run_measured(self, run: MeasuringView, step: Coroutine[Op, Any, int | None]) -> int | None:
        rank = run.rank
        due = rank.step - self.last >= run.experiment.measure_every and not self.rests
        with _exchange_by(rank, Measured(rank.compressor, due)) as stand_in:
            made = await step
        if not stand_in.used:
            return made
        self.rests = due
        if due:
            self.last = rank.step
            for name, value in stand_in.found().items() if rank.id == 0 else ():
                run.sample(name, value)
        return made


@contextmanager
def _exchange_by(rank: Rank, stand_in: S) -> Iterator[S]:
    """Inside, `rank` exchanges by `stand_in`."""
    of, rank.compressor = rank.compressor, stand_in
    try:
        yield stand_in
    finally:
        rank.compressor = of


async def _run_weighed(run: MeasuringView, step: Coroutine[Op, Any, int | None]) -> int | None:
    """Records for a policy how much of its gradient this rank sends."""
    rank = run.rank
    with _exchange_by(rank, Gain(rank.compressor, feeds(run.experiment.compressor))) as stand_in:
        made = await step
    for name, value in stand_in.found().items():
        run.sample(name, value)
    return made


def _exchanges_in_step(e: Experiment) -> bool:
    s = e.strategy
    return s.lockstep and not (s.in_flight or s.opaque) and s.workers == 1


def is_measurable(e: Experiment) -> bool:
    """Whether all ranks use a lossy compressor in the same steps."""
    return bool(e.measure_every) and _exchanges_in_step(e) and lossy(e.compressor)
