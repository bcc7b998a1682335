"""Collectives by operation, group and bucket: count, size, speed and waits.

A collective takes from the last arrival to the last end, so a late rank does not make the network look slow. Bandwidths
are those of nccl-tests (doc/PERFORMANCE.md there). For n ranks and S bytes in t seconds, the algorithm bandwidth is S /
t. S is the tensor of an all-reduce or broadcast, else the chunks of all ranks together. The bus bandwidth is a port's
load in one direction, so it compares with a Link's bandwidth. It is the algorithm bandwidth times

    all-reduce 2 (n - 1) / n,    all-gather, reduce-scatter, all-to-all (n - 1) / n,    broadcast 1
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.window import Window
from workbench.record.timeline import Timeline


class ByCollective(NamedTuple):
    """All collectives of one operation, group and bucket. In Mbit/s and seconds. NaN without data.

    bucket:  "bucket 3", or a strategy's or compressor's name
    group:   the ranks' group in the mesh; "" for all ranks
    times:   number of collectives
    nbytes:  mean S of one; an uneven all-to-all counts as if all ranks sent the mean
    sent:    mean bytes that a rank sends for one
    seconds: from the last arrival to the last end, median
    waiting: a rank's mean wait for the last arrival
    longest: longest wait of a rank
    """

    operation: str
    bucket: str
    group: str
    ranks: int
    times: int
    nbytes: float
    sent: float
    seconds: float
    slowest: float
    algbw: float
    worst_algbw: float
    busbw: float
    worst_busbw: float
    waiting: float
    longest: float


def by_collective(tl: Timeline, first: int, stop: int) -> list[ByCollective]:
    """Returns the collectives of steps `[first, stop)`, by first occurrence.

    Omits hand-overs, evaluations, messages and all-reduces made of messages.
    """
    c = lined_up(Window(tl, first, stop))
    here = ~np.isnan(c.t0)
    last, end = c.last, np.fmax.reduce(c.t1, axis=1) if len(c.t1) else np.empty(0)
    names, inverse = np.unique(c.name.astype(str), return_inverse=True)
    came = {str(name): int(np.argmax(inverse == i)) for i, name in enumerate(names)}
    found = []
    for i in sorted(range(len(names)), key=lambda i: came[str(names[i])]):
        at = np.flatnonzero(inverse == i)
        n = int(here[at].sum(axis=1).max())
        operation, bucket, group = split_name(str(names[i]))
        sent = (c.nbytes[at] * here[at]).sum(axis=1) / here[at].sum(axis=1)
        seconds = end[at] - last[at]
        whole = sent / max(_bytes_sent(operation, n), 1e-12)
        algbw, waits = _compute_rate(whole, seconds), c.waiting[at][here[at]]
        busbw = algbw * bus_factor(operation, n)
        found.append(
            ByCollective(
                operation,
                bucket,
                group,
                n,
                len(at),
                float(whole.mean()),
                float(sent.mean()),
                float(np.median(seconds)),
                float(seconds.max()),
                _median_known(algbw),
                _least_known(algbw),
                _median_known(busbw),
                _least_known(busbw),
                float(waits.mean()),
                float(waits.max()),
            )
        )
    return found


def bus_factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as in nccl-tests.

    >>> bus_factor("all_reduce", 4), bus_factor("all_gather", 4), bus_factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if operation == "broadcast":
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def split_name(name: str) -> tuple[str, str, str]:
    """Splits a collective's name into operation, bucket and group.

    >>> split_name("all_reduce bucket 3 in within 0"), split_name("all_gather top-k bucket 0")
    (('all_reduce', 'bucket 3', 'within 0'), ('all_gather', 'top-k bucket 0', ''))
    """
    operation, _, rest = name.partition(" ")
    bucket, _, group = rest.partition(" in ")
    return operation, bucket, group


def _bytes_sent(operation: str, ranks: int) -> float:
    """Bytes that a rank sends, over S. A broadcast counts as a scatter's mean."""
    return bus_factor("all_to_all" if operation == "broadcast" else operation, ranks)


def _compute_rate(nbytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    moved = (nbytes > 0) & (seconds > 0)
    return np.divide(nbytes * 8e-6, seconds, out=np.full(len(nbytes), np.nan), where=moved)


def _median_known(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _least_known(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.min()) if len(values) else float("nan")
