"""Does compression pay? What it takes to encode and decode, against the waiting that it saves.

    encode + decode + standing still now    against    standing still with Dense

What a step stood still for while its own rank was encoding or decoding counts once, as encoding. Compressing beside
computing costs nothing where cores are idle, and up to all of its time where they are not; between the two nothing is
said for certain, unless steps with Dense were measured under the same settings: then whole steps are compared.

With Dense: from steps of the same run without compression and with all else the same, if there were any; else predicted
from the dense all-reduces that measuring made on this very wire (`measure_every`), bucket after bucket:

    end_k = max(end_{k-1}, ready_k) + took_k;     standing still = end_last - (when the rank began to wait)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from workbench.analysis.compare.clear import compared, estimated
from workbench.analysis.compare.compression import buckets
from workbench.analysis.compare.sides import SETTLE, WINDOW, Side
from workbench.analysis.compare.sides import before as steps_before
from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.settings import Stretch, stretches
from workbench.analysis.steps.steps import packing
from workbench.analysis.steps.window import MEASURING, Window, last_steps
from workbench.analysis.steps.words import duration
from workbench.record.timeline import Timeline

if TYPE_CHECKING:
    from workbench.record.run import Run

SAME = ("strategy", "fabric", "pace", "batch", "bucket_mb")  # what must be the same where Dense was measured
MEASURED = 400  # steps in which measurements are looked for
SHORT = 1e-4  # seconds that are not worth a word


class BreakEven(NamedTuple):
    """Medians per step in seconds; NaN where nothing is known.

    verdict: "pays", "costs", "depends" (on whether cores are idle), "even" (no clear difference), "short" (too few
             steps yet) or "unknown". `workbench.analysis.compare.clear` says what is clear, as for cards of changes
    known:   how it is known what Dense would take: "measured", "predicted" or ""
    """

    name: str
    steps: tuple[int, int]  # that were looked at
    codec: float  # encoding and decoding
    beside: float  # of it, while the step did not stand still
    exposed: float  # standing still, without what the rank itself compressed meanwhile
    dense: float  # standing still with Dense
    verdict: str
    known: str
    text: str


class _Dense(NamedTuple):
    """What Dense takes in each of some steps: standing still, and whole steps if they were measured."""

    exposed: np.ndarray
    step: np.ndarray | None
    known: str
    basis: str


def break_even(run: Run, last: int = WINDOW) -> BreakEven | None:
    """Whether the present compression pays, from the last steps; None while nothing is compressed or known."""
    every = stretches(run)
    now, tl = every[-1], run.timeline
    first, stop = last_steps(tl)
    begin = max(now.first, first)
    if not now.compressor or stop <= begin + SETTLE:
        return None
    side = steps_before(tl, stop, begin, last)
    if not len(side.seconds) or len(side.window.ranks) < 2:
        return None
    w = side.window
    codec, shown = w.seconds("codec"), packing(w)
    wait = w.seconds("wait")
    here = {"codec": codec, "beside": codec - shown, "low": wait, "high": wait + codec - shown}
    found = {name: side.each(values) for name, values in here.items()}
    middle = {name: estimated(values).value for name, values in found.items()}
    dense = _measured(tl, every, last) or _predicted(tl, side, now)
    verdict = _verdict(found, side, dense)
    exposed = max(0.0, middle["high"] - middle["codec"])
    facts = middle["codec"], middle["beside"], exposed, estimated(dense.exposed).value if dense else float("nan")
    text = _text(now.compressor, *facts, verdict, side, dense)
    return BreakEven(now.compressor, _looked(side, begin), *facts, verdict, dense.known if dense else "", text)


# -- what Dense takes


def _measured(tl: Timeline, every: list[Stretch], last: int) -> _Dense | None:
    """From the newest steps without compression and with all else the same."""
    now = every[-1]
    for s in reversed(every[:-1]):
        if s.compressor or any(s.settings.get(k) != now.settings.get(k) for k in SAME):
            continue
        side = steps_before(tl, s.stop, s.first, last)
        if not side.lacks:
            first, stop = _looked(side, s.first)
            return _Dense(side.exposed, side.seconds, "measured", f"steps {first} to {stop - 1}")
    return None


def _looked(side: Side, begin: int) -> tuple[int, int]:
    """[first, stop) of the steps looked at: the first ones after a change at `begin` are left out."""
    return max(side.steps[0], begin + SETTLE), side.steps[1]


def _predicted(tl: Timeline, side: Side, now: Stretch) -> _Dense | None:
    """From the dense all-reduces that measuring made under the present settings."""
    stop = side.steps[1]
    took, n = _took(Window(tl, max(now.first, stop - MEASURED), stop))
    if not took:
        return None
    return _Dense(side.each(_played(side.window, took)), None, "predicted", f"{n} dense all-reduces")


def _took(w: Window) -> tuple[dict[int, float], int]:
    """(median seconds of a bucket's dense all-reduce from the last arrival on, how many there were)."""
    c = lined_up(w, MEASURING)
    lasted = np.max(c.t1, axis=1) - c.last if len(c.t1) else np.empty(0)
    rows, number = buckets(w.lane(MEASURING))
    names = {str(name): int(k) for name, k in zip(rows.name, number, strict=True)}
    found: dict[int, list[float]] = {}
    sent = c.full & (c.nbytes > 0).all(axis=1)  # not the arithmetic that follows
    for name, seconds in zip(c.name[sent], lasted[sent], strict=True):
        if str(name) in names:
            found.setdefault(names[str(name)], []).append(float(seconds))
    return {k: float(np.median(v)) for k, v in found.items()}, sum(map(len, found.values()))


def _played(w: Window, took: dict[int, float]) -> np.ndarray:
    """(steps, ranks) seconds that each step would stand still for its buckets if they were sent dense."""
    out = np.zeros(w.shape)
    rows, number = buckets(w.lane("comm"))
    waits = w.lane("wait")
    for step in np.unique(rows.step):
        mine = rows.step == step
        end = -np.inf
        ready = {int(k): _ready(rows.rank[mine], rows.asked[mine], number[mine] == k) for k in np.unique(number[mine])}
        for k, t in sorted(ready.items(), key=lambda item: item[1]):
            end = max(end, t) + took.get(k, 0.0)
        begun, here = np.full(len(w.ranks), end), waits[waits.step == step]
        np.minimum.at(begun, w.column(here.rank), here.t0)
        out[step - w.first] = (end - begun).clip(min=0)
    return out


def _ready(ranks: np.ndarray, asked: np.ndarray, mine: np.ndarray) -> float:
    """When the last rank had the bucket."""
    first: dict[int, float] = {}
    for rank, t in zip(ranks[mine].tolist(), asked[mine].tolist(), strict=True):
        first[rank] = min(t, first.get(rank, t))
    return max(first.values())


# -- what follows


def _verdict(found: dict[str, np.ndarray], side: Side, dense: _Dense | None) -> str:
    if side.lacks:
        return "short"
    if dense is None:
        return "unknown"
    if dense.step is not None:
        return _between(side.seconds, side.seconds, dense.step)
    return _between(found["low"], found["high"], dense.exposed)


def _between(low: np.ndarray, high: np.ndarray, dense: np.ndarray) -> str:
    """`dense` against what lies between `low` and `high`."""
    if compared(high, dense, least=SHORT).more:
        return "pays"
    if compared(dense, low, least=SHORT).more:
        return "costs"
    unsure = compared(low, dense, least=SHORT).more and compared(dense, high, least=SHORT).more
    return "depends" if unsure else "even"


def _text(name: str, codec: float, beside: float, exposed: float, standing: float, verdict: str, side: Side,
          dense: _Dense | None) -> str:
    aside = f", {duration(beside)} of it beside computing" if beside > max(0.2 * codec, SHORT) else ""
    takes = f"takes {duration(codec)} per step to encode and decode{aside}{',' if aside else ''}"
    if verdict == "short":
        so_far = f"{name} {takes} and is stalled for {duration(exposed)} more"
        return f"{so_far}. Whether it pays is not said yet: {side.lacks}."
    if dense is None:
        return (
            f"{name} {takes} and is stalled for {duration(exposed)} more. What Dense would take is not known here: "
            f"set measure_every to 20, or make some steps with the compressor Dense."
        )
    saved = standing - exposed
    saves = f"saves {duration(saved)} of waiting" if saved >= 0 else f"waits {duration(-saved)} longer than Dense"
    match verdict:
        case "costs" if saved > codec:
            end = f"{name} {takes} and {saves}, and yet Dense was faster on this link."
        case "costs":
            end = f"{name} {takes} and {saves}: on this link Dense would be faster."
        case "pays" if saved < codec:
            end = f"{name} {takes} and {saves}: it pays, for most of that is hidden."
        case "pays":
            least = f"takes {duration(codec)} to encode and decode{aside}"
            end = f"{name} {saves} per step and {least}: it pays on this link."
        case "depends":
            end = f"{name} {takes} and {saves}: it costs more than it saves, unless cores are idle meanwhile."
        case _:
            end = f"{name} {takes} and {saves}: no clear difference from Dense on this link."
    if dense.step is not None:
        now, then = (float(np.median(seconds)) for seconds in (side.seconds, dense.step))
        took = f"a step takes {duration(now)} and took {duration(then)} with Dense"
        return f"{end} Measured: {took}, in {dense.basis}."
    return f"{end} With Dense: predicted from {dense.basis} made while measuring."
