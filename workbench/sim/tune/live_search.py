"""A search on training ranks. Each trial changes the live run."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from workbench.record.store import RunError
from workbench.settings import KnobError, short
from workbench.settings.describe_error import text_of
from workbench.sim.costs.costs import Costs
from workbench.sim.plan.evidence import Evidence, sort_by_evidence
from workbench.sim.plan.search_space import Dimension, Trying, current_settings, list_candidates, space_of
from workbench.sim.plan.trials import Settings, Trial, Tuned, format_settings
from workbench.sim.tune.proposer import PredictedOrder, Proposer, predict_order
from workbench.sim.tune.trial_runner import POLL_SECONDS, Overruled, TrainingRanks, TrialLimits, TrialRunner

MAX_TRIALS = 20  # by default, at most
TRIED_SHARE = 0.22  # of settings to try by default: safely under 25 % of a full sweep's steps


class SearchStopped(Exception):
    """A user has ended the search."""


class Tuning:
    """A search on training ranks, on its own thread. A user can watch, pause or overrule it.

    confidence: of each interval, over all looks
    precision:  a trial ends when half the interval of its step time is within this share of the time, when it is
                clearly slower than the best, or after `most` steps
    worse:      share by which a setting's loss may exceed its trend, at `confidence`. The trend is a line in the
                logarithm of the examples over at most 200 steps under the settings in force. Settings that learn the
                same (buckets, other exact strategies) need no such test. See `workbench.sim.plan.evidence`
    keep:       whether the best settings stay at the end; False: the search restores the earlier settings

    If ranks are lost or a change is refused, the trial ends with that verdict and the next one begins. If the number of
    ranks changes, the search measures the earlier settings again, and compares only trials with equal numbers of ranks.
    If a user sets a tuned knob, the search ends and the user's value stays. Another knob restarts the present trial.
    """

    def __init__(
        self,
        on: TrainingRanks,
        paths: Trying = None,
        *,
        within: Mapping[str, tuple[float, float]] | None = None,
        trials: int | None = None,
        steps: int = 8,
        settle: int = 3,
        seed: int = 0,
        costs: Costs | None = None,
        confidence: float = 0.95,
        precision: float = 0.03,
        worse: float = 0.02,
        most: int = 60,
        keep: bool = True,
    ) -> None:
        require_arguments((("steps", steps, 1), ("settle", settle, 0), ("most", most, 1)), trials, seed, within)
        for name, share in (("confidence", confidence), ("precision", precision), ("worse", worse)):
            if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share < 1:
                raise KnobError(f"{name}={short(share)}: must be a number between 0 and 1")
        if not hasattr(on, "experiment"):
            name = type(on).__name__
            raise KnobError(f"tune: takes an Experiment to simulate or a Lab with a live run, not {name}")
        if not on.live:
            raise KnobError("tune: no run is live on this lab; start one with lab.run(), or give an Experiment to "
                            "simulate")  # fmt: skip
        self.on, self.keep, self.seed, self.costs = on, keep, seed, costs
        self.dims = space_of(on.experiment, paths, within or {})
        self.number = count_trials(trials, self.dims)
        self.trials: list[Trial] = []
        self.left_out: tuple[Trial, ...] = ()
        self.state = "starting"  # then running or paused; finally done, stopped, overruled or failed
        self.said = "it begins"
        self._former = current_settings(on.experiment, self.dims)
        asked = TrialLimits(confidence, precision, worse, steps, max(most, steps), settle)
        self._ranks = TrialRunner(on, asked, [d.path for d in self.dims], self._check_stopped, self._show_trial)
        Proposer(self.dims, self.number, seed)  # fails now if Optuna is missing
        self._paused, self._stopped, self._over = threading.Event(), threading.Event(), threading.Event()
        self._used: Trial | None = None
        self._error: BaseException | None = None

    def start(self) -> Tuning:
        """Begins the search on its own thread. `lab.tune` calls it."""
        threading.Thread(target=self._run_search, name="tuner", daemon=True).start()
        return self

    # -- controls for a user

    @property
    def live(self) -> bool:
        """Whether the search is under way."""
        return not self._over.is_set()

    @property
    def best(self) -> Trial | None:
        """The fastest usable trial with the present number of ranks, or None."""
        now = len(self.on.members) or (self.trials[-1].ranks if self.trials else 0)
        alike = (trial for trial in self.trials if trial.ranks == now)
        order = sort_by_evidence(alike, lambda trial: Evidence(trial.seconds or math.inf, trial.fit))
        return order[0] if order and order[0].fit else None

    def pause(self) -> None:
        """Pauses the search before the next trial. The run continues with the best settings so far."""
        self._paused.set()

    def resume(self) -> None:
        """Lets a paused search try its next settings."""
        self._paused.clear()

    def stop(self) -> None:
        """Ends the search. See `keep`."""
        self._stopped.set()

    def use(self, number: int) -> None:
        """Applies the settings of a trial and ends the search.

        number:  the trial's, from 1

        Raises KnobError if there is no such trial.
        """
        if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= len(self.trials):
            raise KnobError(f"number={short(number)}: must be a trial's number, from 1 to {len(self.trials)}")
        self._used = self.trials[number - 1]
        if self._over.is_set():
            self._ranks.apply_settings(self._used.settings)
        self._stopped.set()

    def wait(self, timeout: float | None = None) -> Tuned:
        """Waits for the result. An interrupt ends the search and restores the earlier settings.

        timeout:  seconds; None waits as long as it takes

        Raises the search's error if it failed. Raises TimeoutError if the search is not over in time.
        """
        try:
            if not self._over.wait(timeout):
                raise TimeoutError(f"tune: still at trial {len(self.trials)} of {self.number}")
        except KeyboardInterrupt:
            self._used = Trial(settings=self._former)
            self._stopped.set()
            self._over.wait()
            raise
        if self._error is not None:
            raise self._error
        return self.found

    @property
    def found(self) -> Tuned:
        """The result so far. Raises KnobError if no trial is usable."""
        if (best := self.best) is None:
            said = self.trials[-1].verdict if self.trials else "none has ended"
            raise KnobError(f"tune: none of {len(self.trials)} trials is usable; the last: {said}")
        return Tuned(best, tuple(self.trials), self.left_out)

    def __repr__(self) -> str:
        return f"Tuning, {self.state}: {self.said}" + (f"\n{self.found!r}" if self.best else "")

    # -- the search (on its own thread)

    def _run_search(self) -> None:
        try:
            self.state = "running"
            self._search_settings()
            self.state = "stopped" if self._stopped.is_set() else "done"
        except Overruled as error:
            self.state, self.said = "overruled", f"{error} by hand, and stays so"
        except BaseException as error:
            self.state, self.said, self._error = "failed", str(error), error
            try:
                self._ranks.restore_settings(self._former)
                self.said += f"; {format_settings(self._former)} is set, as before"
            except Exception as failure:
                self.said += f"; what was set before could not be set again: {text_of(failure)}"
        finally:
            self._over.set()

    def _search_settings(self) -> None:
        with suppress(SearchStopped):
            proposer = self._begin_search()
            while len(self.trials) < self.number:
                self._wait_while_paused()
                if self.trials[-1].ranks != len(self.on.members):
                    proposer = self._begin_search()
                elif (found := proposer.propose_next()) is not None:
                    asked, settings = found
                    done = self._try_settings(settings, proposer.find_prediction(settings))
                    excess = -1.0 if done.loss is None else done.loss.high - self._ranks.asked.worse
                    proposer.report_trial(asked, done.seconds, excess)
                else:
                    break
        self._apply_result()

    def _begin_search(self) -> Proposer:
        """Tries the earlier settings, then orders candidates. Excludes settings that broke a trial."""
        broke = [trial.settings for trial in self.trials if trial.seconds is None]
        self._try_settings(self._former, None)
        self.said = "asking the simulator for the next settings"
        order = self._order_candidates()
        out = order.left_out if order else ()
        self.left_out = tuple(trial for trial in out if trial.settings != self._former)  # already tried
        proposer = Proposer(self.dims, self.number, self.seed, order, once=True, never=broke)
        first = proposer.propose_first(self._former)
        self.trials[-1] = replace(self.trials[-1], predicted=proposer.find_prediction(self._former))
        proposer.report_trial(first, self.trials[-1].seconds, -1.0)
        return proposer

    def _order_candidates(self) -> PredictedOrder | None:
        run = self.on.run_now
        assert run is not None
        try:
            return predict_order(self.on.experiment, self.dims, self.costs or Costs.measured(run))
        except (KnobError, RunError, ValueError):
            return None  # without measurements, Optuna proposes alone

    def _try_settings(self, settings: Settings, predicted: float | None) -> Trial:
        trial = Trial(settings=settings, predicted=predicted, verdict="settling")
        best = self.best if self.trials and self.trials[-1].ranks == len(self.on.members) else None
        self.trials.append(trial)
        self.said = f"trial {len(self.trials)} of {self.number}: {format_settings(settings)}"
        try:
            self.trials[-1] = self._ranks.run_trial(trial, best)
        except BaseException:
            self.trials[-1] = replace(self.trials[-1], verdict="broken off", fit=False)
            raise
        return self.trials[-1]

    def _wait_while_paused(self) -> None:
        if self._paused.is_set() and self.best:
            self._ranks.apply_settings(self.best.settings)
        while self._paused.is_set():
            self.state = "paused"
            self._check_stopped()
            self._ranks.take_user_changes()
            self._over.wait(POLL_SECONDS)
        self.state = "running"

    def _apply_result(self) -> None:
        chosen = self._used or (self.best if self.keep else None) or Trial(settings=self._former)
        self._ranks.take_user_changes()
        self._ranks.apply_settings(chosen.settings)
        number = next((n for n, trial in enumerate(self.trials, start=1) if trial is chosen), None)
        self.said = f"{format_settings(chosen.settings)} is set" + (
            f", as in trial {number}" if number else ", as before"
        )

    def _check_stopped(self) -> None:
        if self._stopped.is_set():
            raise SearchStopped

    def _show_trial(self, trial: Trial) -> None:
        self.trials[-1] = trial


def require_arguments(numbers: Any, trials: Any, seed: Any, within: Any) -> None:
    """Raises KnobError for invalid arguments of `tune`."""
    for name, number, least in (*numbers, *([("trials", trials, 1)] if trials is not None else [])):
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise KnobError(f"{name}={number!r}: must be an integer of at least {least}")
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise KnobError(f"seed={seed!r}: must be an integer in [0, {2**32 - 1}]")
    if not isinstance(within or {}, Mapping):
        raise KnobError(f"within={within!r}: must be a range by path, such as {{'credit_mb': (0.1, 1.0)}}")


def count_trials(trials: int | None, dims: list[Dimension]) -> int:
    """Returns how many settings to try."""
    if trials is not None:
        return trials
    every = sum(1 for _ in list_candidates(dims)) if all(d.values for d in dims) else 5 * MAX_TRIALS
    return min(MAX_TRIALS, max(4, int(TRIED_SHARE * every)))
