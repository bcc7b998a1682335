"""Calibrates codecs: the time until the last rank has finished a stretch, with and without compute.

All ranks of a collective wait for the slowest encoder, and on shared cores some stretches take several times the
median. So a stretch's price is the mean over steps of its longest time over ranks. Steps with different compressors
show how much compute slows down when it shares a core with a codec.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from workbench.analysis.steps.cover import Cover
from workbench.compressors import Dense
from workbench.experiment import Experiment
from workbench.sim.costs.durations import name_codec
from workbench.sim.costs.prices import Price, fit_price

DISTURBED_SHARE = 0.05  # share of the longest stretches, which other load has disturbed
MIN_STEPS = 5  # with a compressor, to know its slowdown of compute
MIN_CODEC_SHARE = 0.01  # of compute: less codec work at the same time shows nothing

At = Callable[[int], Experiment]  # at a step
Bytes = Callable[[int, str], int]  # of a bucket at a step, by its name; 0 if the name is no bucket's
By = dict[str, tuple[Price, ...]]


class _CodecStretches(NamedTuple):
    """Stretches of work on buckets, by column.

    number: collectives of the bucket before the stretch
    over:   its seconds in which the rank also computed
    """

    step: np.ndarray
    name: np.ndarray
    number: np.ndarray
    seconds: np.ndarray
    over: np.ndarray
    nbytes: np.ndarray
    met: dict[tuple[int, str], int]  # by step and bucket: number of collectives


def price_codecs(spans: Any, at: At, nbytes: Bytes) -> tuple[By, By]:
    """Returns by compressor the price of each stretch: while the rank's step waits, and while it computes.

    A stretch that is mostly too short to be recorded costs nothing.
    """
    found: dict[tuple[str, int, bool], list[tuple[int, float]]] = defaultdict(list)
    shown: dict[tuple[str, int], int] = defaultdict(int)
    all_, meetings = _list_stretches(spans, nbytes), defaultdict[str, list[int]](list)
    for (step, bucket), count in all_.met.items():
        if nbytes(step, bucket):
            meetings[name_codec(at(step).compressor)].append(count)
    for (step, _, number), rows in _group_rows(all_).items():
        way = name_codec(at(step).compressor)
        longest = rows[all_.seconds[rows].argmax()]
        beside = 2 * all_.over[rows].sum() > all_.seconds[rows].sum()
        found[way, number, beside].append((int(all_.nbytes[longest]), float(all_.seconds[longest])))
        shown[way, number] += 1
    alone: By = {}
    beside_: By = {}
    for way, counts in meetings.items():
        each = [[found.get((way, n, b), []) if 2 * shown[way, n] > len(counts) else []
                 for n in range(max(counts) + 1)] for b in (False, True)]  # fmt: skip
        if any(map(any, each[0] + each[1])):
            alone[way] = tuple(fit_price(one or other, _trimmed_mean) for one, other in zip(*each, strict=True))
            beside_[way] = tuple(fit_price(other or one, _trimmed_mean) for one, other in zip(*each, strict=True))
    return alone, beside_


def measure_slowdown(spans: Any, at: At, nbytes: Bytes) -> tuple[float, list[int]]:
    """Returns (extra seconds of compute per second of codec work at the same time, steps with the least such work).

    Compares steps that differ only in the compressor. Returns (0, []) for too few steps.
    """
    groups: dict[Experiment, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for step in np.unique(spans.step).tolist():
        groups[replace(at(step), compressor=Dense())][name_codec(at(step).compressor)].append(step)
    alike = max(groups.values(), key=lambda by: sum(map(len, by.values())), default={})
    by = {name: steps for name, steps in alike.items() if len(steps) >= MIN_STEPS}
    if len(by) < 2:
        return 0.0, []
    all_, compute = _list_stretches(spans, nbytes), spans[spans.equal("lane", "compute")]
    ranks = len(np.unique(compute.rank))
    work = {name: float(all_.over[np.isin(all_.step, steps)].sum()) / len(steps) / ranks for name, steps in by.items()}
    takes = {name: _usual_compute(compute[np.isin(compute.step, steps)]) for name, steps in by.items()}
    least = min(work, key=lambda name: work[name])
    x, y = (np.array([found[name] - found[least] for name in by]) for found in (work, takes))
    if x.max() < MIN_CODEC_SHARE * takes[least]:
        return 0.0, []
    return float(np.clip(x @ y / (x @ x), 0.0, 1.0)), by[least]


def _list_stretches(spans: Any, nbytes: Bytes) -> _CodecStretches:
    begun, met = defaultdict[tuple[int, int, str], list[float]](list), dict[tuple[int, str], int]()
    comm, codec = spans[spans.equal("lane", "comm")], spans[spans.equal("lane", "codec")]
    for rank, step, name, t0 in zip(comm.rank, comm.step, comm.name, comm.t0, strict=True):
        bucket = str(name).split(" ", 1)[-1]
        begun[int(rank), int(step), bucket].append(float(t0))
        met[int(step), bucket] = max(met.get((int(step), bucket), 0), len(begun[int(rank), int(step), bucket]))
    sizes = np.array([nbytes(int(step), str(name)) for step, name in zip(codec.step, codec.name, strict=True)], int)
    codec, sizes = codec[sizes > 0], sizes[sizes > 0]
    names = np.array([str(name) for name in codec.name], object)
    number = [sum(t < t0 for t in begun[int(rank), int(step), name])
              for rank, step, name, t0 in zip(codec.rank, codec.step, names, codec.t0, strict=True)]  # fmt: skip
    over, compute = np.zeros(len(codec)), spans[spans.equal("lane", "compute")]
    for rank in np.unique(codec.rank):
        here, mine = codec.rank == rank, compute[compute.rank == rank]
        over[here] = Cover(mine.t0, mine.t1).length_between(codec.t0[here], codec.t1[here])
    return _CodecStretches(codec.step, names, np.array(number, int), codec.t1 - codec.t0, over, sizes, met)


def _group_rows(all_: _CodecStretches) -> dict[tuple[int, str, int], np.ndarray]:
    rows: dict[tuple[int, str, int], list[int]] = defaultdict(list)
    for i, key in enumerate(zip(all_.step.tolist(), all_.name, all_.number.tolist(), strict=True)):
        rows[key].append(i)
    return {key: np.array(which) for key, which in rows.items()}


def _usual_compute(compute: Any) -> float:
    """Returns median seconds per rank and step."""
    keys, which = np.unique(np.stack([compute.rank, compute.step]), axis=1, return_inverse=True)
    return float(np.median(np.bincount(which.ravel(), compute.t1 - compute.t0, keys.shape[1])))


def _trimmed_mean(values: list[float]) -> float:
    kept = sorted(values)[: max(1, round((1 - DISTURBED_SHARE) * len(values)))]
    return float(np.mean(kept)) if kept else 0.0
