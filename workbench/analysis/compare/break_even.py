"""Whether compression pays: the time to encode and decode against the saved waiting.

    encode + decode + stall now    against    stall with Dense

Encoding that stalls its own rank's step counts once. Compression during compute costs nothing on idle cores and its
full time on busy ones. In between the verdict is open. Whole steps are compared only with Dense steps under the same
settings. Without such steps, measured dense all-reduces on this network predict Dense, bucket after bucket
(`measure_every`):

    end_k = max(end_{k-1}, ready_k) + took_k;     stall = end_last - (when the rank began to wait)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.compare.clear_difference import compare_values, estimate_median
from workbench.analysis.compare.comparable_steps import SETTLE_STEPS, WINDOW_STEPS, Side
from workbench.analysis.compare.comparable_steps import side_before as steps_before
from workbench.analysis.compare.compression import list_buckets
from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.settings import Stretch, list_stretches
from workbench.analysis.steps.steps import packing_seconds
from workbench.analysis.steps.window import MEASURING, Window, last_steps
from workbench.analysis.steps.words import format_seconds
from workbench.record.timeline import Timeline

if TYPE_CHECKING:
    from workbench.record.run import Run

EQUAL_SETTINGS = ("strategy", "fabric", "pace", "batch", "bucket_mb")  # must be equal in Dense steps
MAX_STEPS_BACK = 400  # steps back to measurements
MIN_DIFFERENCE = 1e-4  # seconds: the least difference that matters


class BreakEven(NamedTuple):
    """Medians per step in seconds. NaN if unknown.

    verdict: "pays", "costs", "depends" (on idle cores), "even" (no clear difference), "short" (too few steps) or
             "unknown"; see `workbench.analysis.compare.clear_difference`
    known:   source of the values with Dense: "measured", "predicted" or ""
    """

    name: str
    steps: tuple[int, int]  # [first, stop)
    codec: float  # encoding and decoding
    beside: float  # the part of it that did not stall the step
    exposed: float  # stall, without the rank's own encoding and decoding
    dense: float  # stall with Dense
    verdict: str
    known: str
    text: str


class _DenseCost(NamedTuple):
    """Dense's stall per step, and whole steps if measured."""

    exposed: np.ndarray
    step: np.ndarray | None
    known: str
    basis: str


def break_even(run: Run, last: int = WINDOW_STEPS) -> BreakEven | None:
    """Judges the present compression, or returns None without compression or steps."""
    every = list_stretches(run)
    now, tl = every[-1], run.timeline
    first, stop = last_steps(tl)
    begin = max(now.first, first)
    if not now.compressor or stop <= begin + SETTLE_STEPS:
        return None
    side = steps_before(tl, stop, begin, last)
    if not len(side.seconds) or len(side.window.ranks) < 2:
        return None
    w = side.window
    codec, shown = w.seconds("codec"), packing_seconds(w)
    wait = w.seconds("wait")
    here = {"codec": codec, "beside": codec - shown, "low": wait, "high": wait + codec - shown}
    found = {name: side.average_each(values) for name, values in here.items()}
    middle = {name: estimate_median(values).value for name, values in found.items()}
    dense = _measure_dense(tl, every, last) or _predict_dense(tl, side, now)
    verdict = _judge_codec(found, side, dense)
    exposed = max(0.0, middle["high"] - middle["codec"])
    facts = middle["codec"], middle["beside"], exposed, estimate_median(dense.exposed).value if dense else float("nan")
    text = _describe_verdict(now.compressor, *facts, verdict, side, dense)
    return BreakEven(now.compressor, _used_steps(side, begin), *facts, verdict, dense.known if dense else "", text)


# -- what Dense takes


def _measure_dense(tl: Timeline, every: list[Stretch], last: int) -> _DenseCost | None:
    """From the newest uncompressed steps with the same `EQUAL_SETTINGS` settings."""
    now = every[-1]
    for s in reversed(every[:-1]):
        if s.compressor or any(s.settings.get(k) != now.settings.get(k) for k in EQUAL_SETTINGS):
            continue
        side = steps_before(tl, s.stop, s.first, last)
        if not side.lacks:
            first, stop = _used_steps(side, s.first)
            return _DenseCost(side.exposed, side.seconds, "measured", f"steps {first} to {stop - 1}")
    return None


def _used_steps(side: Side, begin: int) -> tuple[int, int]:
    return max(side.steps[0], begin + SETTLE_STEPS), side.steps[1]


def _predict_dense(tl: Timeline, side: Side, now: Stretch) -> _DenseCost | None:
    stop = side.steps[1]
    took, n = _bucket_seconds(Window(tl, max(now.first, stop - MAX_STEPS_BACK), stop))
    if not took:
        return None
    return _DenseCost(side.average_each(_play_dense(side.window, took)), None, "predicted", f"{n} dense all-reduces")


def _bucket_seconds(w: Window) -> tuple[dict[int, float], int]:
    """Returns each bucket's median seconds of dense all-reduces, and their number."""
    c = lined_up(w, MEASURING)
    lasted = np.max(c.t1, axis=1) - c.last if len(c.t1) else np.empty(0)
    rows, number = list_buckets(w.lane(MEASURING))
    names = {str(name): int(k) for name, k in zip(rows.name, number, strict=True)}
    found: dict[int, list[float]] = {}
    sent = c.full & (c.nbytes > 0).all(axis=1)  # without local arithmetic
    for name, seconds in zip(c.name[sent], lasted[sent], strict=True):
        if str(name) in names:
            found.setdefault(names[str(name)], []).append(float(seconds))
    return {k: float(np.median(v)) for k, v in found.items()}, sum(map(len, found.values()))


def _play_dense(w: Window, took: dict[int, float]) -> np.ndarray:
    """`(steps, ranks)` seconds of stall with dense buckets."""
    out = np.zeros(w.shape)
    rows, number = list_buckets(w.lane("comm"))
    waits = w.lane("wait")
    for step in np.unique(rows.step):
        mine = rows.step == step
        end = -np.inf
        ready = {
            int(k): _find_ready(rows.rank[mine], rows.asked[mine], number[mine] == k) for k in np.unique(number[mine])
        }
        for k, t in sorted(ready.items(), key=lambda item: item[1]):
            end = max(end, t) + took.get(k, 0.0)
        begun, here = np.full(len(w.ranks), end), waits[waits.step == step]
        np.minimum.at(begun, w.column_of(here.rank), here.t0)
        out[step - w.first] = (end - begun).clip(min=0)
    return out


def _find_ready(ranks: np.ndarray, asked: np.ndarray, mine: np.ndarray) -> float:
    first: dict[int, float] = {}
    for rank, t in zip(ranks[mine].tolist(), asked[mine].tolist(), strict=True):
        first[rank] = min(t, first.get(rank, t))
    return max(first.values())


# -- what follows


def _judge_codec(found: dict[str, np.ndarray], side: Side, dense: _DenseCost | None) -> str:
    if side.lacks:
        return "short"
    if dense is None:
        return "unknown"
    if dense.step is not None:
        return _compare_range(side.seconds, side.seconds, dense.step)
    return _compare_range(found["low"], found["high"], dense.exposed)


def _compare_range(low: np.ndarray, high: np.ndarray, dense: np.ndarray) -> str:
    if compare_values(high, dense, least=MIN_DIFFERENCE).more:
        return "pays"
    if compare_values(dense, low, least=MIN_DIFFERENCE).more:
        return "costs"
    unsure = (
        compare_values(low, dense, least=MIN_DIFFERENCE).more and compare_values(dense, high, least=MIN_DIFFERENCE).more
    )
    return "depends" if unsure else "even"


def _describe_verdict(
    name: str,
    codec: float,
    beside: float,
    exposed: float,
    standing: float,
    verdict: str,
    side: Side,
    dense: _DenseCost | None,
) -> str:
    aside = f", {format_seconds(beside)} of it behind compute" if beside > max(0.2 * codec, MIN_DIFFERENCE) else ""
    takes = f"takes {format_seconds(codec)} per step to encode and decode{aside}{',' if aside else ''}"
    if verdict == "short":
        so_far = f"{name} {takes} and is stalled for {format_seconds(exposed)} more"
        return f"{so_far}. No verdict yet: {side.lacks}."
    if dense is None:
        return (
            f"{name} {takes} and is stalled for {format_seconds(exposed)} more. The time with Dense is unknown: "
            f"set measure_every to 20, or run some steps with the compressor Dense."
        )
    saved = standing - exposed
    saves = (
        f"saves {format_seconds(saved)} of waiting"
        if saved >= 0
        else f"waits {format_seconds(-saved)} longer than Dense"
    )
    match verdict:
        case "costs" if saved > codec:
            end = f"{name} {takes} and {saves}, but Dense was faster on this link."
        case "costs":
            end = f"{name} {takes} and {saves}: on this link Dense would be faster."
        case "pays" if saved < codec:
            end = f"{name} {takes} and {saves}: it pays, because most of that time is hidden."
        case "pays":
            least = f"takes {format_seconds(codec)} to encode and decode{aside}"
            end = f"{name} {saves} per step and {least}: it pays on this link."
        case "depends":
            end = f"{name} {takes} and {saves}: it costs more than it saves, unless cores would be idle otherwise."
        case _:
            end = f"{name} {takes} and {saves}: no clear difference from Dense on this link."
    if dense.step is not None:
        now, then = (float(np.median(seconds)) for seconds in (side.seconds, dense.step))
        took = f"a step takes {format_seconds(now)} and took {format_seconds(then)} with Dense"
        return f"{end} Measured: {took}, in {dense.basis}."
    return f"{end} With Dense: predicted from {dense.basis} made while measuring."
