"""Proposes trials: first the simulator's fastest settings, then proposals of Optuna's Gaussian process.

Only a search imports Optuna.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.steps.words import format_seconds
from workbench.experiment import Experiment
from workbench.rank import StrategyError
from workbench.record.store import RunError
from workbench.settings import Knob, KnobError
from workbench.sim.costs.costs import Costs
from workbench.sim.plan.quick_simulator import QuickSimulator
from workbench.sim.plan.search_space import Dimension, apply_settings, list_candidates
from workbench.sim.plan.trials import Settings, Trial

RANDOM_TRIALS = 10  # before the process proposes: Optuna's default
MAX_UNUSABLE = 12  # of the process, before the simulator proposes instead
MAX_SLOWDOWN = 1.5  # factor over the best predicted time; slower settings are not tried
SIMULATOR_SHARE = 0.7  # of trials
RIDGE_WEIGHT = 1.0  # a correction from one trial counts by half


class PredictedOrder(NamedTuple):
    """Settings with predicted seconds, fastest first."""

    predicted: list[tuple[Settings, float]]
    left_out: tuple[Trial, ...]


def predict_order(
    e: Experiment, dims: Sequence[Dimension], costs: Costs, slower: float = MAX_SLOWDOWN
) -> PredictedOrder:
    """Settings that cannot be simulated come last."""
    quick, found, silent, out = (
        QuickSimulator(e, costs),
        list[tuple[Settings, float]](),
        list[Settings](),
        list[Trial](),
    )
    for settings in list_candidates(dims):
        try:
            told = apply_settings(e, settings)
        except KnobError as error:
            out.append(Trial(settings=settings, verdict=f"invalid: {error}"))
            continue
        try:
            found.append((settings, quick.predict_step(told).seconds / told.strategy.batches(1)))
        except (KnobError, StrategyError, RunError, ValueError):
            silent.append(settings)
    found.sort(key=lambda one: one[1])
    best = found[0][1] if found else math.inf
    for settings, seconds in found:
        if seconds > slower * best:
            said = f"not tried: the simulator predicts {seconds / best:.2g} times its best, {format_seconds(best)}"
            out.append(Trial(settings=settings, predicted=seconds, verdict=said))
    kept = [one for one in found if one[1] <= slower * best]
    return PredictedOrder(kept + [(settings, math.nan) for settings in silent], tuple(out))


class Proposer:
    """Optuna's ask and tell over `dims`, with the simulator's order as prior knowledge.

    order: None if unknown, as in searches on the simulator
    never: settings not to try, in addition to `order.left_out`
    once:  for training ranks: no setting repeats, and a result may be unusable
    """

    def __init__(self, dims: Sequence[Dimension], trials: int, seed: int, order: PredictedOrder | None = None,
                 once: bool = False, never: Sequence[Settings] = ()) -> None:  # fmt: skip
        self.dims, self.once = dims, once
        self._optuna = _import_optuna()
        self._spaces = {d.path: self._make_distribution(d) for d in dims}
        self._done = [_make_key(settings) for settings in never]
        out = order.left_out if order else ()
        self._never = {_make_key(t.settings) for t in out}
        known = order.predicted if order else []
        self._queue = [settings for settings, _ in known]
        self._measured = dict[str, tuple[Settings, float]]()
        self._last: Settings = {}
        self._predicted = {_make_key(settings): seconds for settings, seconds in known if not math.isnan(seconds)}
        self._ahead = max(1, round(SIMULATOR_SHARE * (trials - 1))) if known else 0
        ranges = any(not d.values for d in dims)
        self._all = None if ranges else math.prod(len(d.values) for d in dims)
        with _silence_optuna(self._optuna), warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            start = self._ahead + 1 if known else RANDOM_TRIALS
            new = hasattr(self._optuna.trial.Trial, "set_constraint")  # since Optuna 5
            constrained = {} if new or not once else {"constraints_func": _read_excess}
            sampler = self._optuna.samplers.GPSampler(seed=seed, n_startup_trials=start, **constrained)
            self._study = self._optuna.create_study(sampler=sampler)

    def find_prediction(self, settings: Settings) -> float | None:
        return self._predicted.get(_make_key(settings))

    def propose_first(self, settings: Settings) -> Any:
        """settings: in force. Returns a token for `report_trial`; None outside the search space."""
        return self._note_proposal(self._enqueue_trial(settings), settings)[0]

    def propose_next(self) -> tuple[Any, Settings] | None:
        """Returns (token for `report_trial`, settings); None if no setting is left."""
        left = [settings for settings in self._queue if _make_key(settings) not in self._done]
        left.sort(key=self._fit_correction())
        if self._ahead and left:
            self._ahead -= 1
            return self._note_proposal(self._enqueue_trial(left[0]), left[0])
        for _ in range(MAX_UNUSABLE if self._all is None or len(set(self._done) | self._never) < self._all else 0):
            with _silence_optuna(self._optuna):
                asked = self._study.ask(self._spaces)
            settings = {d.path: self._read_value(d, asked.params[d.path]) for d in self.dims}
            if _make_key(settings) in self._never or (self.once and _make_key(settings) in self._done):
                self._tell_optuna(asked, None, math.inf)
                continue
            return self._note_proposal(asked, settings)
        return self._note_proposal(self._enqueue_trial(left[0]), left[0]) if left else None

    def report_trial(self, asked: Any, seconds: float | None, excess: float) -> None:
        """seconds: None if refused; excess: positive if unusable"""
        if seconds is not None and self._done[-1] in self._predicted:
            self._measured[self._done[-1]] = (self._last, math.log(seconds / self._predicted[self._done[-1]]))
        if asked is not None:
            self._tell_optuna(asked, seconds, excess)

    def _tell_optuna(self, asked: Any, seconds: float | None, excess: float) -> None:
        if self.once:
            excess = min(max(excess, -1.0), 1e3)
            asked.set_user_attr("excess", excess)
            if hasattr(asked, "set_constraint"):
                asked.set_constraint("loss", excess)
        with _silence_optuna(self._optuna):
            state = self._optuna.trial.TrialState.FAIL if seconds is None else None
            self._study.tell(asked, seconds, state=state)

    def _note_proposal(self, asked: Any, settings: Settings) -> tuple[Any, Settings]:
        self._done.append(_make_key(settings))
        self._last = settings
        return asked, settings

    def _fit_correction(self) -> Callable[[Settings], float]:
        """Returns a function for log seconds: the simulator's prediction, corrected by trials.

        Each value has a factor, because a codec of unknown cost is slower in all settings. A ridge regression over
        measured trials gives the logarithms of the factors.
        """
        values = [(d.path, repr(point)) for d in self.dims for point in d.trial_points]

        def row(settings: Settings) -> np.ndarray:
            mine = {(path, repr(value)) for path, value in settings.items()}
            return np.array([1.0, *(float(one in mine) for one in values)])

        x = np.array([row(settings) for settings, _ in self._measured.values()]).reshape(-1, len(values) + 1)
        y = np.array([off for _, off in self._measured.values()])
        penalty = RIDGE_WEIGHT * np.eye(len(values) + 1)
        penalty[0, 0] = 1e-6
        factors = np.linalg.solve(x.T @ x + penalty, x.T @ y)
        return lambda settings: math.log(self._predicted.get(_make_key(settings), 1e9)) + float(row(settings) @ factors)

    def _enqueue_trial(self, settings: Settings) -> Any:
        if not all(_contains_value(d, settings[d.path]) for d in self.dims):
            return None
        params = {d.path: d.value_labels[d.values.index(settings[d.path])] if d.values else settings[d.path]
                  for d in self.dims}  # fmt: skip
        with _silence_optuna(self._optuna):
            self._study.enqueue_trial(params)
            return self._study.ask(self._spaces)

    def _read_value(self, d: Dimension, told: Any) -> Any:
        return d.values[d.value_labels.index(told)] if d.values else told

    def _make_distribution(self, d: Dimension) -> Any:
        kinds, knob = self._optuna.distributions, d.knob
        if d.values:
            return kinds.CategoricalDistribution(d.value_labels)
        kind = kinds.IntDistribution if knob.kind is int else kinds.FloatDistribution
        return kind(knob.low, knob.high, log=knob.log)


def _make_key(settings: Settings) -> str:
    return repr(sorted((path, repr(value)) for path, value in settings.items()))


def _read_excess(trial: Any) -> tuple[float]:
    return (trial.user_attrs.get("excess", -1.0),)


def _contains_value(d: Dimension, value: Any) -> bool:
    knob: Knob = d.knob
    return value in d.values if d.values else bool(knob.low <= value <= knob.high)


def _import_optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise KnobError("tune: Optuna is not installed; pip install 'training-workbench[tune]'") from None
    return optuna


@contextmanager
def _silence_optuna(optuna: Any) -> Iterator[None]:
    """Keeps Optuna's log out of notebooks."""
    said = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(said)
