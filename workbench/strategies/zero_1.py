"""ZeRO stage 1: ranks shard the optimizer state."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._sharded import Outstanding, ShardGroups, gathered, sum_into_shards


@dataclass(frozen=True, kw_only=True)
class ZeRO1(Strategy):
    """Each rank keeps 1/p of the optimizer state and steps that part of the model; then all gather every part.

        g_r <- sum_i grad_i, of rank r's shard of every bucket         reduce-scatter, while backward runs
        params_r, state_r <- optimizer(params_r, state_r, g_r)
        params <- all ranks' params_r                                  all-gather

    As under DDP, a rank holds 2 Psi bytes of Psi parameters and 2 Psi bytes of gradients in 16 bits (4 Psi each in
    fp32). It holds K Psi / p instead of K Psi bytes of optimizer state. K is 8 for Adam in fp32 and 4 for SGD with
    momentum. It sends 2 (p-1)/p of the model's bytes per step, as DDP does. Sums are added in rank order, so the shards
    together are bit-identical to one process's result. Clipping adds up one more number. At most `outstanding` buckets
    are under way at once, because each needs memory.

    When to use it: the optimizer has much state. A rank also updates only 1/p of the model. But the all-gather comes
    after the update. So half of the bytes hide behind nothing, but DDP can hide all bytes behind backward. Optimizers
    that need a whole tensor (LARS, LAMB) are refused. A compressor acts on the gradients, never on the parameters.

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054, section 5.1
    """

    outstanding: int = knob(2, 1, 1024, unit="buckets", log=True, doc="concurrent exchanges: more overlap, more memory")

    alike: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state"})

    def refuses(self, compressor: Any) -> str | None:
        if compressor.carries:
            return (
                f"compressor={type(compressor).__name__}: it keeps the optimizer's whole momentum on every rank, and "
                f"{type(self).__name__} shards it; use it with DDP, or another compressor under ErrorFeedback"
            )
        return super().refuses(compressor)

    async def step(self, rank: Rank, state: Any) -> None:
        shards = await sum_into_shards(ShardGroups(rank, rank), self.outstanding, "gradients" in self.shards)
        params, wholes = await rank.params(), Outstanding(rank, self.outstanding)
        for shard in shards:
            await rank.update(shard)
            await wholes.start(gathered(rank, params[shard.index]), f"params {shard.index}")
        await wholes.all()
