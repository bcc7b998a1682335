"""Local SGD: ranks train alone and average."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Op, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._copies import copies
from workbench.strategies._former import LOCAL_SGD, local_sgd
from workbench.strategies._slots import MOMENTUM_CHOICES, combine_slots


class LocalState:
    """State of one rank: steps since the last averaging, and the parameters after it."""

    def __init__(self, params: list[Bucket]) -> None:
        self.since = 0
        self.anchor: Memory = copies(params, "anchor")


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy):
    """Ranks train alone for `every` steps, then all of them take the mean of their parameters.

        params_i <- optimizer_i(params_i, grad_i)                        every step
        params_i <- anchor + (1/p) sum_j (params_j - anchor)             every H steps

    Ranks send the displacement since the last averaging: 2 (p-1)/p of the model's bytes once per H = `every` steps. DDP
    sends H times as many. Between averagings replicas drift apart, and this costs some loss per sample. The dashboard
    shows the drift. At each averaging `momentum` keeps each rank's optimizer state, averages it ("double averaging") or
    zeroes it. To average it ranks send as many bytes again for SGD and twice as many for Adam. Each rank keeps its own
    running statistics of normalisation layers.

    When to use it: the network is slow, and a little loss per sample is cheaper than waiting. With `every` = 1 and SGD
    (with or without momentum) it equals DDP. With Adam it does not, because each rank keeps its own second moments.
    PostLocalSGD begins with steps of DDP. HierarchicalLocalSGD averages more often on faster links.

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
    https://arxiv.org/abs/1805.09767; averaging momenta: Yu et al., "On the Linear Speedup Analysis of
    Communication Efficient Momentum SGD", ICML 2019, https://arxiv.org/abs/1905.03817
    """

    every: int = knob(8, 1, 256, unit="steps", log=True, doc="H: steps each rank trains alone between averagings")
    momentum: str = knob(
        "keep", choices=MOMENTUM_CHOICES, doc="what happens to each rank's optimizer state at an averaging"
    )

    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    old: ClassVar[tuple[str, ...]] = LOCAL_SGD
    own: ClassVar[dict[str, str]] = {"anchor": "drop", "since*": "drop", "steps": "drop", "alone": "drop"}

    @classmethod
    def formerly(cls, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return local_sgd(cls.__name__, settings)

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        return LocalState(params)

    def steps_apart(self, state: Any) -> int | None:
        return int(state.since)

    def anchor(self, state: Any) -> Memory | None:
        anchor: Memory = state.anchor
        return anchor

    async def step(self, rank: Rank, state: Any) -> None:
        await self.alone(rank, state)
        if state.since >= self.every:
            await self.average(rank, state)
            await combine_slots(rank, self.momentum)

    async def leave(self, rank: Rank, state: Any) -> None:
        if state.since:
            await self.average(rank, state)

    async def alone(self, rank: Rank, state: Any) -> None:
        """Makes one step on this rank alone."""
        await rank.forward()
        await rank.backward()
        if self.momentum == "average":
            await rank.grads()  # a missing gradient becomes zero, so all ranks have optimizer state for every parameter
        await rank.update()
        state.since += 1

    async def average(self, rank: Rank, state: Any) -> None:
        """Sets the parameters of all ranks to their mean."""
        pending = []
        for bucket in await rank.params():
            anchor = state.anchor.flat("anchor", bucket)
            pending.append(await rank.start(_agree(rank, bucket, anchor), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        state.since = 0


def _agree(rank: Rank, bucket: Bucket, anchor: Any) -> Coroutine[Op, Any, None]:
    async def child() -> None:
        moved = bucket.like(bucket.data.sub_(anchor).div_(rank.size))
        await rank.compressor.reduce(rank, moved, rank.memory)
        anchor.add_(moved.data)
        bucket.data.copy_(anchor)

    return child()
