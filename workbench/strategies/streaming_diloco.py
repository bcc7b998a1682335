"""Streaming DiLoCo: sends the model in fragments during training."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from workbench.compressors import E3M0
from workbench.rank import FLOATS, Bucket, Handle, Memory, Op, Part, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._coded import mean
from workbench.strategies._copies import copies
from workbench.strategies._fragments import Fragment, fragment, layers
from workbench.strategies._outer import Outer, handed, taken


class _Flight(NamedTuple):
    """An exchange under way."""

    handle: Handle
    due: int  # the step after which the rank waits for it


class _State:
    """State of one rank: the steps made, the outer state by place in the model, and exchanges under way."""

    def __init__(self, memory: Memory) -> None:
        self.steps = 0
        self.memory = memory
        self.flying: dict[int, _Flight] = {}  # by fragment, in the order of their start


@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(Strategy):
    """DiLoCo that sends one fragment of the model at a time in 4 bits. Ranks compute the next steps at the same time.

        params_i <- optimizer_i(params_i, grad_i)                                     every step
        D <- (1/p) sum_j (anchor - params_j)  of one fragment is started              every H / F steps, each in turn
        b <- mu b + D;   anchor <- anchor - eta (D + mu b)                            T steps later, and
        params_i <- alpha params_i + (1 - alpha) anchor                               of that fragment

    H is `every`, F is `fragments`, T is `delay`, mu is `outer_momentum` and eta is `outer_lr`. Ranks send fragment f of
    F after every step t with t = floor((f+1) H / F) mod H. They count steps since the strategy was entered. They wait
    for it T steps later, or at its next turn if that is earlier. Fragments consist of whole layers (modules with
    parameters) and are about equally large. Equal layers go to fragments in turn, independent of buckets.

    With `bits` = 4 a displacement is rounded to E3M0 (a sign and a power of two). The rank that owns a chunk adds it up
    in fp32 and rounds the sum, and all ranks gather it. For a fragment of n elements, with c = ceil(n / p), a rank
    sends

        2 (p-1) (ceil(c / 2) + 4 ceil(c / 256))        with 4 bits,        2 (p-1)/p 4 n        with 32

    With 4 bits this is about 1/8 of the bytes. A step sends at most one fragment. It takes no longer for it if T steps
    last longer than the exchange. The scale (the largest magnitude of 256 elements) and the code for zero are ours,
    because the paper's could not be established. With F = 1, T = 0, alpha = 0 and 32 bits it is DiLoCo. With alpha = 1
    each rank trains alone.

    As in the paper, an exchange starts at its fragment's turn S and is applied at S + T. In torchft it starts at S - T
    and is applied at S. So with T > 0 its outer steps use older parameters at the same step.

    When the strategy is left, the result is the ranks' mean in full precision. Fragments have then trained alone since
    different steps. SlowMo, BMUF and DiLoCo continue with b.

    When to use it: as DiLoCo, if the network cannot carry DiLoCo's bursts. The paper takes fragments of three
    transformer layers. It takes H = 30 or 100, and alpha = 0.5 with a delay. The default H here is short, and outer_lr
    is DiLoCo's.

    Reference: Douillard et al., "Streaming DiLoCo with Overlapping Communication: Towards a Distributed Free Lunch",
    2025, https://arxiv.org/abs/2501.18512
    """

    every: int = knob(12, 1, 2000, unit="steps", log=True, doc="H: steps between two exchanges of the same fragment")
    fragments: int = knob(3, 1, 64, log=True, doc="F: number of fragments of the model's layers")
    delay: int = knob(1, 0, 64, unit="steps", doc="T: steps after which ranks wait for an exchange")
    alpha: float = knob(0.5, 0.0, 1.0, doc="alpha, mixing weight of a rank's own parameters when a fragment arrives")
    outer_lr: float = knob(0.7, 0.01, 2.0, doc="outer learning rate, of the mean displacement (outer gradient)")
    outer_momentum: float = knob(0.9, 0.0, 0.99, doc="outer Nesterov momentum of each fragment")
    bits: int = knob(4, choices=(32, 4), unit="bits", doc="bits per sent element: fp32 or E3M0")

    moves_frozen: ClassVar[bool] = True
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    in_flight: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {"momentum": "keep", "flying": "sum", "anchor": "drop", "steps": "drop"}

    def refuses_model(self, parts: list[Part]) -> str | None:
        most = len(layers(parts))
        if self.fragments <= most:
            return None
        return (
            f"fragments={self.fragments}: the model has {most} layers with parameters and each fragment takes at least "
            f"one; use at most {most}"
        )

    def refuses(self, compressor: Any) -> str | None:
        if compressor.immediate:
            return None
        return (
            f"StreamingDiLoCo has its own format (bits={self.bits}) and cannot use {compressor}; use Dense with "
            f"it, or DiLoCo with {compressor}"
        )

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State(copies([fragment(params, f, self.fragments).bucket for f in range(self.fragments)], "anchor"))

    def turn(self, steps: int) -> list[int]:
        """Returns the fragments whose turn it is after so many steps."""
        count, every = self.fragments, self.every
        return [f for f in range(count) if (f + 1) * every // count % every == steps % every]

    async def step(self, rank: Rank, state: _State) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
        state.steps += 1
        for index in self.turn(state.steps):
            if index in state.flying:
                await self._land(rank, state, index)
            await self._launch(rank, state, index)
        for index in [f for f, flight in state.flying.items() if flight.due <= state.steps]:
            await self._land(rank, state, index)

    async def _launch(self, rank: Rank, state: _State, index: int) -> None:
        bucket = (await self._fragment(rank, index)).bucket
        moved = bucket.data.sub_(state.memory.flat("anchor", bucket))
        handle = await rank.start(_mean(rank, moved, self.bits, f"fragment {index}"), name=f"fragment {index}")
        state.flying[index] = _Flight(handle, state.steps + self.delay)

    async def _land(self, rank: Rank, state: _State, index: int) -> None:
        """Waits for a fragment and makes its outer step. Merges it into this rank's current parameters."""
        moved = await rank.wait(state.flying.pop(index).handle)
        its = await self._fragment(rank, index)
        theta = state.memory.flat("anchor", its.bucket)
        outer = Outer(self.outer_momentum, rate=self.outer_lr, nesterov=True)
        outer.step(theta, state.memory.flat("momentum", its.bucket), moved)
        its.write(torch.lerp(theta, its.bucket.data, self.alpha))

    async def _fragment(self, rank: Rank, index: int) -> Fragment:
        return fragment(await rank.params(), index, self.fragments)

    async def drain(self, rank: Rank, state: _State) -> None:
        for index in list(state.flying):
            await self._land(rank, state, index)

    async def leave(self, rank: Rank, state: _State) -> None:
        await self.drain(rank, state)
        for bucket in await rank.params():
            bucket.data.div_(rank.size)
            await rank.all_reduce(bucket.data, "sum", bucket.name)

    def hands_on(self, rank: Rank, state: _State) -> Any:
        return handed(state.memory, 1.0)

    def takes(self, rank: Rank, state: _State, momentum: Any) -> None:
        taken(state.memory, momentum, 1.0)


def _mean(rank: Rank, moved: Tensor, bits: int, name: str) -> Coroutine[Op, Any, Tensor]:
    async def child() -> Tensor:
        if bits == 4:
            return await mean(rank, moved, E3M0(), name)
        await rank.all_reduce(moved.div_(rank.size), "sum", name)
        return moved

    return child()
