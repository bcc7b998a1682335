"""Finds the slow rank by arrival at the collectives.

An all-reduce makes all ranks' steps equally long. The cause arrives last and waits least. `blame_ranks` measures its
cost. Its phases and port show the reason, against the other ranks' median. Medians and a noise threshold reject
outliers.

[Note: False alarms] Simulated ranks had equal speed: windows of 20 steps, log-normal step times. With independent
steps, it named no rank in 3,789 windows. They had 2, 4 and 8 ranks and spreads of 2 to 30 %. With a correlation of 0.8
between neighbouring steps, a rank is slow for some 10 steps. Then 14 to 38 % of the windows named a rank. `causes.py`
allows for correlation and names a rank in 6 to 16 %.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.communication.messages import measure_ports, measure_waits
from workbench.analysis.steps.collectives import against_others, lined_up, of_others
from workbench.analysis.steps.window import Window, last_steps, since_change, stands_for
from workbench.analysis.stragglers.blame import blame_ranks
from workbench.analysis.stragglers.bubble import spread_at
from workbench.analysis.stragglers.naming import COMPUTE, STEADY, Slowness, describe_straggler, find_slowness
from workbench.record.timeline import Timeline

MIN_STEP_SHARE = 0.05  # of a step: least reported harm
MIN_HARM_SHARE = 0.005  # of a step: least harm of a clearly slow rank
MIN_SIGMAS = 4.5  # standard errors above zero; see [Note: False alarms]
MIN_SLOW_SHARE = 0.7  # share of the steps or rounds in which the rank must be slow
MIN_STEPS = 6  # steps before a verdict
ROUND_LOOKBACK = 4  # times further back, for a periodic strategy's meetings
MIN_EXPLAINED_SHARE = 0.4  # share of the harm in a reported phase


class StragglerVerdict(NamedTuple):
    """A slow rank that other ranks wait for."""

    rank: int
    side: str  # "compute" or "link"
    phase: str  # one of COMPUTE, "compute" (all of them), codec, link or "outside its phases"
    phases: tuple[str, ...]  # covered by `seconds`
    seconds: float  # per step, beyond the other ranks'
    share: float  # `seconds` as a share of the rank's own measured step
    harm: float  # seconds per step of other ranks' stalls
    victims: tuple[int, ...]
    relative: float  # other ranks' compute over its own; 1: equally fast (NVRx's relative score)
    individual: float  # its own earlier compute over its present one; NaN without earlier steps
    text: str
    cause: bool = True


class _StragglerFacts(NamedTuple):
    """A verdict's inputs, in seconds per step."""

    step: float  # median step, or mean of the median round
    own: np.ndarray  # (p,) the same by rank
    usual: np.ndarray  # (compute phases, p) the other ranks' seconds
    excess: np.ndarray  # (phases, p) beyond the other ranks', STEADY then MEETING
    noise: float  # of the steady phases' sum
    ahead: np.ndarray  # (p,) share of steps with slower steady phases
    met: bool  # whether ranks met in every step
    cost: np.ndarray  # (rounds, victim, culprit)
    net: np.ndarray  # (rounds, p) a rank's cost to other ranks, less the worst to it

    @property
    def harm(self) -> np.ndarray:
        """`(p,)` cost to the median victim: mean over rounds, trimmed by 10 % per end."""
        rounds = np.sort(_of_others(self.cost), axis=0)
        cut = len(rounds) // 10
        return rounds[cut : len(rounds) - cut].mean(axis=0) if len(rounds) else np.zeros(self.cost.shape[-1])

    @property
    def doubt(self) -> float:
        return 1.25 * _robust_sigma(self.net) / float(np.sqrt(max(len(self.net), 1)))


def find_straggler(tl: Timeline, last: int = 20) -> StragglerVerdict | None:
    """Returns the rank that other ranks wait for in the last steps since a change, or None.

    With a periodic strategy, it judges delays since the last meeting.
    """
    first, stop = last_steps(tl, last)
    floor = since_change(tl, 0, stop)
    w = Window(tl, max(first, floor), stop)
    if len(w.ranks) < 2 or w.complete.sum() < MIN_STEPS or spread_at(tl, stop - 1)[0] > 1:
        return None
    met, cost = blame_ranks(w, lined_up(w))
    if not len(met):
        met, cost = measure_waits(w)
    if 0 < len(met) >= w.complete.sum() - 1:
        f = _gather_facts(w, w.complete, met, cost, np.ones(len(met)))
    else:
        f = _periodic_facts(Window(tl, max(stop - ROUND_LOOKBACK * last, floor), stop), last)
    rank = _find_guilty(f)
    return None if rank is None else _make_verdict(tl, w, f, rank, last)


def why_silent(tl: Timeline) -> str:
    """Returns why `find_straggler` found no rank.

    "alone":  one rank
    "alike":  one rank stands for all
    "stages": ranks compute different stages; see `bubble`
    "early":  too few steps since the last change
    "nobody": no rank is slow
    """
    first, stop = last_steps(tl)
    w = Window(tl, since_change(tl, max(first, stop - MIN_STEPS), stop), stop)
    early = w.complete.sum() < MIN_STEPS
    if len(w.ranks) == 1 and not early:  # one rank's rows may arrive first
        return "alone" if stands_for(tl) == 1 else "alike"
    if spread_at(tl, stop - 1)[0] > 1:
        return "stages"
    return "early" if early else "nobody"


def _periodic_facts(w: Window, last: int) -> _StragglerFacts:
    met, cost = blame_ranks(w, lined_up(w))
    size = np.diff(np.concatenate([[w.first - 1], met]))
    recent = met >= w.stop - last
    recent[-1:] = True
    return _gather_facts(w, w.complete & (w.steps >= w.stop - last), met[recent], cost[recent], size[recent])


def _gather_facts(w: Window, over: np.ndarray, met: np.ndarray, cost: np.ndarray, size: np.ndarray) -> _StragglerFacts:
    named = [w.seconds("compute", name=name) for name in COMPUTE]
    rest = w.step_seconds - w.seconds("compute") - w.seconds("wait")
    steady = np.stack([against_others(phase[over]) for phase in (*named, rest)])  # (phases, steps, p)
    total = steady.sum(axis=0)
    at = met - w.first
    ports = w.seconds("port") + measure_ports(w)
    meeting = [against_others(busy[at]) / size[:, None] for busy in (w.seconds("codec"), ports)]
    excess = np.stack([*np.median(steady, axis=1), *map(_median_or_zero, meeting)])
    cost = cost / size[:, None, None]
    everyday = bool(len(size)) and float(size.max()) == 1.0
    whole = w.step_seconds[over]
    typical = np.median if everyday else np.mean
    usual = np.stack([np.median(phase[over] - against_others(phase[over]), axis=0) for phase in named])
    return _StragglerFacts(
        step=float(typical(whole.mean(axis=1))),
        own=typical(whole, axis=0),
        usual=usual,
        excess=excess,
        noise=1.25 * _robust_sigma(total) / float(np.sqrt(len(total))),
        ahead=(total > 0).mean(axis=0),
        met=everyday,
        cost=cost,
        net=_of_others(cost) - cost.max(axis=2, initial=0),
    )


def _find_guilty(f: _StragglerFacts) -> int | None:
    worth = MIN_STEP_SHARE * f.step
    behind, choked = f.excess[:4].sum(axis=0), f.excess[4:].sum(axis=0)
    slow = (behind > max(worth, MIN_SIGMAS * f.noise)) & (f.ahead >= MIN_SLOW_SHARE)
    if f.met:
        late = (f.net > 0).mean(axis=0) >= MIN_SLOW_SHARE
        found = late & (_median_or_zero(f.net) > max(worth, MIN_SIGMAS * f.doubt))
        found |= (slow | (choked > worth)) & (f.harm > MIN_HARM_SHARE * f.step)
        score = f.harm
    else:
        found = slow | ((choked > worth) & (f.harm > MIN_EXPLAINED_SHARE * choked))
        score = behind.clip(min=0) + choked.clip(min=0)
    return int(np.argmax(np.where(found, score, -1.0))) if found.any() else None


def _make_verdict(tl: Timeline, w: Window, f: _StragglerFacts, rank: int, last: int) -> StragglerVerdict:
    found = find_slowness(f.excess[:, rank], f.usual[:, rank])
    others = [v for v in range(len(w.ranks)) if v != rank]
    harm = float(f.harm[rank]) if len(f.cost) else 0.0
    if f.met and found.seconds < MIN_EXPLAINED_SHARE * harm:
        found = Slowness(STEADY[-1], STEADY[-1:], harm)
    if not f.met:
        harm = min(harm, found.seconds)  # a round contains other delays too
    share = min(found.seconds / max(float(f.own[rank]), 1e-9), 1.0)
    suffers = _median_or_zero(f.cost)[:, rank]
    victims = tuple(int(w.ranks[v]) for v in others if suffers[v] > 0.25 * harm > 0)
    scores = _compare_scores(tl, w, rank, last)
    text = describe_straggler(int(w.ranks[rank]), found, share, harm, victims)
    side = "link" if found.phase == "link" else "compute"
    return StragglerVerdict(int(w.ranks[rank]), side, *found[:2], found.seconds, share, harm, victims, *scores, text)


def _compare_scores(tl: Timeline, w: Window, rank: int, last: int) -> tuple[float, float]:
    """Returns the other ranks' compute and the rank's earlier compute, over its compute now."""
    now = np.median(w.seconds("compute")[w.complete], axis=0)
    if not now[rank]:
        return 1.0, float("nan")
    relative = float(np.median(np.delete(now, rank)) / now[rank])
    before = Window(tl, max(w.first - 5 * last, 0), w.first)
    if len(before.ranks) != len(w.ranks) or not before.complete.any():
        return relative, float("nan")
    return relative, float(np.median(before.seconds("compute")[before.complete], axis=0)[rank] / now[rank])


def _of_others(cost: np.ndarray) -> np.ndarray:
    """`(rounds, culprit)` cost to the median victim."""
    return np.diagonal(of_others(cost.swapaxes(1, 2)), axis1=1, axis2=2)


def _median_or_zero(values: np.ndarray) -> np.ndarray:
    return np.median(values, axis=0) if len(values) else np.zeros(values.shape[1:])


def _robust_sigma(values: np.ndarray) -> float:
    """Robust noise: 1.4826 times the median distance from the median."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values, axis=0)))) if len(values) else 0.0
