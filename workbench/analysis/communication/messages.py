"""Waits for messages between neighbours, traced back to the rank that was late first.

A late rank delays its neighbours and they delay theirs, until all ranks have its pace. Each wait records the awaited
rank. If that rank also waited in nearby steps, it passes the wait on:

    cost_vc = wait_vc (1 - passed_c) + sum_n wait_vn passed_n cost_nc / sum_k cost_nk
    passed_n = min(1, wait of n / the longest wait of any rank for n)
"""

from __future__ import annotations

import re

import numpy as np

from workbench.analysis.steps.window import Window
from workbench.record.timeline import Rows

_ENDS = re.compile(r"^(?P<verb>send|recv) .*?\b(?:to|from) (?P<rank>\d+)$")


def measure_waits(w: Window) -> tuple[np.ndarray, np.ndarray]:
    """Returns (steps, `seconds[step, victim, culprit]`).

    Empty if ranks send different kinds, because trainers wait for a server by design.
    """
    p = len(w.ranks)
    if not _send_alike(w):
        return np.empty(0, np.int64), np.zeros((0, p, p))
    rows, other = _list_messages(w, w.lane("wait"), "recv")
    steps = w.steps[w.complete]
    direct = np.zeros((w.shape[0], p, p))
    np.add.at(direct, (rows.step - w.first, w.column_of(rows.rank), w.column_of(other)), rows.t1 - rows.t0)
    return steps, _trace_waits(_average_around(direct[w.complete] * ~np.eye(p, dtype=bool)))


def measure_ports(w: Window) -> np.ndarray:
    """`(steps, p)` seconds of messages at each port."""
    rows, _ = _list_messages(w, w.lane("comm"), "send")
    return w.sum_rows(rows, rows.t1 - rows.t0)


def _send_alike(w: Window) -> bool:
    rows, _ = _list_messages(w, w.lane("comm"), "send")
    kinds: dict[int, set[str]] = {int(r): set() for r in w.ranks}
    for rank, name in {(int(r), str(n)) for r, n in zip(rows.rank, rows.name, strict=True)}:
        kinds[rank].add(name.rpartition(" to ")[0])
    first = next(iter(kinds.values()), set())
    return bool(first) and all(k == first for k in kinds.values())


def _trace_waits(direct: np.ndarray) -> np.ndarray:
    own, longest = direct.sum(axis=2), direct.max(axis=1)
    passed = np.minimum(1.0, _divide_known(own, longest))  # (steps, p) share passed on
    kept = direct * (1 - passed)[:, None, :]
    cost = direct
    for _ in range(direct.shape[1]):
        shares = _divide_known(cost, cost.sum(axis=2, keepdims=True))
        cost = kept + np.einsum("svn,snc->svc", direct * passed[:, None, :], shares)
    return cost * ~np.eye(direct.shape[1], dtype=bool)


def _average_around(cost: np.ndarray) -> np.ndarray:
    """Averages each step over the steps that a message needs to reach all ranks.

    With one neighbour at a time, a single step's waits fall on few ranks.
    """
    n, reach = len(cost), 2 * max(1, cost.shape[1] - 1).bit_length() + 1
    if n < reach:
        return cost
    added = np.concatenate([np.zeros((1, *cost.shape[1:])), np.cumsum(cost, axis=0)])
    first = np.clip(np.arange(n) - reach // 2, 0, n - reach)
    return (added[first + reach] - added[first]) / reach


def _divide_known(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    below = np.broadcast_to(below, above.shape)
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


def _list_messages(w: Window, rows: Rows, verb: str) -> tuple[Rows, np.ndarray]:
    rows = rows[~w.is_outside(rows)]
    names = rows.coded("name")
    found = [_ENDS.match(str(text)) for text in names.words.texts]
    ends = np.array([int(m["rank"]) if m and m["verb"] == verb else -1 for m in found], np.int64)
    other = ends[names.codes] if len(names) else np.empty(0, np.int64)
    return rows[other >= 0], other[other >= 0]
