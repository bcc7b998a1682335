"""Makes timelines and runs as an engine would write them, without processes or tensors.

Each rank's compute times have noise and hiccups. A collective begins at the last arrival. It ends for all ranks when
the slowest port has finished. A caller can make one rank slow in one phase.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np

from workbench.record.timeline import Mark, Sample, Span, Timeline
from workbench.run import Run

SHARE = {"forward": 0.3, "backward": 0.6, "update": 0.1}  # of a step's compute
WIRE = 0.8  # seconds on the wire per second of compute, on a link
BUCKETS = 4
NBYTES = 1_500_000  # per rank and bucket
Slow = tuple[int, str, float]  # rank, phase, how many times longer


def factor(phase: str, share: float = 0.2) -> float:
    """Returns the factor by which `phase` must last longer to add `share` of a step."""
    return 1.0 + share / SHARE.get(phase, WIRE)


class Host:
    """Plays ranks on a virtual clock and records them."""

    def __init__(self, ranks: int, step_s: float, *, link: bool, seed: int, noise: float, hiccups: float) -> None:
        self.ranks, self.step_s, self.link = ranks, step_s, link
        self.noise, self.hiccups = noise, hiccups
        self.rng = np.random.default_rng(seed)
        self.now = np.full(ranks, 0.5) + self.rng.random(ranks) * 1e-3
        self.slow: Slow | None = None
        self.strategy, self.every, self.since = "DDP", 8, 0
        self.spans: list[Span] = []
        self.samples: list[Sample] = []
        self.marks: list[Mark] = []

    def seconds(self, rank: int, phase: str) -> float:
        """Returns the seconds of this phase, with noise."""
        s = self.step_s * SHARE[phase] * float(np.exp(self.noise * self.rng.standard_normal()))
        s *= 2.0 if self.rng.random() < self.hiccups else 1.0
        return s * (self.slow[2] if self.slow and self.slow[:2] == (rank, phase) else 1.0)

    def port(self, rank: int) -> float:
        """Returns the seconds for which a rank's port is busy with one bucket."""
        s = self.step_s * WIRE / BUCKETS
        return s * (self.slow[2] if self.slow and self.slow[:2] == (rank, "link") else 1.0)

    def encode(self, rank: int) -> float:
        """Returns the seconds in which a rank packs one bucket: 0, or the delay of a rank with a slow codec."""
        slow = self.slow and self.slow[:2] == (rank, "codec")
        return self.step_s * WIRE / BUCKETS * (self.slow[2] - 1.0) if slow and self.slow else 0.0

    def compute(self, step: int, phase: str) -> np.ndarray:
        """Plays one phase of compute on all ranks. Returns (begin, end) per rank: (2, ranks)."""
        begin = self.now.copy()
        for r in range(self.ranks):
            self.now[r] += self.seconds(r, phase)
            self.spans.append(Span(r, step, "compute", phase, begin[r], begin[r], self.now[r], 0))
        return np.stack([begin, self.now])

    def meet(self, step: int, ready: np.ndarray) -> None:
        """Averages all buckets in order. The step waits for the last one. ready: (buckets, ranks) seconds"""
        done = np.zeros(self.ranks)
        for k in range(BUCKETS):
            packed = np.maximum(ready[k], done)
            t0 = packed + np.array([self.encode(r) for r in range(self.ranks)]) + 1e-4
            last, name = t0.max(), f"all_reduce bucket {k}"
            busy = [self.port(r) for r in range(self.ranks)] if self.link else [0.01 * self.step_s] * self.ranks
            done = last + max(busy) + self.rng.random(self.ranks) * 1e-4
            for r in range(self.ranks):
                if t0[r] > packed[r] + 2e-4:
                    self.spans.append(Span(r, step, "codec", f"bucket {k}", packed[r], packed[r], t0[r], 0))
                self.spans.append(Span(r, step, "comm", name, ready[k, r], t0[r], done[r], NBYTES))
                if self.link:
                    self.spans.append(Span(r, step, "port", name, t0[r], last, last + busy[r], NBYTES))
            for r in np.flatnonzero(done > self.now):
                self.spans.append(Span(r, step, "wait", f"bucket {k}", self.now[r], self.now[r], done[r], 0))
                self.now[r] = done[r]

    def step(self, step: int) -> None:
        """Plays one step of all ranks under the present strategy."""
        begin = self.now.copy()
        self.compute(step, "forward")
        b0, b1 = self.compute(step, "backward")
        if self.strategy == "LocalSGD":
            self.compute(step, "update")
            self.since += 1
            if self.since >= self.every:
                self.meet(step, np.tile(self.now, (BUCKETS, 1)))
                self.since = 0
        else:
            self.meet(step, np.stack([b0 + (b1 - b0) * (k + 1) / BUCKETS for k in range(BUCKETS)]))
            self.compute(step, "update")
        for r in range(self.ranks):
            self.spans.append(Span(r, step, "step", self.strategy, begin[r], begin[r], self.now[r], 0))
            if not step:
                self.memory(r)
            loss = 2.5 + 3.0 * np.exp(-step / 80) + 0.05 * self.rng.standard_normal()
            self.samples.append(Sample(r, step, "loss", self.now[r], float(loss)))
        self.now += 2e-4

    def memory(self, rank: int) -> None:
        """Records a rank's memory by kind. The model is as large as its buckets."""
        model = BUCKETS * NBYTES
        held = {"parameters": 1, "gradients": 1, "optimizer state": 2, "activations": 3, "buffers in flight": 0,
                "peak": 6.5}  # fmt: skip
        for name, times in held.items():
            self.samples.append(Sample(rank, 0, f"memory {name}", self.now[rank], times * model))

    def evaluate(self, step: int) -> None:
        """Plays an evaluation before `step`: rank 0 evaluates the mean model, and the other ranks wait."""
        begin = self.now.copy()
        self.now[:] = begin.max() + 0.3 * self.step_s + self.rng.random(self.ranks) * 1e-4
        for r in range(self.ranks):
            self.spans.append(Span(r, step, "eval", "evaluate", begin[r], begin[r], self.now[r], 0))
        value = 2.6 + 3.0 * float(np.exp(-step / 80))
        self.samples.append(Sample(0, step, "held_out", self.now[0], value))
        self.samples.append(Sample(0, step, "held_out:accuracy", self.now[0], 1 - value / 6))
        for r in range(self.ranks):
            self.samples.append(Sample(r, step, "drift", self.now[r], 0.01 * self.since))

    def switch(self, step: int, strategy: str) -> None:
        """Plays the hand-over to another strategy."""
        begin = self.now.copy()
        self.now[:] = begin.max() + 0.8 * self.step_s
        for r in range(self.ranks):
            self.spans.append(Span(r, step, "switch", strategy, begin[r], begin[r], self.now[r], 8 * NBYTES))
        self.strategy, self.since = strategy, 0

    def mark(self, rank: int, step: int, name: str, **detail: Any) -> None:
        self.marks.append(Mark(rank, step, name, float(self.now[rank]), json.dumps(detail)))

    def timeline(self) -> Timeline:
        """Returns the record, sorted by end times."""
        out = Timeline()
        out.spans.add(sorted(self.spans, key=lambda s: s.t1))
        out.samples.add(sorted(self.samples, key=lambda s: s.t))
        out.marks.add(sorted(self.marks, key=lambda m: m.t))
        return out


def timeline(
    strategy: str = "DDP",
    ranks: int = 4,
    steps: int = 200,
    step_s: float = 0.1,
    slow: Slow | None = None,
    link: bool = True,
    seed: int = 0,
    *,
    noise: float = 0.05,
    hiccups: float = 0.01,
    every: int = 8,
    eval_every: int = 20,
    slow_from: int = 0,
    changes: Iterable[tuple[int, str, Any]] = (),
) -> Timeline:
    """Returns the timeline of a run.

    slow:    (rank, phase, factor) from step `slow_from` on; the phase may also be "link" or "codec"
    changes: (step, path, value); only "strategy" and "strategy.every" have an effect
    """
    host = Host(ranks, step_s, link=link, seed=seed, noise=noise, hiccups=hiccups)
    host.strategy, host.every = strategy, every
    turns = {at: (path, value) for at, path, value in changes}
    for r in range(ranks):
        host.mark(r, 0, "start", host="here", pid=1000 + r, device="cpu", torch="2.13.0")
    host.mark(0, 0, "state", state="running")
    for step in range(steps):
        host.slow = slow if step >= slow_from else None
        if step in turns:
            path, value = turns[step]
            rest = {"requested_at": float(host.now[0] - 0.1), "text": f"{path} = {value}"}
            host.mark(0, step, "change", id=f"turn-{step}", path=path, value=value, **rest)
            if path == "strategy":
                host.switch(step, value)
            host.every = value if path == "strategy.every" else host.every
        host.step(step)
        if eval_every and (step + 1) % eval_every == 0:
            host.evaluate(step + 1)
    host.mark(0, steps, "state", state="done")
    return host.timeline()


def run(
    strategy: str = "DDP",
    ranks: int = 4,
    steps: int = 200,
    step_s: float = 0.1,
    slow: Slow | None = None,
    link: bool = True,
    seed: int = 0,
    changes: Iterable[tuple[int, str, Any]] = ((100, "strategy", "LocalSGD"), (150, "strategy.every", 16)),
    **rest: Any,
) -> Run:
    """Returns a recorded run with changes, samples and hand-overs, as `Run.open` does."""
    changes = tuple(changes)
    tl = timeline(strategy, ranks, steps, step_s, slow, link, seed, changes=changes, **rest)
    port = {"bandwidth": 100.0 if link else 0.0, "latency": 0.0, "jitter": 0.0}
    settings = {
        "task": {"ByteGPT": {}},
        "strategy": {strategy: {}},
        "compressor": {"Dense": {}},
        "fabric": {"Fabric": {"link": {"Link": port}, "shared": False, "faults": []}},
        "ranks": ranks,
        "steps": steps,
        "bucket_mb": 1.0,
        "lr": 0.001,
        "batch": 8,
        "seed": seed,
        "eval_every": 20,
    }
    return Run(settings, timeline=tl, environment={"torch": "2.13.0", "host": "here"}, name="synthetic")
