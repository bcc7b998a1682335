"""Bytes saved (from spans) against error added (measured in some steps, see `measure_every`)."""

from __future__ import annotations

import json
import re
from typing import NamedTuple

import numpy as np

from workbench.analysis.steps.window import Window
from workbench.record.timeline import Rows, Timeline

SAMPLES = ("compression_error", "compression_cosine", "residual_ratio")
_BUCKET = re.compile(r"\bbucket (\d+)$")


class Compression(NamedTuple):
    """The effect of compression in steps `[first, stop)`. NaN if unknown.

    Bytes include indices, scales and headers. They are means over ranks and steps with an exchange. Error, cosine and
    residual are medians over measurements.
    """

    steps: tuple[int, int]
    dense: float  # bytes of a ring all-reduce in fp32
    sent: float  # bytes
    error: float  # ||out - sum|| / ||sum||: the result against the sum of the ranks' inputs
    cosine: float  # between result and sum
    residual: float  # ||sum of e|| / ||sum||: the residual e of all ranks together
    measured: int  # number of measurements

    @property
    def ratio(self) -> float:
        """Dense fp32 bytes over bytes sent."""
        return self.dense / self.sent if self.sent else float("nan")


def measure_compression(tl: Timeline, first: int, stop: int) -> Compression:
    """Measures steps `[first, stop)`."""
    dense, sent = exchanged_bytes(tl, first, stop)
    met = dense > 0
    whole, took = (float(values[met].mean()) if met.any() else float("nan") for values in (dense, sent))
    rows = _list_samples(tl, first, stop)
    found = [rows.value[rows.equal("name", name)] for name in SAMPLES]
    error, cosine, residual = (float(np.median(values)) if len(values) else float("nan") for values in found)
    return Compression((first, stop), whole, took, error, cosine, residual, len(found[0]))


def compression_ratios(tl: Timeline, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the steps with an exchange, and dense fp32 bytes over bytes sent."""
    dense, sent = (values.sum(axis=1) for values in exchanged_bytes(tl, first, stop))
    met = (dense > 0) & (sent > 0)
    return np.arange(first, first + len(met))[met], dense[met] / sent[met]


def exchanged_bytes(tl: Timeline, first: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """`(steps, ranks)`: the buckets' bytes in dense fp32, and as sent."""
    w = Window(tl, first, stop)
    rows, number = list_buckets(w.lane("comm"))
    inside = ~w.is_outside(rows)
    rows, number = rows[inside], number[inside]
    p, scale = len(w.ranks), _dtype_scale(tl)
    sizes = _bucket_sizes(tl, w) if len(rows) else np.zeros((0, 0))
    if not sizes.size or not scale or p < 2:
        return np.zeros(w.shape), np.zeros(w.shape)
    key = (rows.step.astype(np.int64) << 40) | (rows.rank.astype(np.int64) << 24) | number
    _, once = np.unique(key, return_index=True)  # a bucket may take several collectives
    known = np.where(number < sizes.shape[1], number, -1)
    nbytes = np.where(known >= 0, sizes[rows.step - w.first, known], 0)
    whole = w.sum_rows(rows[once], nbytes[once]) * scale * 2 * (p - 1) / p
    return whole, w.sum_rows(rows, rows.nbytes)


def list_buckets(rows: Rows) -> tuple[Rows, np.ndarray]:
    """Returns the buckets' rows and numbers."""
    names = rows.coded("name")
    found = [_BUCKET.search(str(text)) for text in names.words.texts]
    numbers = np.array([int(m[1]) if m else -1 for m in found], np.int64)
    number = numbers[names.codes] if len(names) else np.empty(0, np.int64)
    return rows[number >= 0], number[number >= 0]


def _bucket_sizes(tl: Timeline, w: Window) -> np.ndarray:
    """Returns `(steps, buckets)` bytes in each bucket's dtype. New buckets hold from the next step."""
    marks = tl.marks.rows()
    marks = marks[marks.equal("name", "buckets")]
    every = [json.loads(d)["nbytes"] for d in marks.detail]
    if not every:
        return np.zeros((w.shape[0], 0))
    table = np.zeros((len(every), max(map(len, every))))
    for row, sizes in zip(table, every, strict=True):
        row[: len(sizes)] = sizes
    begun, steps = np.full(w.shape[0], np.inf), w.lane("step")
    np.minimum.at(begun, steps.step - w.first, np.where(steps.rank == w.ranks[0], steps.t0, np.inf))
    return table[np.clip(np.searchsorted(marks.t, begun, side="right") - 1, 0, None)]


def _dtype_scale(tl: Timeline) -> float:
    """The model's fp32 bytes over its own; 0 if unrecorded."""
    marks = tl.marks.rows()
    said = [json.loads(d) for d in marks.detail[marks.equal("name", "start")][:1]]
    return 4.0 * said[0].get("parameters", 0) / said[0]["nbytes"] if said and said[0].get("nbytes") else 0.0


def _list_samples(tl: Timeline, first: int, stop: int) -> Rows:
    rows = tl.samples.rows()
    return rows[(rows.step >= first) & (rows.step < stop)]
