"""Makes runs of ranks that compress two buckets during backward. The length of a step is computed by hand.

Forward lasts 10 ms and backward 20 ms. One bucket is ready in the middle of backward, the other at its end. A rank
encodes and sends one bucket, then the other. The step waits from the end of backward until the last bucket has arrived.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from workbench.record.timeline import Mark, Sample, Span
from workbench.run import Run

MS = 1e-3
RANKS = 2
NBYTES = (400_000, 600_000)  # of the two buckets, fp32
TOPK = {"ErrorFeedback": {"of": {"TopK": {"density": 0.01}}}}
DENSE: dict[str, Any] = {"Dense": {}}


class Exchange(NamedTuple):
    """The times of two buckets in ms, and the bytes that a rank sends for both."""

    codec: tuple[float, float]
    wire: float
    sent: int
    dense: float  # ms of one bucket's dense all-reduce in a measured step


class Author:
    """Writes a run step by step. width: bytes per element of the model"""

    def __init__(self, compressor: dict[str, Any], width: int = 4, **settings: Any) -> None:
        plain = {"strategy": {"DDP": {}}, "fabric": {"Fabric": {"link": {"Link": {"bandwidth": 100.0}}}}}
        rest = {"compressor": compressor, "ranks": RANKS, "measure_every": 0}
        self.run = Run({**plain, **rest, **settings}, name="made up")
        self.now, self.step = 0.5, 0
        self.mark("start", parameters=sum(NBYTES) // width, nbytes=sum(NBYTES))
        self.mark("buckets", nbytes=list(NBYTES))

    def mark(self, name: str, **detail: Any) -> None:
        self.run.timeline.marks.add([Mark(0, self.step, name, self.now, json.dumps(detail))])

    def set(self, path: str, value: Any) -> None:
        self.mark("change", path=path, value=value, text=f"{path} = {value}")

    def steps(self, n: int, e: Exchange, measure: int = 0, found: tuple[float, float, float] = (0.5, 0.8, 2.0)) -> None:
        """Adds `n` steps. Measures the last of every `measure` steps."""
        for k in range(n):
            self._one(e, bool(measure) and k % measure == measure - 1, found)

    def _one(self, e: Exchange, measured: bool, found: tuple[float, float, float]) -> None:
        rows: list[tuple[str, str, float, float, float, int]] = []
        ready, free = (20.0, 30.0), 0.0
        for k, (codec, nbytes) in enumerate(zip(e.codec, (2 * e.sent // 5, 3 * e.sent // 5), strict=True)):
            begun = max(free, ready[k])
            if codec:
                rows.append(("codec", f"bucket {k}", begun, begun, begun + codec, 0))
            free = begun + codec + e.wire
            rows.append(("comm", f"all_gather bucket {k}", ready[k], begun + codec, free, nbytes))
            if measured:
                rows.append(("measuring", f"all_reduce bucket {k}", free, free, free + e.dense, NBYTES[k]))
                free += e.dense
        end = max(free, 30.0)
        rows += [
            ("compute", "forward", 0, 0, 10, 0),
            ("compute", "backward", 10, 10, 30, 0),
            ("wait", "bucket 1", 30, 30, end, 0),
            ("compute", "update", end, end, end + 5, 0),
            ("step", "DDP", 0, 0, end + 5, 0),
        ]
        spans = [
            Span(r, self.step, lane, name, self.now + asked * MS, self.now + t0 * MS, self.now + t1 * MS, nbytes)
            for lane, name, asked, t0, t1, nbytes in sorted(rows, key=lambda row: row[4])
            for r in range(RANKS)
        ]
        self.run.timeline.spans.add(spans)
        self.now += (end + 5) * MS
        if measured:
            names = ("compression_error", "compression_cosine", "residual_ratio")
            samples = [Sample(0, self.step, n, self.now, v) for n, v in zip(names, found, strict=True)]
            self.run.timeline.samples.add(samples)
        self.run.timeline.samples.add([Sample(r, self.step, "loss", self.now, 2.0) for r in range(RANKS)])
        self.step += 1


SLOW = Exchange((20.0, 20.0), 1.0, 10_000, 6.0)  # encoding takes longer than Dense would
QUICK = Exchange((1.0, 1.0), 1.0, 10_000, 50.0)
HIDDEN = Exchange((9.0, 0.2), 0.1, 10_000, 3.0)
WHOLE = Exchange((0.0, 0.0), 6.0, 1_000_000, 6.0)  # Dense on the link of SLOW


def compressed(e: Exchange, steps: int = 40, measure: int = 5) -> Run:
    """Returns a run that compresses from its first step on."""
    author = Author(TOPK, measure_every=measure)
    author.steps(steps, e, measure)
    return author.run
