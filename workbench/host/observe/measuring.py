"""Measuring: when a rank finds out what compression does, the same on every rank and every host.

Every so many steps (`measure_every`) a stand-in takes the compressor's place for one step. Never two exchanges in a row
are measured, so that there are always others to compare. Written down are the Samples "compression_error",
"compression_cosine" and "residual_ratio", one each per measured step, by rank 0.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from workbench.compressors._gain import Gain, feeds, gains
from workbench.compressors._measured import Measured, lossy
from workbench.experiment import Experiment
from workbench.host.core.changing import Changing
from workbench.rank import Op


class Measuring:
    """When one rank measures. Where all keep step, all answer alike, for only the steps and the exchanges are asked."""

    def __init__(self) -> None:
        self.last = 0  # the step that was measured last
        self.rests = False  # was the last exchange measured?

    def step(self, run: Changing) -> Coroutine[Op, Any, Any]:
        """A step of the run's strategy, measured if it is time."""
        e = run.experiment
        step = e.strategy.step(run.rank.replicas, run.state)
        if run.flushing:
            return step
        if "gradient_sent" in run.steering.names and _alike(e) and gains(e.compressor):
            step = _weighed(run, step)
        return self._watched(run, step) if measurable(e) else step

    async def _watched(self, run: Changing, step: Coroutine[Op, Any, Any]) -> Any:
        rank = run.rank
        due = rank.step - self.last >= run.experiment.measure_every and not self.rests
        stand_in = rank.compressor = Measured(rank.compressor, due)
        made = await step
        rank.compressor = stand_in.of
        if not stand_in.used:
            return made
        self.rests = due
        if due:
            self.last = rank.step
            for name, value in stand_in.found().items() if rank.id == 0 else ():
                run.sample(name, value)
        return made


async def _weighed(run: Changing, step: Coroutine[Op, Any, Any]) -> Any:
    """The step, in which each rank adds up how much of its gradient it sends; for a policy that goes by it."""
    rank = run.rank
    stand_in = rank.compressor = Gain(rank.compressor, feeds(run.experiment.compressor))
    made = await step
    rank.compressor = stand_in.of
    for name, value in stand_in.found().items():
        run.sample(name, value)
    return made


def _alike(e: Experiment) -> bool:
    """Do all ranks exchange in the same steps?"""
    s = e.strategy
    return s.lockstep and not (s.in_flight or s.opaque) and s.workers == 1


def measurable(e: Experiment) -> bool:
    """Is something compressed, by all ranks in the same steps, and wanted to be measured?"""
    return bool(e.measure_every) and _alike(e) and lossy(e.compressor)
