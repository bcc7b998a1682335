"""Run, as people meet it: the record's data, and what is asked of it most; and `simulate`, which makes one.

A door like `workbench.lab`: rooms inside pass the data alone (`workbench.record.run.Run`) and call functions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench import analysis
from workbench.record import run as record
from workbench.record.checkpoints import Checkpoint
from workbench.record.display import face, show
from workbench.record.store import RunError as RunError
from workbench.settings import Change

if TYPE_CHECKING:
    from workbench.analysis import RankMemory
    from workbench.experiment import Experiment
    from workbench.sim import Costs
    from workbench.sim.balancer import Balanced
    from workbench.sim.planner import Planned
    from workbench.sim.resuming import Resumed
    from workbench.sim.tuner import Training, Tuned
    from workbench.sim.what_if import WhatIf


def plan(
    experiment: Experiment, *, costs: Costs | None = None, strategies: Iterable[Any] = (),
    partitions: Iterable[Any] = (),
) -> list[Planned]:  # fmt: skip
    """Pairs of strategy and partition that fit, the fastest first. See `workbench.sim.planner`, which this is."""
    from workbench.sim.planner import plan

    return plan(experiment, costs=costs, strategies=strategies, partitions=partitions)


def balance(
    experiment: Experiment, *, times: Sequence[tuple[float, float]] | None = None,
    slow: Sequence[float] | record.Run | None = None, rounds: int = 9,
) -> Balanced:  # fmt: skip
    """Cuts that make a pipeline's slowest stage fastest. See `workbench.sim.balancer`, which this is."""
    from workbench.sim.balancer import balance

    return balance(experiment, times=times, slow=slow, rounds=rounds)


def tune(on: Experiment | Training, paths: Sequence[str] | None = None, **how: Any) -> Tuned:
    """Values of knobs with which a step is shortest, searched by trying. See `workbench.sim.tuner`, which this is."""
    from workbench.sim.tuner import BYTES, tune

    return tune(on, BYTES if paths is None else paths, **how)


def resumed(path: Path | str, wanted: Experiment | None, changes: Sequence[Change] | None, most: int) -> Resumed:
    """How a run goes on from the checkpoint at `path`. Raises KnobError and RunError. See `workbench.sim.resuming`."""
    from workbench.sim.resuming import resumed

    return resumed(Checkpoint.open(path), wanted, changes, most)


def settings_of(path: Path | str) -> Experiment:
    """Under which the checkpoint at `path` was made. Raises KnobError and RunError."""
    from workbench.sim.resuming import settings_of

    return settings_of(Checkpoint.open(path))


def require_memory(experiment: Experiment, path: str = "", value: Any = None) -> None:
    """Raises KnobError if ranks of `experiment`, or a change of it, would need more than `memory_mb`; see sim.fits."""
    if experiment.memory_mb or path == "memory_mb":
        from workbench.sim.fits import require_memory

        require_memory(experiment, path, value)


class Run(record.Run):
    """An experiment, its timeline and its environment; live, recorded and simulated runs are the same class.

    >>> Run({"strategy": {"LocalSGD": {"every": 8}}, "ranks": 2}, name="tour")
    Run tour: LocalSGD, 2 ranks, 0 steps in 0.0 s (cut off)
    """

    @classmethod
    def of(cls, run: record.Run) -> Self:
        """The same ended run, with the methods below."""
        return cls(
            run.experiment, timeline=run.timeline, environment=run._environment, name=run.name, started=run.started,
            epoch=run.epoch, parent=run.parent,
        )  # fmt: skip

    def summary(self) -> dict[str, Any]:
        """The run in a few plain values."""
        return analysis.summary(self)

    def memory(self, last: int | None = None) -> list[RankMemory]:
        """By rank, what its memory held at most in the last so many steps, or in all: bytes by category, and the peak.

        >>> Run({"ranks": 2}, name="tour").memory()
        []
        """
        stop = analysis.last_steps(self.timeline)[1]
        return analysis.memory(self.timeline, 0 if last is None else max(0, stop - last))

    def what_if(self, settings: Mapping[str, Any] | None = None) -> WhatIf:
        """The simulator's word on other settings, calibrated from this run. See `workbench.sim.what_if`."""
        from workbench.sim.what_if import what_if

        found = what_if(self, settings)
        return found._replace(run=type(self).of(found.run))

    def as_python(self) -> str:
        """Code that runs the same experiment with the same changes."""
        from workbench.analysis.export import as_python

        return as_python(self)

    def __repr__(self) -> str:
        return analysis.line(self)

    def _ipython_display_(self) -> None:
        show("Run", self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return face("Run", self, include, exclude)


def simulate(
    experiment: Experiment, *, changes: Iterable[Change] = (), costs: Costs | None = None, real: bool = False,
    replay: record.Run | None = None, alike: bool = False, resume: Checkpoint | None = None,
    checkpoints: Path | None = None,
) -> Run:  # fmt: skip
    """Runs `experiment` on a virtual clock, without processes. See `workbench.sim.simulate`, which this is."""
    from workbench.sim import simulate

    return Run.of(simulate(experiment, changes=changes, costs=costs, real=real, replay=replay, alike=alike,
                           resume=resume, checkpoints=checkpoints))  # fmt: skip
