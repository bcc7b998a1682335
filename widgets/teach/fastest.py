"""The exercise to make a step nearly as fast as the judge's best; also the cost of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from widgets.teach.exercises import Exercise, ExerciseResult, where_time_goes, why_forbidden
from workbench import analysis
from workbench.experiment import Experiment, user_input
from workbench.run import plan, require_memory


class Fastest(Exercise):
    """Find settings that make a step nearly as short as the best of `tried`, by the simulator.

    start: an experiment with a pace, which sets the compute time. Its `memory_mb` is a limit
    where: the question's ending, if a lesson asks it more than once
    tried: settings that the judge tries once, in the first check
    within: the allowed ratio to the shortest step, 1.05 for 5 % more
    may: settings that an answer may change, with their inner settings

    `check` reports errors as text and raises none.
    """

    def __init__(self, start: Experiment, tried: Iterable[Mapping[str, Any]], within: float = 1.05, *,
                 may: Sequence[str] = ("strategy", "bucket_mb"), hints: Sequence[str] | str = (),
                 where: str = "") -> None:  # fmt: skip
        super().__init__(f"a step within {(within - 1) * 100:.2g} % of the shortest{where}", self._look, hints)
        self.start, self.tried, self.within, self.may = start, [dict(one) for one in tried], within, tuple(may)

    def took(self, settings: Mapping[str, Any]) -> float:
        """Returns seconds per step. Raises KnobError if the settings are refused or do not fit."""
        e = user_input.turned(self.start, settings.items())
        require_memory(e)
        return plan(e, strategies=[e.strategy], partitions=[e.partition])[0].step_s

    @cached_property
    def best(self) -> float:
        """Seconds per step under the best of `tried`. Raises ValueError if none is possible."""
        return min(seconds for seconds in map(self._try_settings, self.tried) if seconds)

    def _try_settings(self, settings: Mapping[str, Any]) -> float:
        """Returns `took`; 0 for impossible settings."""
        try:
            return self.took(settings)
        except ValueError:
            return 0.0

    def _look(self, settings: Mapping[str, Any]) -> ExerciseResult:
        if fixed := why_forbidden(settings, self.may, self.start):
            return False, fixed
        try:
            took = self.took(settings)
        except ValueError as error:
            return False, f"It cannot be: {error}."
        over = f"{took * 1e3:.0f} ms per step, {took / self.best:.3f} times the judge's shortest"
        if took <= self.within * self.best:
            return True, f"Found: {over}."
        return False, f"Not yet: {over} (the limit is {self.within:g})."


def what_it_takes(run: Any, last: int = 5) -> dict[str, float]:
    """Measures rank 0 in the last steps without evaluations: peak MB by category, MB sent and ms per step."""
    first, stop = analysis.last_steps(run.timeline, last)
    held = analysis.measure_memory(run.timeline, first, stop)[0]
    most = {name: nbytes / 1e6 for name, nbytes in held.most.items() if nbytes >= 5e4 and name != "evaluation"}
    sent = float(analysis.bytes_per_step(run.timeline, first, stop).mean()) / 1e6
    found = {name: round(mb, 1) for name, mb in {**most, "peak": held.peak / 1e6}.items()}
    return {**found, "sent": round(sent, 2), "ms": where_time_goes(run, last)["step"]}
