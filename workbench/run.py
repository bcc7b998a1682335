"""Run, as people meet it: the record's data, and what is asked of it most; and `simulate`, which makes one.

A door like `workbench.lab`: rooms inside pass the data alone (`workbench.record.run.Run`) and call functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench import analysis
from workbench.analysis.summary.frames import Frames
from workbench.record import checkpoints as recorded
from workbench.record import kineto
from workbench.record import run as record
from workbench.record.display import dashboard, face, show
from workbench.record.kept import kept
from workbench.record.store import RunError as RunError
from workbench.settings import Change, KnobError, each, short

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from workbench.experiment import Experiment
    from workbench.sim import Costs
    from workbench.sim.plan.advice import Advised
    from workbench.sim.plan.balancer import Balanced
    from workbench.sim.plan.planner import Planned
    from workbench.sim.plan.scaling import Scaling
    from workbench.sim.plan.space import Trying
    from workbench.sim.plan.trials import Tuned
    from workbench.sim.plan.what_if import WhatIf
    from workbench.sim.run.resuming import Resumed
    from workbench.sim.tune.on_ranks import Training
    from workbench.sim.tune.tuning import Tuning


class Checkpoint(recorded.Checkpoint):
    """A checkpoint on disk, opened for reading; no ranks are needed for that.

    `Checkpoint.open(path)` takes its folder, or the directory of a run, and then opens the newest. `step` is the step
    before which it was made, `ranks` how many ranks trained, `settings` their settings as plain values.
    """

    def model(self, task: Any = None, into: nn.Module | None = None) -> nn.Module:
        """The trained model, on the CPU.

        task: of a checkpoint whose Task the settings do not tell; into: a model that takes the values, and is returned

        Each file's digest is verified before a value of it is used. Raises RunError if a file is damaged, and KnobError
        if the settings or the model are of another task.
        """
        from workbench.sim.run.resuming import model_of

        return model_of(self, task, into)


def plan(
    experiment: Experiment, *, costs: Costs | None = None, strategies: Iterable[Any] = (),
    partitions: Iterable[Any] = (),
) -> list[Planned]:  # fmt: skip
    """Pairs of strategy and partition that fit, the fastest first. See `workbench.sim.plan.planner`, which this is."""
    from workbench.sim.plan.planner import plan

    return plan(experiment, costs=costs, strategies=strategies, partitions=partitions)


def balance(
    experiment: Experiment, *, times: Sequence[tuple[float, float]] | None = None,
    slow: Sequence[float] | record.Run | None = None, rounds: int = 9,
) -> Balanced:  # fmt: skip
    """Cuts that make a pipeline's slowest stage fastest. See `workbench.sim.plan.balancer`, which this is."""
    from workbench.sim.plan.balancer import balance

    return balance(experiment, times=times, slow=slow, rounds=rounds)


def tune(on: Experiment | Training, paths: Trying = None, **how: Any) -> Tuned:
    """Settings with which a step is shortest, searched by trying. See `workbench.sim.tune.tuner`, which this is."""
    from workbench.sim.tune.tuner import tune

    return tune(on, paths, **how)


def tuning(on: Training, paths: Trying = None, **how: Any) -> Tuning:
    """The same on ranks that train, begun and not waited for. See `workbench.sim.tune.tuning`, which this is."""
    from workbench.sim.tune.tuning import Tuning

    return Tuning(on, paths, **how).start()


def resumed(path: Path | str, wanted: Experiment | None, changes: Sequence[Change] | None, most: int) -> Resumed:
    """How a run goes on from the checkpoint at `path`. Raises KnobError, RunError. See `workbench.sim.run.resuming`."""
    from workbench.sim.run.resuming import resumed

    return resumed(Checkpoint.open(path), wanted, changes, most)


def settings_of(path: Path | str) -> Experiment:
    """Under which the checkpoint at `path` was made. Raises KnobError and RunError."""
    from workbench.sim.run.resuming import settings_of

    return settings_of(Checkpoint.open(path))


def require_memory(experiment: Experiment, path: str | Mapping[str, Any] = "", value: Any = None) -> None:
    """Raises KnobError if ranks of `experiment`, or a change of it, would need more than `memory_mb`; see sim.fits."""
    if experiment.memory_mb or (path and "memory_mb" in each(path, value)):
        from workbench.sim.run.fits import require_memory

        require_memory(experiment, path, value)


def outlined(task: Any) -> bool:
    """Is the model of this task known already, so that `refused_by_model` builds nothing?"""
    if (suits := sys.modules.get("workbench.sim.run.suits")) is None:  # asked often, and where nothing may take long
        return False
    return bool(suits.outlined(task))


def refused_by_model(experiment: Experiment) -> str:
    """Why the task's model cannot be trained so, in a sentence; "" where nothing is said. See sim.suits."""
    from workbench.sim.run.suits import refused_by_model

    return refused_by_model(experiment)


class Run(Frames):
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

    @classmethod
    def from_traces(cls, paths: Iterable[Path | str], name: str = "") -> Self:
        """A run of traces that torch.profiler wrote of any job, a file per rank, .json or .json.gz.

        Its timeline has steps, kernels or operators, collectives and what of them was exposed, so that all that is
        asked of timelines can be asked of it; see `analysis/export/taken.py`. `save` keeps it as a run directory.
        Nothing in a trace is run. Raises RunError for what is none, or too large.
        """
        every = [paths] if isinstance(paths, str | Path) else list(paths)
        if not every:
            raise RunError("traces=[]: must be files that torch.profiler wrote, one for each rank")
        traces = kineto.by_rank(kineto.read(path) for path in every)
        timeline, notes = analysis.taken(traces)
        ranks = max(traces) + 1
        files = {str(rank): trace.path.name for rank, trace in traces.items()}
        about = {"traces": files, "devices": sorted({trace.device for trace in traces.values() if trace.device})}
        title = name or Path(every[0]).resolve().parent.name or "traces"
        run = cls({"ranks": ranks}, timeline=timeline, environment=about, name=title)
        run.warnings = tuple(notes)
        return run

    def summary(self) -> dict[str, Any]:
        """The run in a few plain values."""
        return analysis.summary(self)

    def what_if(self, settings: Mapping[str, Any] | None = None, network: str = "") -> WhatIf:
        """The simulator's word on other settings, calibrated from this run. See `workbench.sim.plan.what_if`."""
        from workbench.sim.plan.what_if import what_if

        found = what_if(self, settings, network)
        return found._replace(run=type(self).of(found.run))

    def scaling(self, settings: Mapping[str, Any] | None = None, network: str = "",
                ranks: Sequence[int] | None = None) -> Scaling:  # fmt: skip
        """The same over numbers of ranks, by itself 2 to 4,096, with what is assumed. See `sim/plan/scaling.py`."""
        from workbench.sim.plan.what_if import RANKS, scaling

        return scaling(self, settings, network, RANKS if ranks is None else ranks)

    def model(
        self, step: int | None = None, task: Any = None, timeout: float = 60.0, into: nn.Module | None = None
    ) -> nn.Module:
        """The trained model, on the CPU: of a live run as it is at its next step boundary, of an ended one as it ended.

        What ranks hold is brought together as when a strategy is left: shards, slices and stages to the whole, and of
        replicas that drifted apart the mean. It is read from a checkpoint; the one of a live run stays.

        step: of the checkpoint before that step instead; task: of a recorded run, whose own functions are not in it
        timeout: seconds to wait for a live run's boundary
        into: a model that takes the values, and is returned: of a loop of its own, which alone knows how it is made

        Raises RunError where it was not kept, and says what is, TimeoutError, and KnobError of another task's settings.
        """
        from workbench.sim.run.resuming import model_of

        return model_of(*self._kept(step, task, timeout), into)

    def _kept(self, step: int | None, task: Any, timeout: float) -> tuple[Checkpoint, Any]:
        """What its model is read from, and the task that makes one."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise KnobError(f"step={short(step)}: must be the step of a checkpoint, 0 or more, or None")
        checkpoint = Checkpoint.open(kept(self, step, timeout))
        return checkpoint, self.experiment.task if task is None else task

    def save_model(self, path: Path | str, step: int | None = None, task: Any = None, timeout: float = 60.0) -> Path:
        """Writes `model(...)` to `path`: `.safetensors` as that (needs safetensors), else its state dict as torch does.

        `torch.load(path, weights_only=True)` reads the latter. Raises what `model` does, and RunError where it cannot
        be written.
        """
        from workbench.sim.run.resuming import saved_state, written_to

        return written_to(path, lambda: saved_state(*self._kept(step, task, timeout)))

    def segment(self, first: int, stop: int) -> Self:
        """Steps [first, stop) as a run of their own, to be compared, exported or looked at like any.

        >>> Run({"ranks": 2}, name="tour").segment(10, 20).name
        'tour, steps 10 to 19'
        """
        whole = [isinstance(step, int) and not isinstance(step, bool) for step in (first, stop)]
        if not all(whole) or not 0 <= first < stop:
            raise KnobError(f"first={short(first)}, stop={short(stop)}: must be steps, 0 or more, stop after first")
        name, timeline = f"{self.name}, steps {first} to {stop - 1}", analysis.segment(self.timeline, first, stop)
        return type(self)(
            self.settings, timeline=timeline, environment=self._environment, name=name, started=self.started,
            epoch=self.epoch, parent=self.parent,
        )  # fmt: skip

    def compare(self, other: record.Run, tolerance: float = 0.0) -> pd.DataFrame:
        """Compares `other` with this run, a row per metric. Less of a metric is better.

        Columns: unit, a (this run), b, difference (b - a), its 99 % interval low and high, verdict (of b: better,
        worse, alike, unknown) and why it is unknown. Of two segments of one run each is `run.segment(...)`.

        tolerance: share of a's value by which b may be worse, 0 to 10. Raises RunError for another.

        >>> Run({"ranks": 2}, name="a").compare(Run({"ranks": 2}, name="b")).verdict["step time"]
        'unknown'
        """
        import pandas as pd

        return pd.DataFrame(analysis.compare(self, other, tolerance)).set_index("metric")

    def advice(self, last: int = 40) -> Advised:
        """What cost a step most in the last so many steps, and what to try next. See `workbench.sim.plan.advice`.

        >>> Run({"ranks": 2}, name="tour").advice().unjudged[:17]
        'Too few steps to '
        """
        from workbench.sim.plan.advice import advice

        return advice(self, last)

    def export(self, to: str, out: Path | str | None = None) -> Path:
        """Writes the run for another tool, to "perfetto", "chrome", "parquet", "csv" or "tensorboard".

        `workbench.analysis.export.files` describes each. out: file or folder; by default NAME-FORM where Python runs.
        Returns where it is. Raises RunError for another form, or where it cannot be written.
        """
        from workbench.analysis.export.files import export

        return export(self, to, out)

    def as_python(self) -> str:
        """Code that runs the same experiment with the same changes."""
        from workbench.analysis.export.export import as_python

        return as_python(self)

    def __repr__(self) -> str:
        return analysis.line(self)

    def dashboard(self, read_only: bool = False) -> Any:
        """The dashboard as a widget, the same each time; with `read_only` another one, for those who may only look.

        Its `dock()` shows it in a panel beside the notebook; `state()` and `restore(state)` keep what is open on it.
        """
        return dashboard("Run", self, read_only)

    def _ipython_display_(self) -> None:
        show("Run", self)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> Any:
        return face("Run", self, include, exclude)


def simulate(
    experiment: Experiment, *, changes: Iterable[Change] = (), costs: Costs | None = None, real: bool = False,
    replay: record.Run | None = None, alike: bool = False, resume: Checkpoint | None = None,
    checkpoints: Path | None = None,
) -> Run:  # fmt: skip
    """Runs `experiment` on a virtual clock, without processes. See `workbench.sim.run.simulate`, which this is."""
    from workbench.sim import simulate

    run = Run.of(simulate(experiment, changes=changes, costs=costs, real=real, replay=replay, alike=alike,
                          resume=resume, checkpoints=checkpoints))  # fmt: skip
    for hear in tuple(record.hearers):
        hear(run)
    return run
