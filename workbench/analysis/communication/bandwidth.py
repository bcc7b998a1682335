"""Collectives by operation, group and bucket: how many, how large, how fast, and how long ranks waited in them.

A collective takes from the last rank's arrival to the last rank's end, so that no late rank makes the wire look slow;
what ranks waited before is told beside it. Bandwidths are those of nccl-tests (doc/PERFORMANCE.md there): of n ranks
and S bytes in t seconds the algorithm's is S / t, with S the tensor of an all-reduce or broadcast and all ranks' chunks
together of an all-gather, reduce-scatter or all-to-all, and the bus's is that times

    all-reduce 2 (n - 1) / n,    all-gather, reduce-scatter, all-to-all (n - 1) / n,    broadcast 1

which is what a port carries in one direction, whatever n is: it can be laid beside a Link's bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.collectives import lined_up
from workbench.analysis.steps.window import Window
from workbench.record.timeline import Timeline


class ByCollective(NamedTuple):
    """All collectives of one operation, group and bucket. Bandwidths are Mbit/s, times seconds; NaN where none moved.

    bucket:  what is exchanged: "bucket 3", or what a strategy or compressor calls it
    group:   the ranks among which it is, by their place in the mesh; "" for all
    times:   how often it came in these steps
    nbytes:  S of one, in the mean (see above): of an uneven all-to-all, as if all had sent what the mean rank sends
    sent:    bytes that a rank puts on the wire for one, in the mean
    seconds: from the last arrival to the last end, the median
    waiting: of a rank for the last to arrive, in the mean over ranks and collectives
    longest: of a single rank in one of them
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
    """Of steps [first, stop), in the order in which each came first.

    Hand-overs, evaluations and messages from rank to rank are left out, and so is an all-reduce that goes in messages.
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
        operation, bucket, group = parted(str(names[i]))
        sent = (c.nbytes[at] * here[at]).sum(axis=1) / here[at].sum(axis=1)
        seconds = end[at] - last[at]
        whole = sent / max(_sent(operation, n), 1e-12)
        algbw, waits = _rate(whole, seconds), c.waiting[at][here[at]]
        busbw = algbw * factor(operation, n)
        found.append(ByCollective(
            operation, bucket, group, n, len(at), float(whole.mean()), float(sent.mean()), float(np.median(seconds)),
            float(seconds.max()), _middle(algbw), _least(algbw), _middle(busbw), _least(busbw), float(waits.mean()),
            float(waits.max()),
        ))  # fmt: skip
    return found


def factor(operation: str, ranks: int) -> float:
    """Bus bandwidth over algorithm bandwidth, as nccl-tests has it.

    >>> factor("all_reduce", 4), factor("all_gather", 4), factor("broadcast", 4)
    (1.5, 0.75, 1.0)
    """
    if operation == "broadcast":
        return 1.0
    return (2.0 if operation == "all_reduce" else 1.0) * (ranks - 1) / ranks


def parted(name: str) -> tuple[str, str, str]:
    """A collective's operation, bucket and group, of its name on the record.

    >>> parted("all_reduce bucket 3 in within 0"), parted("all_gather top-k bucket 0")
    (('all_reduce', 'bucket 3', 'within 0'), ('all_gather', 'top-k bucket 0', ''))
    """
    operation, _, rest = name.partition(" ")
    bucket, _, group = rest.partition(" in ")
    return operation, bucket, group


def _sent(operation: str, ranks: int) -> float:
    """Bytes that a rank sends, over S; a broadcast is a scatter in the mean of all ranks, as hosts count it."""
    return factor("all_to_all" if operation == "broadcast" else operation, ranks)


def _rate(nbytes: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    moved = (nbytes > 0) & (seconds > 0)
    return np.divide(nbytes * 8e-6, seconds, out=np.full(len(nbytes), np.nan), where=moved)


def _middle(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(np.median(values)) if len(values) else float("nan")


def _least(values: np.ndarray) -> float:
    values = values[~np.isnan(values)]
    return float(values.min()) if len(values) else float("nan")
