"""Messages between neighbours: who waited for whom, and who of them was late only because it had waited itself.

Where ranks exchange messages with neighbours only, a late rank holds up its neighbours, these theirs, and after some
steps all go at its pace. A wait names the rank that was waited for. As far as that rank waited, too, in the steps
around, the wait is passed on to those that it waited for:

    cost_vc = wait_vc (1 - passed_c) + sum_n wait_vn passed_n cost_nc / sum_k cost_nk
    passed_n = min(1, what n waited / the longest that anybody waited for n)
"""

from __future__ import annotations

import re

import numpy as np

from workbench.analysis.steps.window import Window
from workbench.record.timeline import Rows

_ENDS = re.compile(r"^(?P<verb>send|recv) .*?\b(?:to|from) (?P<rank>\d+)$")


def waited(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """(steps, seconds[step, victim, culprit]); nothing where ranks send different things, as servers and trainers do.

    For a server all others wait by design: it is not to blame.
    """
    p = len(w.ranks)
    if not _alike(w):
        return np.empty(0, np.int64), np.zeros((0, p, p))
    rows, other = _ended(w, w.lane("wait"), "recv")
    steps = w.steps[w.complete]
    direct = np.zeros((w.shape[0], p, p))
    np.add.at(direct, (rows.step - w.first, w.column(rows.rank), w.column(other)), rows.t1 - rows.t0)
    return steps, _traced(_spread(direct[w.complete] * ~np.eye(p, dtype=bool)))


def carried(w: Window) -> np.ndarray:
    """(steps, p) seconds for which each rank's port was busy with its messages."""
    rows, _ = _ended(w, w.lane("comm"), "send")
    return w.total(rows, rows.t1 - rows.t0)


def _alike(w: Window) -> bool:
    """Do all ranks send messages, and of the same kinds?"""
    rows, _ = _ended(w, w.lane("comm"), "send")
    kinds: dict[int, set[str]] = {int(r): set() for r in w.ranks}
    for rank, name in {(int(r), str(n)) for r, n in zip(rows.rank, rows.name, strict=True)}:
        kinds[rank].add(name.rpartition(" to ")[0])
    first = next(iter(kinds.values()), set())
    return bool(first) and all(k == first for k in kinds.values())


def _traced(direct: np.ndarray) -> np.ndarray:
    """(steps, p, p) direct waits, as far as they were passed on given to those who were late first."""
    own, longest = direct.sum(axis=2), direct.max(axis=1)
    passed = np.minimum(1.0, _ratio(own, longest))  # (steps, p) of the waits for each rank
    kept = direct * (1 - passed)[:, None, :]
    cost = direct
    for _ in range(direct.shape[1]):
        shares = _ratio(cost, cost.sum(axis=2, keepdims=True))
        cost = kept + np.einsum("svn,snc->svc", direct * passed[:, None, :], shares)
    return cost * ~np.eye(direct.shape[1], dtype=bool)


def _spread(cost: np.ndarray) -> np.ndarray:
    """Each step's mean over the steps around it in which a word reaches everybody: with one neighbour at a time the
    waits of a single step fall on few.
    """
    n, reach = len(cost), 2 * max(1, cost.shape[1] - 1).bit_length() + 1
    if n < reach:
        return cost
    added = np.concatenate([np.zeros((1, *cost.shape[1:])), np.cumsum(cost, axis=0)])
    first = np.clip(np.arange(n) - reach // 2, 0, n - reach)
    return (added[first + reach] - added[first]) / reach


def _ratio(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """`above` / `below`, zero where there is nothing below."""
    below = np.broadcast_to(below, above.shape)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _ended(w: Window, rows: Rows, verb: str) -> tuple[Rows, np.ndarray]:
    """Those of `rows` that are messages with a named other end, and that end."""
    rows = rows[~w.outside(rows)]
    names = rows.coded("name")
    found = [_ENDS.match(str(text)) for text in names.words.texts]
    ends = np.array([int(m["rank"]) if m and m["verb"] == verb else -1 for m in found], np.int64)
    other = ends[names.codes] if len(names) else np.empty(0, np.int64)
    return rows[other >= 0], other[other >= 0]
