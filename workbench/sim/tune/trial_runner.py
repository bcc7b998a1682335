"""One trial on training ranks: applies settings, lets them settle and measures until the result is clear."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from workbench.experiment import Experiment
from workbench.record.store import RunError
from workbench.settings import KnobError, each
from workbench.sim.plan.evidence import is_usable
from workbench.sim.plan.quick_simulator import count_round_steps
from workbench.sim.plan.search_space import learns_alike
from workbench.sim.plan.trials import Interval, Settings, Trial, above_trend, make_interval

if TYPE_CHECKING:
    from workbench.record.run import Run

ANSWER_TIMEOUT = 60.0  # seconds within which training ranks answer a change
POLL_SECONDS = 0.05  # seconds between two reads of the record
LOOK_GROWTH = 1.5  # factor of steps between two looks at the interval
TREND_STEPS = 200  # of the loss's trend, at most


class TrainingRanks(Protocol):
    """Ranks that train and can be controlled: a Lab."""

    changes: list[Any]  # of PendingChange: `id`, `path`, `applied_at`, `refused`

    @property
    def experiment(self) -> Experiment: ...
    @property
    def live(self) -> bool: ...
    @property
    def run_now(self) -> Run | None: ...
    @property
    def members(self) -> tuple[int, ...]: ...
    @property
    def state(self) -> str: ...

    def set(self, path: str, value: Any) -> Any: ...  # returns a PendingChange with `wait(seconds)`


class TrialLimits(NamedTuple):
    """When a trial ends.

    confidence: of every interval, over all looks
    precision:  half the interval of the step time as a share of it, at which a trial ends
    worse:      share by which the loss may exceed its trend, at `confidence`
    steps, most: steps at the first and the last look
    settle:     steps after a change that do not count
    """

    confidence: float = 0.95
    precision: float = 0.03
    worse: float = 0.02
    steps: int = 8
    most: int = 60
    settle: int = 3


class Overruled(Exception):
    """A user has set a tuned knob by hand."""


class TrialBroken(Exception):
    """The trial cannot continue, but the run can."""


class TrialRunner:
    """Runs trials on `on`.

    paths: tuned knobs, which a user may also set
    going: called often; raises an exception to end the search
    shown: receives the present trial as it changes
    """

    def __init__(self, on: TrainingRanks, asked: TrialLimits, paths: Sequence[str], going: Callable[[], None],
                 shown: Callable[[Trial], None]) -> None:  # fmt: skip
        self.on, self.asked, self.paths, self.going, self.shown = on, asked, paths, going, shown
        self.before = on.experiment
        self._mine: set[str] = set()
        self._heard = len(on.changes)
        self._come_and_gone = 0  # Marks "members" before the trial
        self._before = 0  # in the trend
        self._trend: list[tuple[int, int, int]] = []  # (first step, stop, batches per step)

    def run_trial(self, trial: Trial, best: Trial | None) -> Trial:
        """Returns the measured trial. Raises RunError if the run ends."""
        run = self._require_run()
        began, trial = _newest_step(run), replace(trial, ranks=len(self.on.members))
        self._come_and_gone = len(run.details("members"))
        self.take_user_changes()
        try:
            found = self._measure_trial(trial, self.apply_settings(trial.settings), best)
        except KnobError as error:
            return replace(trial, verdict=f"refused: {error}")
        except TrialBroken as error:
            found = replace(trial, verdict=str(error))
        return replace(found, steps=max(0, _newest_step(self._require_run()) - began))

    def apply_settings(self, settings: Settings) -> int:
        """Returns the first step under all settings. Raises KnobError and undoes the changes."""
        if not self.on.live:
            raise RunError("tune: the run has ended; train longer, or take fewer trials")
        former, asked = dict[str, Any](), []
        first = _newest_step(self._require_run()) + 1
        try:
            for path in sorted(settings, key=lambda p: p.count(".")):
                now = _read_value(self.on.experiment, path)
                if now == settings[path]:
                    continue
                change = self.on.set(path, settings[path])
                former[path] = now
                self._mine.add(change.id)
                asked.append(self._await_change(change))
        except KnobError:
            for path, value in reversed(former.items()):
                if _read_value(self.on.experiment, path) != value:
                    change = self.on.set(path, value)
                    self._mine.add(change.id)
                    self._await_change(change)
            raise
        return max([first, *asked])

    def restore_settings(self, settings: Settings) -> None:
        """If this run has ended, the next run has the settings."""
        if self.on.live:
            try:
                self.apply_settings(settings)
                return
            except Exception:
                if self.on.live:
                    raise
        for path in sorted(settings, key=lambda path: path.count(".")):
            if _read_value(self.on.experiment, path) != settings[path]:
                self.on.set(path, settings[path])

    def _await_change(self, change: Any) -> int:
        """Returns the first step under a change. A user's pause of the run does not count as delay."""
        left = ANSWER_TIMEOUT
        while True:
            try:
                return int(change.wait(min(1.0, left)).applied_at)
            except TimeoutError:
                self.going()
                left -= 1.0 if self.on.state == "running" else 0.0
                if not self.on.live:
                    raise RunError("tune: the run ended before its ranks had answered a change") from None
                if left <= 0:
                    raise TrialBroken(f"ranks did not answer within {ANSWER_TIMEOUT:g} s") from None

    def _measure_trial(self, trial: Trial, first: int, best: Trial | None) -> Trial:
        e, a = self.on.experiment, self.asked
        each, weight, begin = count_round_steps(e), e.strategy.batches(1), first + a.settle
        looks = list(_list_looks(-(-a.steps // each), max(2, -(-a.most // each))))
        alike = learns_alike(self.before, e)
        number = 0
        while True:
            live = self.on.live  # read before the run's rows
            self.going()
            self._require_same_ranks()
            if (at := self.take_user_changes()) is not None:  # earlier steps ran under other settings
                begin, number = max(begin, at + a.settle), 0
            run = self._require_run()
            loss = None if alike else self._loss_above_trend(run, begin, weight)
            if loss is not None and not math.isfinite(loss.mid):
                raise TrialBroken("its loss is not finite")
            rounds = _round_means(step_seconds(run, begin, min(self.on.members or (0,))), each)
            if len(rounds) >= looks[number]:
                took = make_interval([s / weight for s in rounds], a.confidence, len(looks))
                trial = replace(trial, seconds=took.mid, low=took.low, high=took.high, loss=loss)
                if said := self._judge_trial(trial, best, number == len(looks) - 1):
                    if alike:
                        self._trend.append((begin, begin + len(rounds) * each, weight))
                    return replace(trial, verdict=said, fit=is_usable(loss is None, loss, a.worse))
                self.shown(replace(trial, verdict="measuring"))
                number = min(number + 1, len(looks) - 1)
            elif not live:
                stop = begin + looks[number] * each
                raise RunError(f"tune: the run ended before step {stop}; train longer, or take fewer trials")
            time.sleep(POLL_SECONDS)

    def _judge_trial(self, trial: Trial, best: Trial | None, last: bool) -> str:
        """Returns the verdict; "" while it is unclear."""
        a, loss = self.asked, trial.loss
        half = (trial.high - trial.low) / 2
        narrow = half <= a.precision * (trial.seconds or 0.0)
        if loss is not None and loss.low > a.worse:
            return f"loss worse: {loss.mid:+.1%} against its trend"
        if best is not None and trial.low > best.high:
            return f"slower: {(trial.seconds or 0.0) / (best.seconds or 1.0):.2f} times the best"
        if not (narrow or last):
            return ""
        if loss is not None and loss.high > a.worse:
            return self._explain_uncertain(loss) if last else ""
        if best is None:
            return "in force before"
        faster = 1 - (trial.seconds or 0.0) / (best.seconds or 1.0)
        if trial.high < best.low:
            return f"faster by {faster:.0%} of the best before"
        return f"no clear difference from the best before ({-faster:+.1%} of its step)"

    def _explain_uncertain(self, loss: Interval) -> str:
        a = self.asked
        return (f"loss unclear after {a.most} steps: it may be up to {loss.high:+.1%} above its trend, which has "
                f"{self._before} steps, and worse={a.worse:g} allows {a.worse:.1%}; let the run train longer before "
                f"you tune, or give more steps (most=), or a larger worse=")  # fmt: skip

    def _loss_above_trend(self, run: Run, begin: int, weight: int) -> Interval | None:
        """Returns the share by which losses from step `begin` on exceed their trend; None without losses."""
        step, loss = mean_losses(run)
        if not len(step):
            return None
        spans = self._trend or [(max(0, begin - self.asked.settle - TREND_STEPS), begin - self.asked.settle, weight)]
        early = np.zeros(len(step), bool)
        for first, stop, _ in spans:
            early |= (step >= max(first, stop - TREND_STEPS)) & (step < stop)
        self._before = int(early.sum())
        if not np.isfinite(loss[step >= begin]).all():
            return Interval(math.inf, math.inf, math.inf)
        before, late = spans[0][2], step >= begin
        examples = 1.0 + np.where(late, begin * before + (step - begin) * weight, step * before)
        found = above_trend((examples[early], loss[early]), (examples[late], loss[late]), self.asked.confidence)
        return found or Interval(-math.inf, 0.0, math.inf)  # too few losses

    def _require_same_ranks(self) -> None:
        """Raises TrialBroken if ranks were lost or added."""
        new = self._require_run().details("members")[self._come_and_gone :]
        if new:
            gone = sorted({rank for _, _, detail in new for rank in detail.get("gone", ())})
            who = f"rank {', '.join(map(str, gone))} was lost" if gone else "ranks joined or left"
            raise TrialBroken(f"{who} during the trial")

    def take_user_changes(self) -> int | None:
        """Returns the step at which a user set a knob, or None. Raises Overruled for a tuned knob."""
        new, self._heard = self.on.changes[self._heard :], len(self.on.changes)
        at = None
        for change in new:
            if change.id in self._mine or change.refused:
                continue
            if any(_is_within(one, path) for one in each(change.path, change.value) for path in self.paths):
                raise Overruled(f"{change.path} was set to {change.value}")
            at = change.applied_at if change.applied_at is not None else _newest_step(self._require_run()) + 1
        return at

    def _require_run(self) -> Run:
        run = self.on.run_now
        assert run is not None
        return run


def _list_looks(least: int, most: int) -> Iterator[int]:
    """Yields the number of rounds at each look."""
    n = max(2, least)
    while n < most:
        yield n
        n = math.ceil(n * LOOK_GROWTH)
    yield max(most, 2)


def _round_means(lasted: list[float], each: int) -> list[float]:
    """Returns the mean seconds per step of each complete round. each: steps per round"""
    return [sum(lasted[i : i + each]) / each for i in range(0, len(lasted) - each + 1, each)]


def _is_within(one: str, other: str) -> bool:
    return one == other or one.startswith(other + ".") or other.startswith(one + ".")


def _read_value(e: Experiment, path: str) -> Any:
    thing: Any = e
    for name in path.split("."):
        thing = getattr(thing, name, None)
    return thing


def _newest_step(run: Run) -> int:
    """Returns the last recorded step, or -1."""
    rows = run.timeline.spans.rows()
    return int(rows.step.max()) if len(rows) else -1


def step_seconds(run: Run, first: int, rank: int = 0) -> list[float]:
    """Returns the seconds of a rank's steps from `first` on. Steps that a late rank skips leave no gap."""
    rows = run.timeline.spans.rows()
    rows = rows[(rows.rank == rank) & rows.equal("lane", "step") & (rows.step >= first)]
    return [float(t1 - t0) for _, t0, t1 in sorted(zip(rows.step, rows.t0, rows.t1, strict=True))]


def mean_losses(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, mean losses over ranks)."""
    rows = run.timeline.samples.rows()
    rows = rows[rows.equal("name", "loss")]
    steps, which = np.unique(rows.step, return_inverse=True)
    return steps, np.bincount(which, rows.value, len(steps)) / np.maximum(np.bincount(which, minlength=len(steps)), 1)
