"""Calibration: prices of codecs inside a model and of a strategy's arithmetic."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from workbench.experiment import Experiment
from workbench.sim.costs.durations import name_codec
from workbench.sim.costs.prices import Price, fit_price

CODER_CALLS = ("encode", "decode")
PRICED_REQUESTS = ("curve", "value", "factors")


def price_coders(spans: Any, at: Callable[[int], Experiment]) -> dict[str, tuple[Price, Price]]:
    """Returns by compressor the median prices of encoding and decoding inside a replica.

    spans: of undisturbed steps; at: the experiment at a step
    """
    found: dict[str, dict[str, list[tuple[int, float]]]] = defaultdict(lambda: defaultdict(list))
    codec = spans[spans.equal("lane", "codec") & (spans.nbytes > 0)]
    for step, name, t0, t1, nbytes in zip(codec.step, codec.name, codec.t0, codec.t1, codec.nbytes, strict=True):
        how, what, rest = [*str(name).split(" ", 2), ""][:3]
        if how in CODER_CALLS and what in ("activation", "gradient"):
            way: Any = at(int(step)).partition
            way = way if rest[:1].isdigit() and way.depth > 1 else way.layers  # micro-batches cross between stages
            found[name_codec(way.activations if what == "activation" else way.gradients)][how].append(
                (int(nbytes), t1 - t0)
            )
    return {
        name: (fit_price(by[CODER_CALLS[0]], _median_or_zero), fit_price(by[CODER_CALLS[1]], _median_or_zero))
        for name, by in found.items()
    }


def price_flops(spans: Any, samples: Any) -> dict[str, float]:
    """Returns by name the median seconds per floating-point operation."""
    names = sorted({str(name)[6:] for name in samples.name if str(name).startswith("flops ")})
    return {name: rate for name in names if (rate := _seconds_per_flop(spans, samples, name))}


def _seconds_per_flop(spans: Any, samples: Any, name: str) -> float:
    did: dict[tuple[int, int], float] = defaultdict(float)
    took: dict[tuple[int, int], float] = defaultdict(float)
    said = samples[samples.equal("name", f"flops {name}")]
    for rank, step, value in zip(said.rank.tolist(), said.step.tolist(), said.value.tolist(), strict=True):
        did[rank, step] += value
    rows = spans[spans.equal("name", name) & (spans.equal("lane", "codec") | spans.equal("lane", "compute"))]
    for rank, step, seconds in zip(rows.rank.tolist(), rows.step.tolist(), (rows.t1 - rows.t0).tolist(), strict=True):
        took[rank, step] += seconds
    return _median_or_zero([took[key] / n for key, n in did.items() if n and key in took])


def price_requests(spans: Any) -> dict[str, float]:
    """Returns by name the median seconds of a strategy's requests; "collect": a backward's extra seconds."""
    compute = spans[spans.equal("lane", "compute")]
    found = {name: rows for name in PRICED_REQUESTS if len(rows := compute[compute.equal("name", name)])}
    times = {name: _median_or_zero((rows.t1 - rows.t0).tolist()) for name, rows in found.items()}
    if "factors" in found:
        rows = compute[compute.phase("forward") | compute.phase("backward")]
        listened = np.isin(rows.step, np.unique(found["factors"].step))
        if listened.any() and not listened.all():
            more = _seconds_per_step(rows[listened]) - _seconds_per_step(rows[~listened])
            times["collect"] = max(0.0, more / _count_backwards(rows[listened]))
    return times


def _seconds_per_step(passes: Any) -> float:
    """Returns median seconds per rank and step."""
    keys, which = np.unique(np.stack([passes.rank, passes.step]), axis=1, return_inverse=True)
    return float(np.median(np.bincount(which.ravel(), passes.t1 - passes.t0, keys.shape[1])))


def _count_backwards(passes: Any) -> float:
    """Returns the number of forwards per rank and step."""
    rows = passes[passes.equal("name", "forward")]
    return len(rows) / max(1, len(np.unique(np.stack([rows.rank, rows.step]), axis=1).T))


def _median_or_zero(values: Iterable[float]) -> float:
    every = list(values)
    return float(np.median(every)) if every else 0.0
