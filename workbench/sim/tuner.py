"""Knobs tuned by trying: a Gaussian process proposes values, and the simulator, or ranks that train, measure a step.

Optuna is imported only here, and only when something is tuned.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from workbench.experiment import Experiment
from workbench.record.store import RunError
from workbench.settings import Knob, KnobError, resolve
from workbench.sim.costs import Costs
from workbench.sim.simulate import simulate

if TYPE_CHECKING:
    from workbench.record.run import Run

BYTES = ("strategy.partition_mb", "strategy.credit_mb")  # what ByteScheduler's authors tune
RANDOM = 10  # trials at random before the process proposes anything: Optuna's usual number
ANSWER = 60.0  # seconds within which ranks that train answer a change
LOOK = 0.05  # seconds between two looks at their record

Settings = dict[str, Any]  # by whole path


class Trial(NamedTuple):
    """What was set, and the median of its steps in seconds; None where it was refused."""

    settings: Settings
    seconds: float | None


class Tuned(NamedTuple):
    """What `tune` has found, and all that it has tried, in order; what was set before is the first."""

    best: Trial
    trials: tuple[Trial, ...]


class Training(Protocol):
    """Ranks that train and are steered: a Lab."""

    experiment: Experiment
    live: bool
    run_now: Run | None

    def set(self, path: str, value: Any) -> Any: ...  # has `wait(seconds)`, after which it has `applied_at`


def tune(on: Experiment | Training, paths: Sequence[str] = BYTES, *,
         within: Mapping[str, tuple[float, float]] | None = None, trials: int = 20, steps: int = 8, settle: int = 3,
         seed: int = 0, costs: Costs | None = None) -> Tuned:  # fmt: skip
    """Searches for values of knobs with which a step is shortest, by Bayesian optimisation with a Gaussian process.

    on:     an Experiment, which is simulated, and nothing is changed. Or a Lab whose ranks train: each trial is a live
            change, and the best stays set; what was set before comes back where the search breaks off
    paths:  live knobs with a range or with choices, as `lab.set` takes them; logarithmic ones are searched as such
    within: by path, a narrower range (low, high)
    trials: how many settings are tried, of which the one in force is the first; ten are random before any is proposed
    steps:  of a trial whose median counts, after `settle` that do not; an evaluation lies in none
    costs:  for the simulator, as `simulate` takes it

    A trial that is refused has no time. Only time is looked at: tune what leaves learning as it is, such as sizes of
    buckets and pieces. On ranks that train the best of many is in part luck: measure it anew, beside the first.

    Raises KnobError for a knob that cannot be searched, a range that is none, a lab where no run is live, or no Optuna;
    RunError where the run ends before the trials do.

    Reference: Peng et al., SOSP 2019, https://doi.org/10.1145/3341301.3359642 (what is tuned, and by what);
    Akiba et al., "Optuna", KDD 2019, https://arxiv.org/abs/1907.10902
    """
    _require(on, paths, within, (("trials", trials, 1), ("steps", steps, 1), ("settle", settle, 0)), seed)
    if isinstance(on, Experiment):
        return _search(on, paths, within or {}, partial(_simulated, on, settle, steps, costs), trials, seed)
    before = on.experiment
    try:
        found = _search(before, paths, within or {}, partial(_trained, on, settle, steps), trials, seed)
    except BaseException:
        if on.live:
            _set(on, _values(before, [resolve(before, path)[0] for path in paths]))
        raise
    _set(on, found.best.settings)
    return found


def _require(on: Any, paths: Any, within: Any, numbers: Iterable[tuple[str, Any, int]], seed: Any) -> None:
    """Raises KnobError for what `tune` cannot be asked."""
    for name, number, least in numbers:
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise KnobError(f"{name}={number!r}: must be an integer of at least {least}")
    if not hasattr(on, "experiment") and not isinstance(on, Experiment):
        raise KnobError(f"tune: takes an Experiment to simulate or a Lab whose run is live, not {type(on).__name__}")
    if not isinstance(on, Experiment) and not on.live:
        raise KnobError("tune: no run is live on this lab; start one with lab.run(), or give an Experiment to simulate")
    if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(path, str) for path in paths):
        raise KnobError(f"paths={paths!r}: must be a list of knobs, such as {list(BYTES)}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise KnobError(f"seed={seed!r}: must be an integer in [0, {2**32 - 1}]")
    if not isinstance(within or {}, Mapping):
        raise KnobError(f"within={within!r}: must be a range by path, such as {{'credit_mb': (0.1, 1.0)}}")
    if unknown := set(within or {}) - set(paths):
        raise KnobError(f"within: {', '.join(sorted(unknown))}: must be among the paths that are tuned, {list(paths)}")


def _simulated(e: Experiment, settle: int, steps: int, costs: Costs | None, settings: Settings) -> float:
    tried = replace(e, steps=settle + steps)
    for path, value in settings.items():
        tried = tried.set(path, value)
    lasted = _lasted(simulate(tried, costs=costs), settle)
    if not lasted:
        raise RunError(f"tune: rank 0 made no step of its own from step {settle} on; let more than steps={steps} count")
    return statistics.median(lasted)


def _trained(on: Training, settle: int, steps: int, settings: Settings) -> float:
    first = _set(on, settings) + settle
    while True:
        live, run = on.live, on.run_now  # before its rows are read
        assert run is not None
        found = median_step(run, first, steps)
        if found is not None:
            return found
        if not live:
            raise RunError(f"tune: the run ended before step {first + steps}; train longer, or take fewer trials")
        time.sleep(LOOK)


def _set(on: Training, settings: Settings) -> int:
    """Sets all of these; the first step that all of them act on. Raises KnobError if one is refused."""
    changes = [on.set(path, value) for path, value in settings.items()]
    return max(change.wait(ANSWER).applied_at for change in changes)


def _values(e: Experiment, names: Sequence[str]) -> Settings:
    return {name: reduce(getattr, name.split("."), e) for name in names}


def median_step(run: Run, first: int, steps: int) -> float | None:
    """The median of so many steps of rank 0 from step `first` on, in seconds; None while they are not all there.

    Where a rank that has fallen behind skips some, they are the next ones that it makes.
    """
    lasted = _lasted(run, first)[:steps]
    return statistics.median(lasted) if len(lasted) == steps else None


def _lasted(run: Run, first: int) -> list[float]:
    """What each step of rank 0 from step `first` on has lasted, in seconds and in their order."""
    rows = run.timeline.spans.rows()
    rows = rows[(rows.rank == 0) & rows.equal("lane", "step") & (rows.step >= first)]
    return [float(t1 - t0) for _, t0, t1 in sorted(zip(rows.step, rows.t0, rows.t1, strict=True))]


def _searched(e: Experiment, path: str, within: tuple[float, float] | None) -> Knob:
    """The knob at `path`, named by its whole path, with the range in which it is searched."""
    full, knob = resolve(e, path)
    if not (knob.live and (knob.choices or knob.kind is bool or (knob.kind in (int, float) and knob.low is not None))):
        raise KnobError(f"{path}: must be a live knob with a range or with choices, to be tuned; it is {knob.allowed}")
    if within is not None:
        if knob.kind not in (int, float) or not _range(within):
            raise KnobError(f"within {path}={within!r}: must be two numbers, the lower one first")
        low, high = (knob.check(x, path) for x in within)
        knob = replace(knob, low=low, high=high)
    return replace(knob, name=full, log=bool(knob.log and knob.low and knob.low > 0))


def _range(within: Any) -> bool:
    """Are these two numbers, the lower one first?"""
    two = isinstance(within, (list, tuple)) and len(within) == 2
    return two and all(isinstance(x, (int, float)) for x in within) and bool(within[0] < within[1])


def _search(e: Experiment, paths: Sequence[str], within: Mapping[str, tuple[float, float]],
            measured: Callable[[Settings], float], trials: int, seed: int) -> Tuned:  # fmt: skip
    knobs = [_searched(e, path, within.get(path)) for path in paths]
    began = _values(e, [knob.name for knob in knobs])
    try:
        import optuna
    except ImportError:
        raise KnobError("tune: Optuna is not here; pip install 'training-workbench[tune]'") from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.GPSampler(seed=seed, n_startup_trials=RANDOM)
    said = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler)
        spaces = {knob.name: _distribution(optuna.distributions, knob) for knob in knobs}
        refused: list[KnobError] = []
        tried = [_tried(began, measured, refused)]
        if tried[0].seconds is not None and all(_holds(knob, began[knob.name]) for knob in knobs):
            study.add_trial(optuna.trial.create_trial(params=began, distributions=spaces, value=tried[0].seconds))
        while len(tried) < trials:
            asked = study.ask(spaces)
            tried.append(_tried({name: asked.params[name] for name in spaces}, measured, refused))
            failed = optuna.trial.TrialState.FAIL if tried[-1].seconds is None else None
            study.tell(asked, tried[-1].seconds, state=failed)
    finally:
        optuna.logging.set_verbosity(said)
    timed = [trial for trial in tried if trial.seconds is not None]
    if not timed:
        raise KnobError(f"tune: all {trials} trials were refused, the last {tried[-1].settings}: {refused[-1]}")
    return Tuned(min(timed, key=lambda trial: trial.seconds or 0.0), tuple(tried))


def _tried(settings: Settings, measured: Callable[[Settings], float], refused: list[KnobError]) -> Trial:
    try:
        return Trial(settings, measured(settings))
    except KnobError as error:
        refused.append(error)
        return Trial(settings, None)


def _distribution(kinds: Any, knob: Knob) -> Any:
    if knob.choices or knob.kind is bool:
        return kinds.CategoricalDistribution(knob.choices or (False, True))
    kind = kinds.IntDistribution if knob.kind is int else kinds.FloatDistribution
    return kind(knob.low, knob.high, log=knob.log)


def _holds(knob: Knob, value: Any) -> bool:
    """Is the value within what is searched?"""
    return bool(knob.choices) or knob.low is None or knob.high is None or knob.low <= value <= knob.high
