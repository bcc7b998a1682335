"""Who is slow, and is it the cause or a victim? Judged by arrival at the collectives.

An all-reduce makes everybody's step equally long, so step times say nothing: the cause is ready last and waits
least. How much it costs the others comes from `blame`; why it is late is read from its own phases and port,
against the median of the others. Medians and a threshold over the noise keep it silent on hiccups.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.communication.messages import carried, waited
from workbench.analysis.steps.collectives import against_others, lined_up, of_others
from workbench.analysis.steps.window import Window, last_steps, since_change, stands_for
from workbench.analysis.stragglers.blame import blame
from workbench.analysis.stragglers.bubble import spread_at
from workbench.analysis.stragglers.naming import COMPUTE, STEADY, Slowness, sentence, slowness
from workbench.record.timeline import Timeline

SHARE = 0.05  # of a step: less harm than this is not worth a word
FELT = 0.005  # of a step: enough where the rank itself is plainly slow
SIGMAS = 4.5  # how far above its noise
PERSISTENT = 0.7  # share of the steps or rounds in which it must be so
FEWEST = 6  # steps before anything is said
REACH = 4  # meetings of a periodic strategy are looked for this many times further back
EXPLAINED = 0.4  # share of the harm that one phase must explain to be named


class Verdict(NamedTuple):
    """A slow rank that others wait for."""

    rank: int
    side: str  # "compute" or "link"
    phase: str  # forward, backward, update, "compute" where all three are slow, codec, link, or "outside its phases"
    phases: tuple[str, ...]  # all that the seconds below were spent in
    seconds: float  # per step by which these phases are longer than the others'
    share: float  # the same as a share of the rank's own step, as it is
    harm: float  # seconds per step that the others stand still for it
    victims: tuple[int, ...]
    relative: float  # the others' compute over its own: 1 is as fast as they (NVRx's relative score)
    individual: float  # its own compute in the steps before over that now; NaN without any before
    text: str
    cause: bool = True


class _Facts(NamedTuple):
    """What a verdict is made from, in seconds per step."""

    step: float  # a step: the median, or the mean of the median round
    own: np.ndarray  # (p,) the same of each rank
    usual: np.ndarray  # (phases of compute, p) what the others take for each
    excess: np.ndarray  # (phases, p) by which each phase exceeds the others', STEADY then MEETING
    noise: float  # of the sum of the steady ones
    ahead: np.ndarray  # (p,) share of steps whose steady phases exceed the others'
    met: bool  # did the ranks meet in every step?
    cost: np.ndarray  # (rounds, victim, culprit)
    net: np.ndarray  # (rounds, p) what a rank costs the others less what the worst of them costs it

    @property
    def harm(self) -> np.ndarray:
        """(p,) what each rank costs its median victim: the mean over rounds, less the outermost tenths."""
        rounds = np.sort(_of_others(self.cost), axis=0)
        cut = len(rounds) // 10
        return rounds[cut : len(rounds) - cut].mean(axis=0) if len(rounds) else np.zeros(self.cost.shape[-1])

    @property
    def doubt(self) -> float:
        return 1.25 * _sigma(self.net) / float(np.sqrt(max(len(self.net), 1)))


def straggler(tl: Timeline, last: int = 20) -> Verdict | None:
    """The rank that others wait for in the last `last` steps, or None. Never judges across a change.

    Where ranks meet only every few steps, what each has fallen behind since they last met is judged.
    """
    first, stop = last_steps(tl, last)
    floor = since_change(tl, 0, stop)
    w = Window(tl, max(first, floor), stop)
    if len(w.ranks) < 2 or w.complete.sum() < FEWEST or spread_at(tl, stop - 1)[0] > 1:
        return None
    met, cost = blame(w, lined_up(w))
    if not len(met):
        met, cost = waited(w)
    if 0 < len(met) >= w.complete.sum() - 1:
        f = _facts(w, w.complete, met, cost, np.ones(len(met)))
    else:
        f = _periodic(Window(tl, max(stop - REACH * last, floor), stop), last)
    rank = _guilty(f)
    return None if rank is None else _verdict(tl, w, f, rank, last)


def why_silent(tl: Timeline) -> str:
    """Why `straggler` says nothing: "alone" (one rank), "alike" (one that stands for all), "stages" (ranks compute
    unlike things, see `bubble`), "early" (too few steps since the last change) or "nobody".
    """
    first, stop = last_steps(tl)
    w = Window(tl, since_change(tl, max(first, stop - FEWEST), stop), stop)
    early = w.complete.sum() < FEWEST
    if len(w.ranks) == 1 and not early:  # at first the rows of one rank may be there before those of others
        return "alone" if stands_for(tl) == 1 else "alike"
    if spread_at(tl, stop - 1)[0] > 1:
        return "stages"
    return "early" if early else "nobody"


def _periodic(w: Window, last: int) -> _Facts:
    """The facts where ranks meet every few steps: the rounds that ended in the last steps, or the last one."""
    met, cost = blame(w, lined_up(w))
    size = np.diff(np.concatenate([[w.first - 1], met]))
    recent = met >= w.stop - last
    recent[-1:] = True
    return _facts(w, w.complete & (w.steps >= w.stop - last), met[recent], cost[recent], size[recent])


def _facts(w: Window, over: np.ndarray, met: np.ndarray, cost: np.ndarray, size: np.ndarray) -> _Facts:
    named = [w.seconds("compute", name=name) for name in COMPUTE]
    rest = w.step_seconds - w.seconds("compute") - w.seconds("wait")
    steady = np.stack([against_others(phase[over]) for phase in (*named, rest)])  # (phases, steps, p)
    total = steady.sum(axis=0)
    at = met - w.first
    ports = w.seconds("port") + carried(w)
    meeting = [against_others(busy[at]) / size[:, None] for busy in (w.seconds("codec"), ports)]
    excess = np.stack([*np.median(steady, axis=1), *map(_median, meeting)])
    cost = cost / size[:, None, None]
    everyday = bool(len(size)) and float(size.max()) == 1.0
    whole = w.step_seconds[over]
    typical = np.median if everyday else np.mean
    usual = np.stack([np.median(phase[over] - against_others(phase[over]), axis=0) for phase in named])
    return _Facts(
        step=float(typical(whole.mean(axis=1))), own=typical(whole, axis=0), usual=usual, excess=excess,
        noise=1.25 * _sigma(total) / float(np.sqrt(len(total))), ahead=(total > 0).mean(axis=0), met=everyday,
        cost=cost, net=_of_others(cost) - cost.max(axis=2, initial=0),
    )


def _guilty(f: _Facts) -> int | None:
    """The rank that does harm beyond doubt, if any."""
    worth = SHARE * f.step
    behind, choked = f.excess[:4].sum(axis=0), f.excess[4:].sum(axis=0)
    slow = (behind > max(worth, SIGMAS * f.noise)) & (f.ahead >= PERSISTENT)
    if f.met:
        late = (f.net > 0).mean(axis=0) >= PERSISTENT
        found = late & (_median(f.net) > max(worth, SIGMAS * f.doubt))
        found |= (slow | (choked > worth)) & (f.harm > FELT * f.step)
        score = f.harm
    else:
        found = slow | ((choked > worth) & (f.harm > EXPLAINED * choked))
        score = behind.clip(min=0) + choked.clip(min=0)
    return int(np.argmax(np.where(found, score, -1.0))) if found.any() else None


def _verdict(tl: Timeline, w: Window, f: _Facts, rank: int, last: int) -> Verdict:
    found = slowness(f.excess[:, rank], f.usual[:, rank])
    others = [v for v in range(len(w.ranks)) if v != rank]
    harm = float(f.harm[rank]) if len(f.cost) else 0.0
    if f.met and found.seconds < EXPLAINED * harm:
        found = Slowness(STEADY[-1], STEADY[-1:], harm)
    if not f.met:
        harm = min(harm, found.seconds)  # a single round holds much else
    share = min(found.seconds / max(float(f.own[rank]), 1e-9), 1.0)
    suffers = _median(f.cost)[:, rank]
    victims = tuple(int(w.ranks[v]) for v in others if suffers[v] > 0.25 * harm > 0)
    scores = _scores(tl, w, rank, last)
    text = sentence(int(w.ranks[rank]), found, share, harm, victims)
    side = "link" if found.phase == "link" else "compute"
    return Verdict(int(w.ranks[rank]), side, *found[:2], found.seconds, share, harm, victims, *scores, text)


def _scores(tl: Timeline, w: Window, rank: int, last: int) -> tuple[float, float]:
    """(the others' compute over its own, its own compute before over that now)."""
    now = np.median(w.seconds("compute")[w.complete], axis=0)
    if not now[rank]:
        return 1.0, float("nan")
    relative = float(np.median(np.delete(now, rank)) / now[rank])
    before = Window(tl, max(w.first - 5 * last, 0), w.first)
    if len(before.ranks) != len(w.ranks) or not before.complete.any():
        return relative, float("nan")
    return relative, float(np.median(before.seconds("compute")[before.complete], axis=0)[rank] / now[rank])


def _of_others(cost: np.ndarray) -> np.ndarray:
    """(rounds, culprit): the median over its victims of what each culprit costs."""
    return np.diagonal(of_others(cost.swapaxes(1, 2)), axis1=1, axis2=2)


def _median(values: np.ndarray) -> np.ndarray:
    """The median over the first axis; zero of nothing."""
    return np.median(values, axis=0) if len(values) else np.zeros(values.shape[1:])


def _sigma(values: np.ndarray) -> float:
    """The noise of single values, robustly: 1.4826 times the median distance from their column's median."""
    return 1.4826 * float(np.median(np.abs(values - np.median(values, axis=0)))) if len(values) else 0.0
