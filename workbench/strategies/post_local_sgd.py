"""Post-local SGD: steps of DDP first, Local SGD afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._copies import copies
from workbench.strategies._mean import sum_bucket
from workbench.strategies._slots import bring_together
from workbench.strategies.local_sgd import LocalSGD, LocalState


class PostLocalState(LocalState):
    """LocalState plus the steps done, and whether optimizer states may differ between ranks."""

    def __init__(self) -> None:
        self.since = self.steps = 0
        self.anchor = Memory()  # set when ranks begin to train alone
        self.alone = False


@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(LocalSGD):
    """Makes `warmup` steps of DDP when entered; then ranks train alone and average periodically.

        step <= warmup:   params <- optimizer(params, (1/p) sum_i grad_i)
        afterwards:       Local SGD, see there

    The steps of DDP are uncompressed and leave parameters and momenta equal on all ranks. If `warmup` is raised above
    the steps done, ranks average both and return to DDP. A rank sends 2 (p-1)/p of the model's bytes in each step of
    DDP and once in `every` steps afterwards.

    When to use it: Local SGD from the first step on costs loss for good, for example because early gradients turn
    quickly. The authors begin it at the first decay of the learning rate, after half of the run.

    Reference: Lin et al., "Don't Use Large Mini-Batches, Use Local SGD", ICLR 2020, https://arxiv.org/abs/1808.07217
    """

    warmup: int = knob(100, 0, 10**6, unit="steps", log=True, doc="steps of DDP first")

    def init(self, rank: Rank, params: list[Bucket]) -> Any:
        return PostLocalState()

    async def step(self, rank: Rank, state: Any) -> None:
        if state.steps < self.warmup:
            await self._together(rank, state)
        else:
            if not state.alone:
                state.alone, state.anchor = True, copies(await rank.params(), "anchor")
            await self.apart(rank, state)
        state.steps += 1

    async def apart(self, rank: Rank, state: Any) -> None:
        """Makes a step after the steps of DDP."""
        await LocalSGD.step(self, rank, state)

    async def _together(self, rank: Rank, state: Any) -> None:
        """Makes a step of DDP; averages parameters and momenta first if ranks have trained alone."""
        if state.alone:
            await self.leave(rank, state)
            await bring_together(rank)
            state.alone = False
        await rank.forward()
        pending = []
        async for bucket in rank.backward(1.0 / rank.size):
            pending.append(await rank.start(sum_bucket(rank, bucket), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        await rank.update()
