"""Local SGD: ranks train alone for a while, then average."""

from __future__ import annotations

from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Op, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._copies import copies
from workbench.strategies._mean import mean_of_all, summed
from workbench.strategies._slots import MOMENTUM, bring_together, combine_slots


class _State:
    """What one rank remembers: steps done, steps since the last averagings, and the parameters agreed on then."""

    def __init__(self) -> None:
        self.steps = 0
        self.since = self.since_group = 0
        self.alone = False  # may momenta differ from other ranks'?
        self.anchor = Memory()  # of the last averaging, or from where ranks parted


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy):
    """Each rank trains on its own for `every` steps, then all take the mean of where they got to.

        params_i <- optimizer_i(params_i, grad_i)                        every step
        params_i <- anchor + (1/p) sum_j (params_j - anchor)             every H steps

    What crosses the wire is the displacement since the last averaging, 2 (p-1)/p of the model's bytes once
    per H = `every` steps: H times fewer than DDP. Between averagings replicas drift apart, which costs some
    loss per sample; the drift is on the dashboard. The optimizer's state stays on each rank, unless `momentum`
    says that it is averaged ("double averaging": as many bytes again for SGD, twice as many for Adam) or zeroed
    whenever parameters are averaged. Running statistics of normalisation layers stay each rank's own.

    Post-local SGD: the first `start` steps of a stay are DDP's, uncompressed, and leave parameters and momenta equal.
    Hierarchical: with `group` = g > 1 each g consecutive ranks (the mesh is "between" p/g × "within" g) average their
    parameters every `group_every` steps, 2 (g-1)/g of the model's bytes uncompressed; the averaging of all takes the
    place of theirs where both are due, and both counts begin anew with it.

    When to use it: the wire is slow and a little loss per sample is cheaper than waiting; groups where some wires are
    faster than others. With `every` = 1 and SGD, with or without momentum, it equals DDP; with Adam it does not, for
    each rank keeps its own second moments.

    Reference: Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019,
    https://arxiv.org/abs/1805.09767; the start and groups: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD",
    ICLR 2020, https://arxiv.org/abs/1808.07217; averaging momenta: Yu et al., "On the Linear Speedup Analysis of
    Communication Efficient Momentum SGD", ICML 2019, https://arxiv.org/abs/1905.03817
    """

    every: int = knob(8, 1, 256, unit="steps", log=True, doc="H: steps each rank trains alone between averagings")
    start: int = knob(0, 0, 10**6, unit="steps", log=True, doc="steps of DDP first (post-local SGD)")
    group: int = knob(1, 1, 4096, unit="ranks", doc="ranks that average among themselves more often; 1: no groups")
    group_every: int = knob(1, 1, 256, unit="steps", log=True, doc="steps between two averagings within a group")
    momentum: str = knob("keep", choices=MOMENTUM, doc="what becomes of each rank's optimizer state at an averaging")

    periodic: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"

    def refuses_size(self, size: int) -> str | None:
        if size % self.group == 0:
            return None
        fit = ", ".join(str(g) for g in range(1, size + 1) if size % g == 0)
        return f"group={self.group} does not divide {size} ranks into equal groups; use one of {fit}"

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        return (("data", size),) if self.group == 1 else (("between", size // self.group), ("within", self.group))

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        if state.steps < self.start:
            await self._together(rank, state)
        else:
            await self._alone(rank, state)
        state.steps += 1

    async def leave(self, rank: Rank, state: _State) -> None:
        if state.since:
            await self._average(rank, state)

    async def _together(self, rank: Rank, state: _State) -> None:
        """A step of DDP, from a common state."""
        if state.alone:
            await self.leave(rank, state)
            await bring_together(rank)
            state.alone = False
        await rank.forward()
        pending = []
        async for bucket in rank.backward(1.0 / rank.size):
            pending.append(await rank.start(summed(rank, bucket), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()

    async def _alone(self, rank: Rank, state: _State) -> None:
        if not state.alone:
            state.alone, state.anchor = True, copies(await rank.params(), "anchor")
        await rank.forward()
        await rank.backward()
        if self.momentum == "average":
            await rank.grads()  # where there is none it is zero, so that all ranks remember something of each parameter
        await rank.update()
        state.since += 1
        state.since_group += 1
        if state.since >= self.every:
            await self._average(rank, state)
            await combine_slots(rank, self.momentum)
        elif self.group > 1 and state.since_group >= self.group_every:
            group = rank.group("within")
            await mean_of_all(group, await rank.params())
            await combine_slots(group, self.momentum)
            state.since_group = 0

    async def _average(self, rank: Rank, state: _State) -> None:
        pending = []
        for bucket in await rank.params():
            anchor = state.anchor.flat("anchor", bucket)
            pending.append(await rank.start(_agree(rank, bucket, anchor), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        state.since = state.since_group = 0


def _agree(rank: Rank, bucket: Bucket, anchor: Any) -> Coroutine[Op, Any, None]:
    async def child() -> None:
        moved = bucket.like(bucket.data.sub_(anchor).div_(rank.size))
        await rank.compressor.reduce(rank, moved, rank.memory)
        anchor.add_(moved.data)
        bucket.data.copy_(anchor)

    return child()
