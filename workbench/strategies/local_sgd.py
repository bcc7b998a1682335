"""Local SGD: ranks train alone for a while, then average."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Op, Rank
from workbench.strategies._base import Strategy


class _State:
    """What one rank remembers: steps since the last averaging, and the parameters agreed on then."""

    def __init__(self) -> None:
        self.since = 0
        self.anchor: Memory | None = None


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy):
    """Each rank trains on its own for `every` steps, then all take the mean of where they got to.

        params_i <- optimizer_i(params_i, grad_i)                        every step
        params_i <- anchor + (1/p) sum_j (params_j - anchor)             every H steps

    What crosses the wire is the displacement since the last averaging, 2 (p-1)/p of the model's bytes once
    per H = `every` steps: H times fewer than DDP. Between averagings replicas drift apart, which costs some
    loss per sample; the drift is on the dashboard. The optimizer's state stays on each rank.

    When to use it: the wire is slow and a little loss per sample is cheaper than waiting. With `every` = 1 and
    plain SGD it equals DDP; with Adam it does not, for each rank keeps its own second moments.

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
    https://arxiv.org/abs/1805.09767
    """

    every: int = knob(8, 1, 256, unit="steps", log=True, doc="H: steps each rank trains alone between averagings")

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"

    def init(self, rank: Rank) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        if state.anchor is None:
            state.anchor = anchored(await rank.params())
        await rank.forward()
        await rank.backward()
        await rank.update()
        state.since += 1
        if state.since >= self.every:
            await self._average(rank, state)

    async def leave(self, rank: Rank, state: _State) -> None:
        if state.since:
            await self._average(rank, state)

    async def _average(self, rank: Rank, state: _State) -> None:
        assert state.anchor is not None
        pending = []
        for bucket in await rank.params():
            anchor = state.anchor.flat("anchor", bucket)
            pending.append(await rank.start(_agree(rank, bucket, anchor), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        state.since = 0


def anchored(buckets: list[Bucket]) -> Memory:
    """A Memory whose slot "anchor" holds a copy of the parameters in `buckets`."""
    memory = Memory()
    for bucket in buckets:
        memory.flat("anchor", bucket).copy_(bucket.data)
    return memory


def _agree(rank: Rank, bucket: Bucket, anchor: Any) -> Coroutine[Op, Any, None]:
    async def child() -> None:
        moved = bucket.like(bucket.data.sub_(anchor).div_(rank.size))
        await rank.compressor.reduce(rank, moved, rank.memory)
        anchor.add_(moved.data)
        bucket.data.copy_(anchor)

    return child()
