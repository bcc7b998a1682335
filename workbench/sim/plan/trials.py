"""The trials of a tuner: settings, seconds per step with an interval, loss and verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.steps.words import format_seconds
from workbench.settings import in_words, to_plain

Settings = dict[str, Any]  # by full path
COLUMNS = ("trial", "setting", "seconds per step", "simulated", "steps", "loss", "verdict")


class Interval(NamedTuple):
    """A mean and the ends of its confidence interval."""

    low: float
    mid: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Settings and their measurements.

    settings:  by path, every tuned knob
    seconds:   mean step time per batch of a step (`strategy.accumulate`); None if refused or not measured
    low, high: the ends of its confidence interval
    predicted: the simulator's prediction in seconds, or None
    steps:     of the run in the trial, including steps to settle
    loss:      share by which the loss exceeds its earlier trend; None: no comparison was needed
    ranks:     how many train
    verdict:   "" before the trial has begun
    fit:       False if the trial failed or the loss may exceed its trend
    """

    settings: Settings
    seconds: float | None = None
    low: float = math.nan
    high: float = math.nan
    predicted: float | None = None
    steps: int = 0
    loss: Interval | None = None
    ranks: int = 0
    verdict: str = ""
    fit: bool = False

    @property
    def cells(self) -> tuple[str, ...]:
        """The row of the table as text, without the trial's number."""
        took = "" if self.seconds is None else format_seconds(self.seconds)
        if self.seconds is not None and self.high > self.low:
            took += f" ± {format_seconds((self.high - self.low) / 2)}"
        said = "" if self.predicted is None else format_seconds(self.predicted)
        loss = "" if self.loss is None else f"{self.loss.mid:+.1%} ({self.loss.low:+.1%} to {self.loss.high:+.1%})"
        return format_settings(self.settings), took, said, str(self.steps or ""), loss, self.verdict


@dataclass(frozen=True)
class Tuned:
    """The result of `tune`, shown as a table.

    trials:   in order; the first has the settings in force before
    left_out: settings that were not tried: invalid, or far slower by the simulator's prediction
    """

    best: Trial
    trials: tuple[Trial, ...]
    left_out: tuple[Trial, ...] = ()

    @property
    def steps(self) -> int:
        """Steps that all trials took together."""
        return sum(trial.steps for trial in self.trials)

    def __repr__(self) -> str:
        out = [f"best of {len(self.trials)}: {format_settings(self.best.settings)}, {self.best.cells[1]} per step"]
        out += [f"{number}. " + "; ".join(filter(None, t.cells)) for number, t in enumerate(self.trials, start=1)]
        return "\n".join(out + ([f"not tried: {len(self.left_out)} others"] if self.left_out else []))

    def _repr_html_(self) -> str:
        rows = [(str(number), *t.cells) for number, t in enumerate(self.trials, start=1)]
        body = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
        head = "".join(f"<th>{escape(name)}</th>" for name in COLUMNS)
        more = f"<p>Not tried: {len(self.left_out)} others.</p>" if self.left_out else ""
        return f"<table><tr>{head}</tr>{body}</table>{more}"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Returns code: `bucket_mb=4, compressor=TopK(density=0.01)`."""
    return ", ".join(f"{path.rsplit('.', 1)[-1]}={format_value(value)}" for path, value in settings.items())


def format_value(value: Any) -> str:
    """Returns code without default knobs: `PowerSGD`, `LocalSGD(every=16)`."""
    if isinstance(value, float):
        return f"{value:g}"
    plain = to_plain(value)
    if isinstance(plain, dict) and len(plain) == 1:
        ((name, told),) = plain.items()
        usual = to_plain(type(value)())
        if name == "ErrorFeedback" and hasattr(value, "of"):
            return format_value(value.of)
        told = {k: v for k, v in told.items() if v != usual[name].get(k)}
        return in_words({name: told}) if told else name
    return in_words(plain)


def make_interval(values: Sequence[float], confidence: float, looks: int = 1) -> Interval:
    """Returns the interval of the mean of independent values, by Student's t.

    Each of the caller's `looks` gets an equal share of the error (Bonferroni). The total is at most 1 - confidence.
    """
    x = np.asarray(values, float)
    mid = float(x.mean())
    if len(x) < 2:
        return Interval(-math.inf, mid, math.inf)
    half = student_quantile(1 - (1 - confidence) / looks / 2, len(x) - 1) * float(x.std(ddof=1)) / math.sqrt(len(x))
    return Interval(mid - half, mid, mid + half)


def student_quantile(p: float, freedom: int) -> float:
    """Returns a quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, p))


def above_trend(before: tuple[np.ndarray, np.ndarray], after: tuple[np.ndarray, np.ndarray],
                confidence: float) -> Interval | None:  # fmt: skip
    """Returns the share by which later losses exceed the earlier trend, with one-sided ends. None: too few steps.

    before, after: (examples trained so far, loss) by step. The trend is a least-squares line in the logarithm of the
    examples.
    """
    (x, y), (later, found) = before, after
    if len(x) < 4 or not len(found):
        return None
    ones = np.column_stack([np.ones(len(x)), np.log(np.maximum(x, 1.0))])
    middle = ones[:, 1].mean()
    ones[:, 1] -= middle
    line, *_ = np.linalg.lstsq(ones, y, rcond=None)
    at = np.column_stack([np.ones(len(later)), np.log(np.maximum(later, 1.0)) - middle])
    off, led = found - at @ line, float((at @ line).mean())
    if not led > 0 or not np.isfinite(off).all():
        return Interval(math.inf, math.inf, math.inf)
    freedom = len(x) - 2 + len(off) - 1
    spread = float(((y - ones @ line) ** 2).sum() + ((off - off.mean()) ** 2).sum()) / freedom
    mean = at.mean(axis=0)
    about = 1 / len(off) + float(mean @ np.linalg.pinv(ones.T @ ones) @ mean)
    half = student_quantile(confidence, freedom) * math.sqrt(spread * about)
    return Interval(*((float(off.mean()) + by) / led for by in (-half, 0.0, half)))
