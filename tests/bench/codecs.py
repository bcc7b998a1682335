"""Times codecs on one thread and a large tensor, against a memory copy and the plain torch expression.

The sides alternate round by round, with one side twice (A/A). The result is the median of the ratios.

    python -m tests.bench.codecs --out docs/data/codecs.json
    python -m tests.bench.codecs --device cuda --elements 64000000 --out docs/data/gpu_codecs.json

Resumes: measurements in the file are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as hook

from tests.ranks import placed, together
from workbench.compressors import Compressor, Dense, PowerSGD
from workbench.compressors._select import roughly
from workbench.compressors._stochastic import dithered
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import members

ELEMENTS, ROUNDS = 8_000_000, 9
SIDE = 2828  # of the square matrix that represents a layer: 8 M elements
DENSITY = 0.01
LAYERS: dict[str, list[tuple[int, ...]]] = {
    "8 matrices of 1000 x 1000": [(1000, 1000)] * 8,
    "30 of 512 x 512 with biases": [(512, 512), (512,)] * 30,
}


def inputs(n: int = ELEMENTS, device: str = "cpu") -> dict[str, Tensor]:
    """Returns (n,) float32 tensors: Gaussian and heavy-tailed (normal times log-normal)."""
    rng = torch.Generator().manual_seed(0)
    x = torch.randn(n, generator=rng)
    found = {"Gaussian": x, "heavy-tailed": x * torch.randn(n, generator=rng).mul_(1.5).exp_()}
    return {name: x.to(device) for name, x in found.items()}


def settle() -> None:
    """Waits until a GPU has finished its work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def once(run: Callable[[], Any]) -> float:
    settle()
    began = time.perf_counter()
    run()
    settle()
    return time.perf_counter() - began


def alternating(sides: dict[str, Callable[[], Any]], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Returns the seconds of each side, round by round; each follows an uncounted call of its own.

    An earlier call leaves caches and freed memory behind: right after another side, the plain expression took 25 %
    longer than after itself.
    """
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, run in sides.items():
            run()
            took[name].append(once(run))
    return took


def whole(compressor: Compressor, x: Tensor, memory: Memory) -> Callable[[], Tensor]:
    """Returns a function that encodes and decodes x in one bucket, as a matrix and a remainder."""
    work, left = x.clone(), x.numel() - SIDE * SIDE
    parts = tuple(placed((SIDE, SIDE), (left,)) if left >= 0 else placed((x.numel(),)))

    def run() -> Tensor:
        work.copy_(x)
        bucket = Bucket(0, work, parts, 0)
        together([compressor.reduce(Rank(0, 1), bucket, memory)])
        return bucket.data

    return run


def copying(x: Tensor) -> Callable[[], Any]:
    """Returns the reference: a copy of x to existing memory."""
    into = torch.empty_like(x)
    return lambda: into.copy_(x)


def every(n: int, rounds: int, there: set[str], device: str = "cpu") -> Iterator[dict[str, Any]]:
    """Yields each shipped compressor with its usual knobs against a memory copy, except those in `there`."""
    x = inputs(n, device)["Gaussian"]
    for name, cls in members(Compressor).items():
        if not cls.__module__.startswith("workbench.") or cls is Dense or name in there:
            continue
        memory = Memory(0)
        sides = {"copy": copying(x), "codec": whole(cls.usual(), x, memory), "copy again": copying(x)}
        took = alternating(sides, rounds)
        print(f"{name}: {ratio(took, 'codec', 'copy'):.1f} copies", flush=True)
        yield {"part": "every", "name": name, **took}


def kernels(n: int, rounds: int) -> list[dict[str, Any]]:
    """Times the kernels that must beat the plain torch expression."""
    rows = []
    for name, x in inputs(n).items():
        k, rng = round(DENSITY * n), torch.Generator().manual_seed(1)
        sides = {
            "plain": partial(lambda x, k: x.abs().topk(k), x, k), "ours": partial(roughly, x, k, rng),
            "plain again": partial(lambda x, k: x.abs().topk(k), x, k),
        }  # fmt: skip
        found, best = x[roughly(x, k, rng)], x.abs().topk(k).values
        kept = float(found.double().square().sum() / best.double().square().sum())
        quality = f"{found.numel() / k:.3f} of the count, {kept:.2%} of the energy"
        rows.append({"part": "kernel", "name": "top-k by a sampled threshold, 1 %", "input": name, "asked": 4.0,
                     "quality": quality, **alternating(sides, rounds)})  # fmt: skip
    unit = torch.rand(n, generator=torch.Generator().manual_seed(0))
    rng = torch.Generator().manual_seed(1)

    def plain() -> Tensor:
        return torch.floor(unit * 255 + torch.rand_like(unit)).to(torch.uint8)

    codes = dithered(unit, rng, 255.0)
    quality = f"mean off by {float((codes.double() / 255 - unit.double()).mean()):+.1e}"
    sides = {"plain": plain, "ours": partial(dithered, unit, rng, 255.0), "plain again": plain}
    rows.append({"part": "kernel", "name": "8-bit stochastic rounding", "input": "uniform", "asked": 3.0,
                 "quality": quality, **alternating(sides, rounds)})  # fmt: skip
    rows += [low_rank(name, shapes, rounds) for name, shapes in LAYERS.items()]
    for r in rows:
        print(f"{r['name']}, {r['input']}: {1 / ratio(r, 'ours', 'plain'):.2f} (asked {r['asked']:g})", flush=True)
    return rows


def low_rank(name: str, shapes: list[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Times PowerSGD under error feedback against torch's own hook, with an immediate all-reduce."""
    parts = placed(*shapes)
    grad = torch.randn(parts[-1].stop, generator=torch.Generator().manual_seed(0))
    data, memory = torch.empty_like(grad), Memory(0)
    state = hook.PowerSGDState(_Group(), 4, start_powerSGD_iter=2, use_error_feedback=True)
    state.iter = 5

    def theirs() -> None:
        data.copy_(grad)
        hook.powerSGD_hook(state, _GradBucket(data, parts))

    def ours() -> None:
        data.copy_(grad)
        together([PowerSGD.usual().reduce(Rank(0, 1), Bucket(0, data, tuple(parts), 0), memory)])

    there, hook.dist = hook.dist, SimpleNamespace(all_reduce=lambda x, group=None, async_op=True: _Done(x))
    try:
        with torch.no_grad():
            took = alternating({"plain": theirs, "ours": ours, "plain again": theirs}, rounds)
    finally:
        hook.dist = there
    return {"part": "kernel", "name": "PowerSGD, rank 4, against torch's hook", "input": name, "asked": 1.0, **took}


class _Done:
    """A completed collective of a single rank, so the sum is its input."""

    def __init__(self, x: Tensor) -> None:
        self.future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        self.future.set_result([x])

    def get_future(self) -> Any:
        return self.future


class _Group:
    def size(self) -> int:
        return 1


class _GradBucket:
    """The interface of a bucket that torch's hook uses."""

    def __init__(self, data: Tensor, parts: list[Any]) -> None:
        self.data, self.parts = data, parts

    def buffer(self) -> Tensor:
        return self.data

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[Tensor]:
        return [self.data[p.start : p.stop].view(p.shape) for p in self.parts]


def ratio(took: dict[str, list[float]], side: str, base: str) -> float:
    """Returns the median over rounds of a side's time over the base's."""
    each = sorted(a / b for a, b in zip(took[side], took[base], strict=True))
    return each[len(each) // 2]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--out", type=Path, default=None)
    ask.add_argument("--elements", type=int, default=ELEMENTS)
    ask.add_argument("--rounds", type=int, default=ROUNDS)
    ask.add_argument("--device", default="cpu", help="on a GPU kernels are not compared: those are the CPU's")
    a = ask.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(a.out.read_text()) if a.out and a.out.exists() else []
    if a.device == "cpu" and not any(r["part"] == "kernel" for r in rows):
        rows += kernels(a.elements, a.rounds)
    for row in every(a.elements, a.rounds, {r["name"] for r in rows if r["part"] == "every"}, a.device):
        rows.append(row)
        if a.out:
            a.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
