"""The critical path of a step across ranks: the chain of work that the step waited for.

The walk goes back from the last rank's end. A collective takes from the last arrival to its end. Before that, the path
is on the rank that arrived last. There it is in the lane's earlier work (a collective, packing) or in the compute
before the request. A message leads to its sender. Shorter work on the path would shorten the step, until other work is
as late. A wait is never on the path, only its reason.
References: Kelley and Walker, "Critical-path planning and scheduling", 1959. For traces of one rank: "Holistic Trace
Analysis", facebookresearch/HolisticTraceAnalysis.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.communication.bandwidth import split_name
from workbench.analysis.steps.collectives import is_message, lined_up
from workbench.analysis.steps.window import Window
from workbench.analysis.steps.words import format_seconds
from workbench.analysis.stragglers.naming import join_names
from workbench.record.timeline import Rows, Timeline

CAUSES = {"forward": "forward", "backward": "backward", "update": "optimizer"}  # of each phase
ZERO_SECONDS = 1e-7  # seconds that count as zero
MAX_PIECES = 100_000  # pieces of one step's path
MAX_RESUME_DELAY = 1e-3  # seconds from a collective's end to the child's next request
SLOW_PORT_FACTOR = 1.2  # times the other ports' median, above which the collective waited for this port


class PathPiece(NamedTuple):
    """A piece of a step's path. rank: -1 if all ranks took part."""

    step: int
    rank: int
    cause: str  # of `causes.CAUSES`, except "frozen"
    begin: float
    end: float


def critical_path(tl: Timeline, first: int, stop: int) -> list[PathPiece]:
    """Returns the path of each step in `[first, stop)` that ended on every rank, in order of time.

    It has no gaps, from the begin of the step on the first piece's rank to the last rank's end.
    """
    w = Window(tl, first, stop)
    if not len(w.ranks):
        return []
    walk = _PathWalk(w)
    return [s for step in w.steps[w.complete] for s in walk.walk_back(int(step))]


def describe_path(found: list[PathPiece]) -> str:
    """Describes the longest pieces of these steps' paths, or "".

    >>> describe_path([PathPiece(3, 1, "backward", 0.0, 0.06), PathPiece(3, -1, "network", 0.06, 0.1)])
    "Step 3 was as long as rank 1's backward (60 ms, 60 % of the step) and the network (40 ms, 40 % of it)."
    """
    if not found:
        return ""
    steps = sorted({s.step for s in found})
    parts = path_shares(found)
    whole = sum(parts.values())
    most = [(key, v) for key, v in parts.items() if v >= 0.05 * whole][:4]
    texts = [f"{_name_place(*key)} ({format_seconds(v)}, {v / whole * 100:.0f} % of {'it' if i else 'the step'})"
             for i, (key, v) in enumerate(most)]  # fmt: skip
    which = f"Step {steps[0]} was" if len(steps) == 1 else f"Steps {steps[0]} to {steps[-1]} were"
    return f"{which} as long as {join_names(tuple(texts))}."


def path_shares(found: list[PathPiece]) -> dict[tuple[int, str], float]:
    """Returns the mean seconds per step by `(rank, cause)`, longest first."""
    steps, out = len({s.step for s in found}), dict[tuple[int, str], float]()
    for s in found:
        out[s.rank, s.cause] = out.get((s.rank, s.cause), 0.0) + (s.end - s.begin) / steps
    return dict(sorted(out.items(), key=lambda item: -item[1]))


def _name_place(rank: int, cause: str) -> str:
    own = {"input": "time before its forward (input)", "codec": "packing", "network": "port", "outside":
           "time outside all phases", "optimizer": "update"}  # fmt: skip
    return f"the {cause}" if rank < 0 else f"rank {rank}'s {own.get(cause, cause)}"


class _SpanIndex:
    def __init__(self, rows: Rows, number: np.ndarray | None = None) -> None:
        order = np.argsort(rows.t0, kind="stable")
        self.t0, self.t1, self.asked = (v[order].tolist() for v in (rows.t0, rows.t1, rows.asked))
        self.name = [str(n) for n in rows.name[order]]
        self.number = order.tolist() if number is None else number[order].tolist()
        by_end = np.argsort(rows.t1, kind="stable")
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        self.ends, self.ended = rows.t1[by_end], place[by_end].tolist()
        self.begins = rows.t0[order]

    def last_before(self, t: float) -> int:
        """Returns the last span begun before `t`, or -1."""
        return int(np.searchsorted(self.begins, t - ZERO_SECONDS, "left")) - 1

    def last_ended(self, t: float, since: float, bucket: str | None = None, but: int = -1) -> int:
        """Returns the last span ended in `(since, t]`, or -1. Prefers `bucket`."""
        found = -1
        for at in range(int(np.searchsorted(self.ends, t + ZERO_SECONDS, "right")) - 1, -1, -1):
            i = self.ended[at]
            if self.t1[i] <= since + ZERO_SECONDS:
                break
            if i == but:
                continue
            if bucket is None or split_name(self.name[i])[1].endswith(bucket):
                return i
            found = i if found < 0 else found
        return found


class _PathWalk:
    def __init__(self, w: Window) -> None:
        self.w, self.c = w, lined_up(w)
        rows, waits, compute = w.lane("comm"), w.lane("wait"), w.lane("compute")
        rows = rows[~w.is_outside(rows)]
        sent = is_message(rows)
        numbers = _number_collectives(rows[~sent], self.c.t0, self.c.step, self.c.name, w)
        each = range(len(w.ranks))
        self.waits, self.compute = (
            [_SpanIndex(part[part.rank == w.ranks[r]]) for r in each] for part in (waits, compute)
        )
        mine = [rows[~sent].rank == w.ranks[r] for r in each]
        self.comm = [_SpanIndex(rows[~sent][m], numbers[m]) for m in mine]
        self.sent = [_SpanIndex(rows[sent][rows[sent].rank == w.ranks[r]]) for r in each]
        steps = w.lane("step")
        self.begin, self.end = (np.full(w.shape, np.nan) for _ in range(2))
        at = steps.step - w.first, w.column_of(steps.rank)
        self.begin[at], self.end[at] = steps.t0, steps.t1

    def walk_back(self, step: int) -> list[PathPiece]:
        begin, end = self.begin[step - self.w.first], self.end[step - self.w.first]
        r = int(np.nanargmax(end))
        t, k = float(end[r]), -1
        found: list[PathPiece] = []
        for _ in range(MAX_PIECES):
            if k < 0 and t <= begin[r] + ZERO_SECONDS:
                break
            r, k, cause, rank, since = (
                self._follow_collective(r, k, t) if k >= 0 else self._step_back(r, t, float(begin[r]))
            )
            since = min(since, t)
            if since < t - ZERO_SECONDS:
                name = -1 if rank < 0 else int(self.w.ranks[rank])
                if found and found[-1][1:3] == (name, cause):
                    found[-1] = found[-1]._replace(begin=since)
                else:
                    found.append(PathPiece(step, name, cause, since, t))
            t = since
        return found[::-1]

    def _step_back(self, r: int, t: float, begin: float) -> tuple[int, int, str, int, float]:
        """Returns the work before `t` as `(next rank, collective or -1, cause, piece's rank, begin)`."""
        waits, compute = self.waits[r], self.compute[r]
        i, j = waits.last_before(t), compute.last_before(t)
        still = max(begin, waits.t1[i]) if i >= 0 else begin  # end of the last stall
        if i >= 0 and waits.t1[i] >= t - ZERO_SECONDS:
            return self._follow_wait(r, i, t, begin)
        if j >= 0 and compute.t1[j] >= t - ZERO_SECONDS:
            phase = compute.name[j].split(" ")[0]
            return r, -1, CAUSES.get(phase, "outside"), r, max(still, compute.t0[j])
        done = compute.t1[j] if j >= 0 else begin
        first = j < 0 or compute.t1[j] <= begin + ZERO_SECONDS
        return r, -1, "input" if first else "outside", r, max(still, done)

    def _follow_wait(self, r: int, i: int, t: float, begin: float) -> tuple[int, int, str, int, float]:
        waits = self.waits[r]
        name, since = waits.name[i], max(begin, waits.t0[i])
        if name.startswith("recv "):
            kind, _, source = name[5:].rpartition(" from ")
            s = int(np.searchsorted(self.w.ranks, int(source))) if source.isdigit() else -1
            wanted = f"send {kind} to {self.w.ranks[r]}"
            if 0 <= s < len(self.w.ranks) and (k := self._find_sent(s, wanted, t)) >= 0:
                return s, -1, "network", -1, self.sent[s].asked[k]
            return r, -1, "outside", r, since
        k = self.comm[r].last_ended(t, since, name)
        if k < 0:
            return r, -1, "outside", r, since
        return r, k, "codec", r, self.comm[r].t1[k]  # unpacking and waking

    def _find_sent(self, s: int, name: str, t: float) -> int:
        sent = self.sent[s]
        for at in range(int(np.searchsorted(sent.ends, t + ZERO_SECONDS, "right")) - 1, -1, -1):
            if sent.name[i := sent.ended[at]] == name:
                return i
        return -1

    def _follow_collective(self, r: int, k: int, t: float) -> tuple[int, int, str, int, float]:
        """Returns a transfer before `t`, or else the last rank's earlier work."""
        c = self.comm[r].number[k]
        last = float(self.c.last[c])
        q = int(np.nanargmax(self.c.t0[c]))
        if t > last + ZERO_SECONDS:
            return r, k, "network", self._find_port(c), last
        asked, name = float(self.c.asked[c, q]), split_name(str(self.c.name[c]))[1]
        mine = int(np.flatnonzero(np.asarray(self.comm[q].number) == c)[0])
        p = self.comm[q].last_ended(t, asked, but=mine)
        if p < 0:  # a child requests its second collective after the first
            p = self.comm[q].last_ended(t, asked - MAX_RESUME_DELAY, name, but=mine)
            p = p if p >= 0 and split_name(self.comm[q].name[p])[1] == name else -1
        return (q, p, "codec", q, self.comm[q].t1[p]) if p >= 0 else (q, -1, "codec", q, asked)

    def _find_port(self, c: int) -> int:
        """Returns the rank whose port alone kept it busy, or -1."""
        port = self.c.port[c]
        if np.isnan(port).sum() > len(port) - 2:
            return -1
        r = int(np.nanargmax(port))
        return r if port[r] > SLOW_PORT_FACTOR * float(np.nanmedian(np.delete(port, r))) else -1


def _number_collectives(rows: Rows, t0: np.ndarray, step: np.ndarray, name: np.ndarray, w: Window) -> np.ndarray:
    known = {(int(s), str(n), int(r), float(t0[c, r])): c for c, (s, n) in enumerate(zip(step, name, strict=True))
             for r in np.flatnonzero(~np.isnan(t0[c]))}  # fmt: skip
    keys = zip(rows.step, rows.name, w.column_of(rows.rank), rows.t0, strict=True)
    return np.array([known.get((int(s), str(n), int(r), float(t)), -1) for s, n, r, t in keys], np.int64)
