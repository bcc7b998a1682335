"""The search space of a tuner."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, NamedTuple

from workbench.compressors import Dense
from workbench.compressors.cast import Cast
from workbench.compressors.power_sgd import PowerSGD
from workbench.compressors.top_k import TopK
from workbench.experiment import Experiment, user_input
from workbench.settings import Knob, KnobError, resolve, short
from workbench.sim.plan.trials import Settings, format_value
from workbench.strategies.byte_scheduler import ByteScheduler
from workbench.strategies.local_sgd import LocalSGD

BYTE_KNOBS = ("strategy.partition_mb", "strategy.credit_mb")  # ByteScheduler's authors tune them
MAX_COMBINATIONS = 512  # at most
Trying = Mapping[str, Any] | Sequence[str] | None
POINTS_PER_RANGE = 5  # of a range that the simulator evaluates


class Dimension(NamedTuple):
    """A knob by its full path, with values to try. Without values, the tuner searches the range of `knob`."""

    path: str
    values: tuple[Any, ...]
    knob: Knob

    @property
    def value_labels(self) -> tuple[str, ...]:
        """Text for Optuna's categorical distribution."""
        return tuple(format_value(value) for value in self.values)

    @property
    def trial_points(self) -> tuple[Any, ...]:
        """The values, or evenly spaced points of the range."""
        if self.values:
            return self.values
        low, high, whole = float(self.knob.low or 0), float(self.knob.high or 0), self.knob.kind is int
        ends = (math.log(low), math.log(high)) if self.knob.log else (low, high)
        even = [ends[0] + (ends[1] - ends[0]) * i / (POINTS_PER_RANGE - 1) for i in range(POINTS_PER_RANGE)]
        found = [math.exp(x) if self.knob.log else x for x in even]
        return tuple(dict.fromkeys(min(max(round(x) if whole else x, low), high) for x in found))


def space_of(e: Experiment, asked: Any, within: Mapping[str, tuple[float, float]]) -> list[Dimension]:
    """asked: None (`usual_space`), a list of knobs, or values (a list) or a range by knob. Raises KnobError."""
    if asked is None:
        asked = list(BYTE_KNOBS) if isinstance(e.strategy, ByteScheduler) else usual_space(e)
    if isinstance(asked, Mapping):
        if within:
            raise KnobError("within: is for a list of knobs; in a dict of values by knob, give (low, high) there")
        dims = [_make_dimension(e, path, values) for path, values in asked.items()]
    elif isinstance(asked, (list, tuple)) and asked and all(isinstance(path, str) for path in asked):
        if unknown := set(within) - set(asked):
            raise KnobError(f"within: {', '.join(sorted(unknown))}: must be among the tuned paths, {asked}")
        dims = [_make_range(e, path, within.get(path)) for path in asked]
    else:
        dims = []
    if not dims:
        example = "{'bucket_mb': [0.25, 1, 4], 'compressor': ['Dense', 'Cast']}"
        raise KnobError(
            f"paths={short(asked)}: must be a list of knobs, such as {list(BYTE_KNOBS)}, or a dict of values by knob, "
            f"such as {example}"
        )
    if (number := math.prod(len(d.trial_points) for d in dims)) > MAX_COMBINATIONS:
        raise KnobError(
            f"paths: {number} combinations of settings; must be at most {MAX_COMBINATIONS}, so remove values"
        )
    return dims


def usual_space(e: Experiment) -> dict[str, list[Any]]:
    """The default search space, by knob."""
    found: dict[str, list[Any]] = {"bucket_mb": [e.bucket_mb / 4, e.bucket_mb, min(e.bucket_mb * 4, 1024.0)]}
    codecs = [Dense(), Cast(), TopK.usual(), PowerSGD.usual()]
    found["compressor"] = [c for c in codecs if _can_set(e, "compressor", c)]
    found["strategy"] = [s for s in (LocalSGD(every=4), LocalSGD(every=16)) if _can_set(e, "strategy", s)]
    if hasattr(e.partition, "micros"):
        found["partition.micros"] = [m for m in (1, 2, 4, 8) if _can_set(e, "partition.micros", m)]
    for path, values in found.items():
        now = reduce(getattr, path.split("."), e)
        found[path] = [*([] if now in values else [now]), *values]
    return found


def _can_set(e: Experiment, path: str, value: Any) -> bool:
    try:
        return bool(e.set(path, value))
    except KnobError:
        return False


def _make_dimension(e: Experiment, path: str, asked: Any) -> Dimension:
    if isinstance(asked, tuple):
        return _make_range(e, path, asked)
    full, knob = resolve(e, path)
    if not isinstance(asked, list) or not asked:
        raise KnobError(f"{path}={short(asked)}: must be a list of values to try, or a range (low, high)")
    if not knob.live:
        raise KnobError(f"{full}: cannot change while a run is live, so it cannot be tuned")
    return Dimension(full, tuple(dict.fromkeys(_read_value(e, full, value) for value in asked)), knob)


def _read_value(e: Experiment, path: str, value: Any) -> Any:
    """Returns the value as the experiment would hold it; as given, if it also needs other settings."""
    try:
        return reduce(getattr, path.split("."), e.set(path, value))
    except KnobError:
        given_alone = resolve(e, path)[1]
        if isinstance(value, str | dict) or given_alone.choices:
            raise
        return given_alone.check(value, path)


def _make_range(e: Experiment, path: str, within: tuple[float, float] | None) -> Dimension:
    full, knob = resolve(e, path)
    if not (knob.live and (knob.choices or knob.kind is bool or (knob.kind in (int, float) and knob.low is not None))):
        raise KnobError(f"{path}: must be a live knob with a range or with choices, to be tuned; it is {knob.allowed}")
    if within is not None:
        if knob.kind not in (int, float) or not _is_range(within):
            raise KnobError(f"within {path}={within!r}: must be two numbers, the lower one first")
        low, high = (knob.check(x, path) for x in within)
        knob = replace(knob, low=low, high=high)
    knob = replace(knob, name=full, log=bool(knob.log and knob.low and knob.low > 0))
    values: tuple[Any, ...] = tuple(knob.choices or ((False, True) if knob.kind is bool else ()))
    return Dimension(full, values, knob)


def _is_range(within: Any) -> bool:
    two = isinstance(within, (list, tuple)) and len(within) == 2
    return two and all(isinstance(x, (int, float)) for x in within) and bool(within[0] < within[1])


def list_candidates(dims: Sequence[Dimension]) -> Iterator[Settings]:
    """Yields all combinations of values and points of ranges."""
    for values in itertools.product(*(d.trial_points for d in dims)):
        yield {d.path: value for d, value in zip(dims, values, strict=True)}


def current_settings(e: Experiment, dims: Sequence[Dimension]) -> Settings:
    """Returns the values that `e` has for `dims`."""
    return {d.path: reduce(getattr, d.path.split("."), e) for d in dims}


def apply_settings(e: Experiment, settings: Settings) -> Experiment:
    """Raises KnobError."""
    return user_input.turned(e, settings.items())


def learns_alike(before: Experiment, after: Experiment) -> bool:
    """Whether both experiments learn the same, up to the order of sums."""
    exact = before.strategy.exact and after.strategy.exact
    same = before.strategy == after.strategy or (exact and before.strategy.batches(1) == after.strategy.batches(1))
    coded = after.compressor == before.compressor or isinstance(after.compressor, Dense)
    rest = replace(after, strategy=before.strategy, compressor=before.compressor, bucket_mb=before.bucket_mb,
                   partition=before.partition, fabric=before.fabric)  # fmt: skip
    return same and coded and rest == before
