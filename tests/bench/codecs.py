"""What a codec costs: one thread, a large tensor, against copying memory and against the plain torch expression.

Sides are timed in turn, round by round, with one of them twice (A/A); what counts is the median of the ratios.

    python -m tests.bench.codecs --out docs/data/codecs.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.ranks import placed, together
from workbench.compressors import Compressor, Dense
from workbench.family import members
from workbench.ops import Bucket, Memory, Rank

ELEMENTS, ROUNDS = 8_000_000, 9
SIDE = 2828  # of the square matrix that stands for a layer: 8 M elements


def inputs(n: int = ELEMENTS) -> dict[str, Tensor]:
    """(n,) float32: Gaussian, and heavy-tailed (normal times log-normal)."""
    dice = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=dice)
    return {"Gaussian": x, "heavy-tailed": x * torch.randn(n, generator=dice).mul_(1.5).exp_()}


def once(run: Callable[[], Any]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def alternating(sides: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Seconds of each side, round by round, after one round that does not count."""
    took: dict[str, list[float]] = {name: [] for name in sides}
    for k in range(rounds + 1):
        for name, run in sides.items():
            seconds = once(run)
            if k:
                took[name].append(seconds)
    return took


def whole(compressor: Compressor, x: Tensor, memory: Memory) -> Callable[[], Tensor]:
    """One rank's encoding and decoding of x in a bucket of its own, as matrices where it is one."""
    work, left = x.clone(), x.numel() - SIDE * SIDE
    parts = tuple(placed((SIDE, SIDE), (left,)) if left >= 0 else placed((x.numel(),)))

    def run() -> Tensor:
        work.copy_(x)
        bucket = Bucket(0, work, parts, 0)
        together([compressor.reduce(Rank(0, 1), bucket, memory)])
        return bucket.data

    return run


def copying(x: Tensor) -> Callable[[], Any]:
    """The yardstick: x copied to memory that is there."""
    into = torch.empty_like(x)
    return lambda: into.copy_(x)


def every(n: int, rounds: int) -> list[dict[str, Any]]:
    """Each shipped compressor with its usual knobs against a copy of memory."""
    x = inputs(n)["Gaussian"]
    rows = []
    for name, cls in members(Compressor).items():
        if not cls.__module__.startswith("workbench.") or cls is Dense:
            continue
        memory = Memory(0)
        sides = {"copy": copying(x), "codec": whole(cls.usual(), x, memory), "copy again": copying(x)}
        took = alternating(sides, rounds)
        rows.append({"part": "every", "name": name, **took})
        print(f"{name}: {ratio(took, 'codec', 'copy'):.1f} copies", flush=True)
    return rows


def ratio(took: dict[str, list[float]], side: str, base: str) -> float:
    """Median over rounds of how many times as long a side took as the base beside it."""
    each = sorted(a / b for a, b in zip(took[side], took[base], strict=True))
    return each[len(each) // 2]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--elements", type=int, default=ELEMENTS)
    ask.add_argument("--rounds", type=int, default=ROUNDS)
    a = ask.parse_args()
    torch.set_num_threads(1)
    rows = every(a.elements, a.rounds)
    if a.out:
        a.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
