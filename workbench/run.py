"""Run, the record's data with analyses. Functions such as `simulate`, `plan` and `tune`.

This is an entry point like `workbench.lab`. Inner packages use the data alone (`workbench.record.run.Run`) and call
functions.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workbench import analysis
from workbench.analysis.summary.frames import RunFrames
from workbench.record import checkpoints as recorded
from workbench.record import kineto
from workbench.record import run as record
from workbench.record.checkpoint_request import wait_for_checkpoint
from workbench.record.display import dashboard, face, show
from workbench.record.store import RunError as RunError
from workbench.settings import Change, KnobError, each, short

if TYPE_CHECKING:
    import pandas as pd
    from torch import nn

    from workbench.experiment import Experiment
    from workbench.sim import Costs
    from workbench.sim.plan.advice import AdviceTable
    from workbench.sim.plan.balancer import BalanceProposal
    from workbench.sim.plan.planner import PlannedPair
    from workbench.sim.plan.scaling import Scaling
    from workbench.sim.plan.search_space import Trying
    from workbench.sim.plan.trials import Tuned
    from workbench.sim.plan.what_if import WhatIf
    from workbench.sim.run.resuming import ResumePlan
    from workbench.sim.tune.live_search import Tuning
    from workbench.sim.tune.trial_runner import TrainingRanks


class Checkpoint(recorded.Checkpoint):
    """A checkpoint on disk. It is opened for reading without ranks.

    `Checkpoint.open(path)` takes its folder, or a run's directory for the newest one. `step` is the step before which
    it was made. `ranks` is the number of ranks that trained. `settings` are their settings as plain values.

    path:  its folder
    said:  its manifest as plain values
    """

    def model(self, task: Any = None, into: nn.Module | None = None) -> nn.Module:
        """Returns the trained model on the CPU.

        task:  the Task if the settings do not describe it
        into:  a model that takes the values and is returned

        Verifies each file's digest before it uses a value. Raises RunError if a file is damaged. Raises KnobError if
        the settings or the model belong to another task.
        """
        from workbench.sim.run.resuming import model_of

        return model_of(self, task, into)


def plan(
    experiment: Experiment, *, costs: Costs | None = None, strategies: Iterable[Any] = (),
    partitions: Iterable[Any] = (),
) -> list[PlannedPair]:  # fmt: skip
    """Returns valid pairs of strategy and partition, fastest first. See `workbench.sim.plan.planner`.

    experiment:  the settings: ranks, task, batch and `memory_mb`
    costs:       compute times (`Costs.measured(run)`) if the experiment has no `pace`
    strategies:  by default the exact ones and the experiment's own
    partitions:  by default whole replicas with and without checkpointing, and up to 64 stages or slices

    Raises KnobError if no compute time is known, or if no pair is left.
    """
    from workbench.sim.plan.planner import plan

    return plan(experiment, costs=costs, strategies=strategies, partitions=partitions)


def balance(
    experiment: Experiment, *, times: Sequence[tuple[float, float]] | None = None,
    slow: Sequence[float] | record.Run | None = None, rounds: int = 9,
) -> BalanceProposal:  # fmt: skip
    """Returns the cuts that make a pipeline's slowest stage fastest. See `workbench.sim.plan.balancer`.

    experiment:  settings whose partition has stages
    times:       seconds of a forward and a backward of one micro-batch through each part. None: measured here
    slow:        by stage, the factor by which its ranks are slower. Or a run that gives the factors
    rounds:      number of measurements

    Raises KnobError if the partition has no stages, or if the model cannot be cut into so many.
    """
    from workbench.sim.plan.balancer import balance

    return balance(experiment, times=times, slow=slow, rounds=rounds)


def tune(on: Experiment | TrainingRanks, paths: Trying = None, **how: Any) -> Tuned:
    """Searches by trials for settings with the shortest step. See `workbench.sim.tune.tuner`.

    on:     an Experiment to simulate, or a Lab with training ranks
    paths:  live knobs to tune: values or a range `(low, high)` by knob, or a list of knobs. None: knobs that suit the
            strategy
    how:    within, trials, steps, settle, seed, costs, and the arguments of `Tuning` for a Lab

    Raises KnobError if a knob cannot be searched, the lab has no live run, or Optuna is missing. Raises RunError if the
    run ends before the trials.
    """
    from workbench.sim.tune.tuner import tune

    return tune(on, paths, **how)


def tuning(on: TrainingRanks, paths: Trying = None, **how: Any) -> Tuning:
    """Starts such a search on ranks that train, and returns at once. See `workbench.sim.tune.live_search`."""
    from workbench.sim.tune.live_search import Tuning

    return Tuning(on, paths, **how).start()


def resumed(path: Path | str, wanted: Experiment | None, changes: Sequence[Change] | None, most: int) -> ResumePlan:
    """Returns how a run continues from the checkpoint at `path`. See `workbench.sim.run.resuming`.

    Raises KnobError and RunError.
    """
    from workbench.sim.run.resuming import plan_resume

    return plan_resume(Checkpoint.open(path), wanted, changes, most)


def settings_of(path: Path | str) -> Experiment:
    """Returns the settings of the checkpoint at `path`. Raises KnobError and RunError."""
    from workbench.sim.run.resuming import settings_of

    return settings_of(Checkpoint.open(path))


def require_memory(experiment: Experiment, path: str | Mapping[str, Any] = "", value: Any = None) -> None:
    """Raises KnobError if ranks of `experiment` or of a change of it would exceed `memory_mb`. See sim.run.fits."""
    if experiment.memory_mb or (path and "memory_mb" in each(path, value)):
        from workbench.sim.run.memory_checks import require_memory

        require_memory(experiment, path, value)


def outlined(task: Any) -> bool:
    """Whether the model of this task is already known, so that `refused_by_model` builds nothing."""
    if (suits := sys.modules.get("workbench.sim.run.model_checks")) is None:
        # called often, and by callers that must not wait
        return False
    return bool(suits.is_outlined(task))


def refused_by_model(experiment: Experiment) -> str:
    """Returns why the task's model cannot train under these settings. "" if it can. See sim.run.suitability."""
    from workbench.sim.run.model_checks import refused_by_model

    return refused_by_model(experiment)


class Run(RunFrames):
    """A live, recorded or simulated run: experiment, timeline and environment.

    >>> Run({"strategy": {"LocalSGD": {"every": 8}}, "ranks": 2}, name="tour")
    Run tour: LocalSGD, 2 ranks, 0 steps in 0.0 s (cut off)
    """

    @classmethod
    def of(cls, run: record.Run) -> Self:
        """Returns the same ended run with the methods of this class.

        run:  a run of the record alone, such as an internal function returns
        """
        return cls(
            run.experiment, timeline=run.timeline, environment=run._environment, name=run.name, started=run.started,
            epoch=run.epoch, parent=run.parent,
        )  # fmt: skip

    @classmethod
    def from_traces(cls, paths: Iterable[Path | str], name: str = "") -> Self:
        """Returns a run from traces of any job by torch.profiler: one file per rank, .json or .json.gz.

        Its timeline has steps, kernels or operators, collectives and their exposed parts. So all analyses of timelines
        work. See `analysis/export/taken.py`. `save` keeps it as a run directory. Nothing in a trace is executed.

        paths:  the files, in any order
        name:   the run's name. "": that of their folder

        Raises RunError if a file is no such trace or too large, or if there are no files.
        """
        every = [paths] if isinstance(paths, str | Path) else list(paths)
        if not every:
            raise RunError("traces=[]: must be files that torch.profiler wrote, one for each rank")
        traces = kineto.by_rank(kineto.read(path) for path in every)
        timeline, notes = analysis.convert_traces(traces)
        ranks = max(traces) + 1
        files = {str(rank): trace.path.name for rank, trace in traces.items()}
        about = {"traces": files, "devices": sorted({trace.device for trace in traces.values() if trace.device})}
        title = name or Path(every[0]).resolve().parent.name or "traces"
        run = cls({"ranks": ranks}, timeline=timeline, environment=about, name=title)
        run.warnings = tuple(notes)
        return run

    def summary(self) -> dict[str, Any]:
        """Returns the run's summary as plain values."""
        return analysis.summarise_run(self)

    def what_if(self, settings: Mapping[str, Any] | None = None, network: str = "") -> WhatIf:
        """Predicts the run under other settings by a calibrated simulation. See `workbench.sim.plan.what_if`.

        settings:  values by path, such as `{"ranks": 16}`
        network:   a network's name, such as "100 GbE", in place of the run's. `settings` take precedence

        Raises KnobError if a setting is invalid or cannot be simulated. Raises ValueError without a complete step.
        """
        from workbench.sim.plan.what_if import what_if

        found = what_if(self, settings, network)
        return found._replace(run=type(self).of(found.run))

    def scaling(self, settings: Mapping[str, Any] | None = None, network: str = "",
                ranks: Sequence[int] | None = None) -> Scaling:  # fmt: skip
        """Predicts it for several numbers of ranks. See `workbench.sim.plan.scaling`.

        settings, network:  as in `what_if`
        ranks:              the numbers, up to 4096. None: 2, 4, 8, ... 4096

        Raises the errors of `what_if`.
        """
        from workbench.sim.plan.what_if import RANK_COUNTS, predict_scaling

        return predict_scaling(self, settings, network, RANK_COUNTS if ranks is None else ranks)

    def model(
        self, step: int | None = None, task: Any = None, timeout: float = 60.0, into: nn.Module | None = None
    ) -> nn.Module:
        """Returns the trained model on the CPU: at a live run's next step boundary or at the end.

        The whole model is assembled from shards, slices and stages. Drifted replicas are averaged. It comes from a
        checkpoint. The checkpoint of a live run stays.

        step:     take the checkpoint before this step instead
        task:     the Task of a recorded run, whose record lacks your own functions
        timeout:  seconds to wait for a live run's boundary
        into:     a model to fill and return. A loop of its own needs it because only the loop can make the model

        Raises RunError with the kept steps if the model was not kept. Raises TimeoutError if no checkpoint is complete
        in time. Raises KnobError if the settings are another task's.
        """
        from workbench.sim.run.resuming import model_of

        return model_of(*self._kept(step, task, timeout), into)

    def _kept(self, step: int | None, task: Any, timeout: float) -> tuple[Checkpoint, Any]:
        """Returns the checkpoint to read the model from, and the task that makes a model."""
        if step is not None and (isinstance(step, bool) or not isinstance(step, int) or step < 0):
            raise KnobError(f"step={short(step)}: must be the step of a checkpoint (0 or more) or None")
        checkpoint = Checkpoint.open(wait_for_checkpoint(self, step, timeout))
        return checkpoint, self.experiment.task if task is None else task

    def save_model(self, path: Path | str, step: int | None = None, task: Any = None, timeout: float = 60.0) -> Path:
        """Writes `model(...)` to `path`, as `.safetensors` (needs safetensors) or torch's state dict.

        `torch.load(path, weights_only=True)` reads the latter.

        path:                 the file to write
        step, task, timeout:  as in `model`

        Raises the errors of `model`. Raises RunError if it cannot write.
        """
        from workbench.sim.run.resuming import saved_state, write_state

        return write_state(path, lambda: saved_state(*self._kept(step, task, timeout)))

    def segment(self, first: int, stop: int) -> Self:
        """Returns steps `[first, stop)` as a run of their own.

        first, stop:  steps from 0

        Raises KnobError if they are not integers from 0, or `stop` is not after `first`.

        >>> Run({"ranks": 2}, name="tour").segment(10, 20).name
        'tour, steps 10 to 19'
        """
        whole = [isinstance(step, int) and not isinstance(step, bool) for step in (first, stop)]
        if not all(whole) or not 0 <= first < stop:
            raise KnobError(f"first={short(first)}, stop={short(stop)}: must be steps from 0, stop after first")
        name, timeline = f"{self.name}, steps {first} to {stop - 1}", analysis.cut_segment(self.timeline, first, stop)
        return type(self)(
            self.settings, timeline=timeline, environment=self._environment, name=name, started=self.started,
            epoch=self.epoch, parent=self.parent,
        )  # fmt: skip

    def compare(self, other: record.Run, tolerance: float = 0.0) -> pd.DataFrame:
        """Compares `other` with this run by metric. Less of a metric is better.

        The columns are `unit`, `a` (this run), `b`, `difference` (b - a), `verdict` and `why`. `low` and `high` are the
        99 % interval of the difference. The verdict on b is `better`, `worse`, `alike` or `unknown`, which `why`
        explains. To compare two segments of one run, use `run.segment(...)`.

        other:      the run b
        tolerance:  share of a's value by which b may be worse, 0 to 10

        Raises RunError for another tolerance.

        >>> Run({"ranks": 2}, name="a").compare(Run({"ranks": 2}, name="b")).verdict["step time"]
        'unknown'
        """
        import pandas as pd

        return pd.DataFrame(analysis.compare_runs(self, other, tolerance)).set_index("metric")

    def advice(self, last: int = 40) -> AdviceTable:
        """Returns the largest costs of a step and what to try next. See `workbench.sim.plan.advice`.

        last:  number of steps that it judges, up to the newest

        >>> Run({"ranks": 2}, name="tour").advice().unjudged[:17]
        'Too few steps to '
        """
        from workbench.sim.plan.advice import advise_run

        return advise_run(self, last)

    def export(self, to: str, out: Path | str | None = None) -> Path:
        """Writes the run for another tool: `perfetto`, `chrome`, `parquet`, `csv` or `tensorboard`. Returns the path.

        `workbench.analysis.export.files` describes each form.

        to:   the form
        out:  file or folder. None: NAME-FORM in the working directory

        Raises RunError for an unknown form, or if it cannot write.
        """
        from workbench.analysis.export.files import export_run

        return export_run(self, to, out)

    def as_python(self) -> str:
        """Returns code that runs the same experiment with the same changes."""
        from workbench.analysis.export.export import as_python

        return as_python(self)

    def __repr__(self) -> str:
        return analysis.summary_line(self)

    def dashboard(self, read_only: bool = False) -> Any:
        """Returns the dashboard as a widget.

        read_only:  return a separate one without controls

        Its `dock()` shows it in a panel next to the notebook. `state()` and `restore(state)` keep its open parts.
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
    """Runs `experiment` on a virtual clock without processes. See `workbench.sim.run.simulate`.

    experiment:   the settings, with a number of `steps`
    changes:      knobs to set before given steps
    costs:        durations of compute and messages. None: the `pace` and the Fabric alone
    real:         compute real tensors. False: sizes only
    replay:       a recorded run whose order of messages and decisions to repeat
    alike:        simulate only the first replica, which stands for the other replicas. Needs sizes only
    resume:       the checkpoint to continue from, with real tensors
    checkpoints:  the folder for the checkpoints of `save_every`, with real tensors

    Raises KnobError if the experiment cannot be simulated. Raises StrategyError if ranks' requests differ. Raises
    Deadlock if ranks wait for each other, or loop while no time passes.
    """
    from workbench.sim import simulate

    run = Run.of(simulate(experiment, changes=changes, costs=costs, real=real, replay=replay, alike=alike,
                          resume=resume, checkpoints=checkpoints))  # fmt: skip
    for hear in tuple(record.hearers):
        hear(run)
    return run
