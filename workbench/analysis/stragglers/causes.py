"""Causes of a step's time beyond the compute that all ranks share, most expensive first.

A culprit exceeds the other ranks' median beyond its noise in most steps, and stalls other ranks. The cost is how much
earlier the last collective would end with all culprits on time (`blame.measure_relief`). If all ranks stall alike, the
cause has no rank. Such causes are network, packing and time before a forward. A cause needs `MIN_STEP_SHARE` of a step.
A rank behind by `MIN_STEP_SHARE` needs a cost of only `MIN_HARM_SHARE`. The reason: with 8 ranks that vary by 5 %, some
rank is late anyway. The other ranks feel half of a delay of 10 %.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import NamedTuple

import numpy as np

from workbench.analysis.communication.messages import measure_ports
from workbench.analysis.compare.clear_difference import rank_correlation
from workbench.analysis.steps.collectives import Arrivals, against_others, lined_up
from workbench.analysis.steps.steps import held_seconds, packing_seconds
from workbench.analysis.steps.window import OUTSIDE, Window, last_steps, since_change
from workbench.analysis.steps.words import format_seconds
from workbench.analysis.stragglers.blame import measure_relief
from workbench.analysis.stragglers.bubble import spread_at
from workbench.analysis.stragglers.naming import join_names
from workbench.analysis.stragglers.path import critical_path, path_shares
from workbench.analysis.stragglers.straggler import MIN_SLOW_SHARE, MIN_STEP_SHARE, MIN_STEPS
from workbench.record.timeline import Timeline

CAUSES = ("input", "forward", "backward", "optimizer", "network", "codec", "frozen", "outside", "bubble")
STAGE_RANK_CAUSES = (
    "input",
    "forward",
    "backward",
    "optimizer",
    "codec",
    "outside",
)  # causes of single ranks in a pipeline
STAGE_MESSAGE_PART = " in stage "  # part of names of messages between stages
LAST_STEPS = 40  # steps to analyse
MIN_SIGMAS = 3.5  # standard errors above zero; noise exceeds it in 0.2 (2 ranks) to 2.5 % (32 ranks) of windows
NEWEST_STEPS = 16  # newest steps, analysed alone too
MIN_HARM_SHARE = 0.005  # share of a step that a rank behind by `MIN_STEP_SHARE` costs other ranks
MAX_PAUSE_SHARE = 0.3  # share of the steps; a rarer delay is a pause
PAUSE_STEPS = 1.0  # in steps: a longer delay in one step is a pause
RANK_CAUSE_TEXTS = {"input": "before its forward (input) it takes", "forward": "its forward takes",
                    "backward": "its backward takes", "optimizer": "its update takes", "codec": "its packing takes",
                    "network": "its port is busy", "outside": "outside all phases it takes"}  # fmt: skip
COMMON_CAUSE_TEXTS = {"input": "before the forward (input)", "network": "stalled while data move",
                      "codec": "stalled while ranks pack and unpack",
                      "outside": "outside all phases"}  # fmt: skip


class Cause(NamedTuple):
    """One reason why a step takes longer than its compute.

    ranks:   culprits; empty if all ranks are alike
    seconds: mean cost per step for the other ranks
    share:   the cost as a share of the measured step
    """

    cause: str  # of CAUSES
    ranks: tuple[int, ...]
    seconds: float
    share: float
    text: str


class _AnalysedSteps(NamedTuple):
    w: Window
    c: Arrivals
    over: np.ndarray
    own: _OwnTimes


class _OwnTimes(NamedTuple):
    """Each rank's own time: seconds per step, `(n, p)`."""

    phases: dict[str, np.ndarray]
    packed: np.ndarray  # also behind compute: delays the lane's next transfer
    step: float  # the median step, or the mean for rarer meetings
    everyday: bool  # whether ranks meet in every step


def find_causes(tl: Timeline, last: int = LAST_STEPS) -> list[Cause]:
    """Returns the causes in the last `last` steps since the last change, most expensive first.

    Empty without a clear cause, or with fewer than `MIN_STEPS` steps.
    """
    w, over = _steps_of(tl, last)
    if over.sum() < MIN_STEPS:
        return []
    c = lined_up(w)
    looked = _AnalysedSteps(w, c, over, _own_times(w, over))
    stages, slices = spread_at(tl, w.stop - 1)
    if stages > 1:  # without a rank, the places in the replica are unknown
        return [] if len(w.ranks) % (stages * slices) else _rank_causes([*_of_stages(tl, looked, stages, slices)])
    ours = [*_to_blame(looked)] if len(w.ranks) > 1 and c.full.any() else []
    return _rank_causes([*ours, *_of_all(looked, ours)])


def why_unjudged(tl: Timeline, last: int = LAST_STEPS) -> str:
    """Returns why `find_causes` cannot judge these steps, or ""."""
    w, over = _steps_of(tl, last)
    if (known := int(over.sum())) < MIN_STEPS:
        return (f"Too few steps to say what costs a step most: {known} of the last {last} count, "
                f"{MIN_STEPS} must. The first step and steps before the last change never count.")  # fmt: skip
    stages, slices = spread_at(tl, w.stop - 1)
    if stages > 1 and len(w.ranks) % (stages * slices):
        return f"A replica of {stages * slices} ranks lacks a rank, so no rank can be compared with its stage."
    return ""


def _steps_of(tl: Timeline, last: int) -> tuple[Window, np.ndarray]:
    first, stop = last_steps(tl, last)
    w = Window(tl, max(first, since_change(tl, 0, stop)) - 1, stop)  # includes the step before, for its end
    return w, w.complete & (w.steps > max(w.first, _first_step(tl)))


def _first_step(tl: Timeline) -> int:
    """The run's first step, slow because it allocates for later steps."""
    steps = tl.spans.rows().step
    return int(steps.min()) if len(steps) else -1


def _rank_causes(found: list[Cause]) -> list[Cause]:
    worth = {f: MIN_HARM_SHARE if f.ranks and f.cause != "frozen" else MIN_STEP_SHARE for f in found}
    return sorted((f for f in found if f.share >= worth[f]), key=lambda f: -f.seconds)


def _own_times(w: Window, over: np.ndarray) -> _OwnTimes:
    n, p = w.shape
    begin, end, forward = (np.full((n, p), np.nan) for _ in range(3))
    steps, passes = w.lane("step"), w.lane("compute", name="forward")
    begin[steps.step - w.first, w.column_of(steps.rank)] = steps.t0
    end[steps.step - w.first, w.column_of(steps.rank)] = steps.t1
    passes = passes[np.argsort(-passes.t0, kind="stable")]  # assigns a step's first pass last
    forward[passes.step - w.first, w.column_of(passes.rank)] = passes.t0
    since = np.fmin(np.vstack([begin[:1], end[:-1]]), begin)
    total, lead = end - since, forward - begin
    for i, rank in enumerate(w.ranks):
        still = w.cover(rank, "wait", *OUTSIDE)
        total[:, i] -= still.length_between(since[:, i], end[:, i])
        lead[:, i] -= still.length_between(begin[:, i], forward[:, i])
    named = {"forward": "forward", "backward": "backward", "optimizer": "update"}
    phases = {cause: w.seconds("compute", name=name) for cause, name in named.items()}
    rest = total - w.seconds("compute")
    phases["input"] = np.clip(np.minimum(np.nan_to_num(lead), rest), 0, None)
    phases["outside"] = np.clip(rest - phases["input"], 0, None)
    phases["codec"], phases["network"] = packing_seconds(w), w.seconds("port") + measure_ports(w)
    met = np.zeros(n, bool)
    met[w.lane("wait").step - w.first] = True
    everyday = bool(met[over].mean() >= MIN_SLOW_SHARE) or not met.any()
    step = float((np.median if everyday else np.mean)(w.step_seconds[over]))
    return _OwnTimes({k: v[over] for k, v in phases.items()}, w.seconds("codec")[over], step, everyday)


def _to_blame(looked: _AnalysedSteps) -> Iterator[Cause]:
    """Yields the excess of single ranks over the ranks that wait for them."""
    w, c, over, own = looked
    late: dict[str, dict[int, float]] = {}
    seldom: dict[int, tuple[int, float, int, float]] = {}
    steps = w.steps[over]
    for cause, values in {**own.phases, "codec": own.packed}.items():
        busy = values.max(axis=1) > 0 if cause in ("codec", "network") else np.ones(len(values), bool)
        found = excess_seconds(values[busy], own.step)
        new = (
            excess_seconds(values[-NEWEST_STEPS:][busy[-NEWEST_STEPS:]], own.step)
            if len(values) > NEWEST_STEPS
            else found
        )
        mine = np.where(found > 0, found, new) * float(busy.mean())
        if (mine > MIN_STEP_SHARE * own.step).any():
            late[cause] = {int(r): float(mine[r]) for r in np.flatnonzero(mine > MIN_STEP_SHARE * own.step)}
    total = sum(own.phases[k] for k in own.phases if k != "network")
    excess = against_others(np.asarray(total))
    for r in range(len(w.ranks)):
        long = excess[:, r] - float(np.median(excess[:, r])) > PAUSE_STEPS * own.step
        if 0 < long.sum() <= MAX_PAUSE_SHARE * len(long):
            at = int(np.argmax(excess[:, r]))
            seldom[r] = int(long.sum()), float(excess[at, r]), int(steps[at]), float(excess[long, r].sum()) / len(long)
    everyone = sorted({r for found in late.values() for r in found})
    gained = measure_relief(w, c, everyone)
    every = max(1.0, len(steps) / max(len(gained), 1))  # between meetings
    most = max(float(np.median(gained)), float(np.median(gained[-NEWEST_STEPS:]))) / every if len(gained) else 0.0
    if most >= MIN_HARM_SHARE * own.step:
        for cause, those in late.items():
            yield _blame_ranks(w, own, cause, those, most)
    if seldom:
        yield _blame_frozen(looked, seldom)


def excess_seconds(values: np.ndarray, step: float) -> np.ndarray:
    """Returns `(p,)` seconds by which each rank exceeds the other ranks in `(n, p)` `values`.

    0 if below `MIN_STEP_SHARE` of a `step`, absent in many steps or within the noise. The noise is that of a median. If
    neighbouring steps are alike, fewer than n values are independent (see `clear`).
    """
    n = len(values)
    if n < MIN_STEPS:
        return np.zeros(values.shape[1])
    more = against_others(values)
    typical = np.median(more, axis=0)
    doubt = 1.25 * 1.4826 * np.median(np.abs(more - typical), axis=0) / np.sqrt(n)
    sure = (typical > np.maximum(MIN_STEP_SHARE * step, MIN_SIGMAS * doubt)) & (
        (more > 0).mean(axis=0) >= MIN_SLOW_SHARE
    )
    for r in np.flatnonzero(sure):
        alike = rank_correlation(more[:, r])
        alone = max(3.0, n * (1 - alike) / (1 + alike))
        sure[r] = typical[r] > MIN_SIGMAS * doubt[r] * np.sqrt(n / alone) * (1 + 1.5 / alone)
    return np.where(sure, typical, 0.0)


def _blame_ranks(w: Window, own: _OwnTimes, cause: str, found: dict[int, float], most: float) -> Cause:
    ranks, worst = tuple(int(w.ranks[r]) for r in found), max(found.values())
    cost = min(worst, most)
    each = " and ".join(format_seconds(s) for s in found.values())
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {join_names(tuple(map(str, ranks)))}"
    what = (
        RANK_CAUSE_TEXTS[cause]
        if len(ranks) == 1
        else RANK_CAUSE_TEXTS[cause].replace("its ", "their ").replace("it takes", "they take")
    )
    return Cause(cause, ranks, cost, cost / own.step, f"{who}: {what} {each} longer than the other ranks.")


def _blame_frozen(looked: _AnalysedSteps, seldom: dict[int, tuple[int, float, int, float]]) -> Cause:
    w, own = looked.w, looked.own
    ranks = tuple(int(w.ranks[r]) for r in seldom)
    cost = sum(mean for *_, mean in seldom.values())
    r, (times, longest, at, _) = max(seldom.items(), key=lambda item: item[1][1])
    often = "once" if times == 1 else f"{times} times"
    others = f"; so did {join_names(tuple(str(k) for k in ranks if k != w.ranks[r]))}" if len(ranks) > 1 else ""
    text = (
        f"Rank {w.ranks[r]} stalled {often} in {looked.over.sum()} steps, for "
        f"{format_seconds(longest)} at step {at}{others}."
    )
    return Cause("frozen", ranks, cost, cost / own.step, text)


def _of_stages(tl: Timeline, looked: _AnalysedSteps, stages: int, slices: int) -> Iterator[Cause]:
    """Yields a pipeline's causes: ranks against their stage, stages against their mean.

    The cost is the excess on the critical path.
    """
    w, _, over, own = looked
    path = [p for p in critical_path(tl, w.first, w.stop) if over[p.step - w.first]]
    on, place = path_shares(path), np.arange(len(w.ranks)) % (stages * slices)

    def felt(cause: str, r: int, more: float) -> float:
        takes = float(own.phases[cause][:, r].mean())
        return more * min(1.0, on.get((int(w.ranks[r]), cause), 0.0) / takes) if takes else 0.0

    for cause in STAGE_RANK_CAUSES:
        values, found = own.phases[cause], dict[int, float]()
        for columns in (np.flatnonzero(place // slices == k) for k in range(stages)):
            late = excess_seconds(values[:, columns], own.step)
            found |= {int(r): float(s) for r, s in zip(columns, late, strict=True) if s > 0}
        if found:
            blamed = _blame_ranks(w, own, cause, found, max(felt(cause, r, s) for r, s in found.items()))
            yield blamed._replace(text=blamed.text.replace("than the other ranks", "than other ranks of its stage"))
    passes = np.median(own.phases["forward"] + own.phases["backward"], axis=0)
    each = np.array([passes[place // slices == k].min() for k in range(stages)])
    k = int(np.argmax(each))
    if (more := float(each[k] - each.mean())) > MIN_STEP_SHARE * own.step:
        ranks = np.flatnonzero(place // slices == k)
        worst = max(("forward", "backward"), key=lambda cause: float(own.phases[cause][:, ranks].mean()))
        cost = max(felt("forward", int(r), more / 2) + felt("backward", int(r), more / 2) for r in ranks)
        who = f"Stage {k} (rank{'s' * (len(ranks) > 1)} {join_names(tuple(str(w.ranks[r]) for r in ranks))})"
        text = f"{who}: its passes take {format_seconds(more)} longer than the mean stage's."
        yield Cause(worst, tuple(int(w.ranks[r]) for r in ranks), cost, cost / own.step, text)
    rows = w.lane("wait")
    rows = rows[~w.is_outside(rows) & np.array([STAGE_MESSAGE_PART in str(name) for name in rows.name], bool)]
    idle = float(w.sum_rows(rows, rows.t1 - rows.t0)[over].mean())
    yield Cause("bubble", (), idle, idle / own.step, f"All ranks: {format_seconds(idle)} waiting for another stage.")
    for cause in ("network", "codec", "input", "outside"):
        seconds = sum(s for (_, what), s in on.items() if what == cause)
        yield Cause(
            cause, (), seconds, seconds / own.step, f"All ranks: {format_seconds(seconds)} {COMMON_CAUSE_TEXTS[cause]}."
        )


def _of_all(looked: _AnalysedSteps, ours: list[Cause]) -> Iterator[Cause]:
    """Yields the costs that all ranks share: the median rank's time, less the culprits' part."""
    w, c, over, own = looked
    still = np.zeros(w.shape)
    np.add.at(still, c.step - w.first, np.nan_to_num(held_seconds(w, c)))
    wire = np.clip(w.seconds("wait") - still - packing_seconds(w), 0, None)[over]
    blamed = sum(f.seconds for f in ours if f.cause == "network")
    costs = {"network": max(0.0, _usual_mean(wire, own) - blamed)} if len(w.ranks) > 1 else {}
    columns = {k: {int(c) for f in ours if f.cause == k for c in w.column_of(np.array(f.ranks))} for k in own.phases}
    costs |= {k: _usual_mean(own.phases[k], own, columns[k]) for k in ("codec", "input", "outside")}
    for cause, seconds in costs.items():
        yield Cause(
            cause, (), seconds, seconds / own.step, f"All ranks: {format_seconds(seconds)} {COMMON_CAUSE_TEXTS[cause]}."
        )


def _usual_mean(values: np.ndarray, own: _OwnTimes, blamed: Collection[int] = ()) -> float:
    """Returns the median rank's mean. If ranks meet in every step, it is trimmed by 10 % per end.

    blamed: columns to leave out, unless no rank remains
    """
    rest = [column for column in range(values.shape[1]) if column not in blamed]
    values = np.sort(values[:, rest] if rest else values, axis=0)
    cut = len(values) // 10 if own.everyday else 0
    return float(np.median(values[cut : len(values) - cut].mean(axis=0)))
