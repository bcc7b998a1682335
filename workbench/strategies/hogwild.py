"""Hogwild: ranks train shared parameters without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """Ranks read and update the same parameters in shared memory, at their own pace and without a lock.

        params <- optimizer_i(params, grad_i(params))       every rank i, whenever it is ready

    Ranks send nothing and never wait, so a slow rank delays no other. Parameters change while a rank computes its
    gradient. If two ranks update one element at the same moment, one update is lost. Sparse gradients
    (`nn.Embedding(sparse=True)`) write only their own elements, so ranks rarely collide. A dense update writes every
    element, even if its gradient is zero. Each rank makes a whole step, so p ranks move the parameters up to p times as
    far per step as DDP. Lower `lr` if that is too far. Each rank keeps its own optimizer state and model buffers. Their
    mean remains when the strategy is left. In the simulator an update is instantaneous, so gradients are stale but no
    update is lost.

    When to use it: ranks on one host have sparse gradients or uneven speed. It is refused on several hosts and on GPUs,
    because they do not share the host's memory.

    Reference: Niu et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011,
    https://arxiv.org/abs/1106.5730
    """

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def refuses(self, compressor: Any) -> str | None:
        if compressor.immediate:
            return None
        return f"Hogwild sends nothing, so {compressor} has nothing to encode; use Dense with it, or DDP or LocalSGD"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
