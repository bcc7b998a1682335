"""torch's own fully sharded data parallelism (FSDP2), the baseline for ZeRO3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchFSDP(Strategy):
    """torch.distributed.fsdp.fully_shard as documented, unmodified and observed from outside.

    Each rank keeps its rows of every parameter, gradient and optimizer state. A unit is a block of a transformer, or a
    module of half an experiment's `bucket_mb` or more. It is whole while it is computed. `fully_shard` changes a model
    permanently, so the host trains a copy. At an evaluation, a switch of strategy and the end it copies the parameters
    back. A rank then holds all parameters in addition to its shards. A new optimizer, bucket size or fabric rebuilds
    the copy.

    As under DDP, a parameter that no rank used in a step is not stepped. By itself fully_shard would step it with
    zeros. torch gathers and sums unit by unit. A rank that skips a unit (an expert of another rank) would issue other
    collectives than the other ranks. So if a model's control flow may depend on examples, ranks announce each gather
    and sum. All ranks then take part in each. The function takes neither scalars nor parameters without elements, and
    only one element type in a unit. Each rank keeps the other parameters whole, and ranks average their gradients. A
    model must not read a unit's parameter outside of this unit's forward, because it is in shards then. It must not
    assign data (`p.data = x`), because fully_shard ignores it. Change values in place.

    On gloo ranks wait for its collectives, and its reduce-scatter moves an all-reduce's bytes. A step then moves 4
    (p-1)/p of the model's bytes, and ZeRO3's 3 (p-1)/p. Units that stay whole from forward to backward reduce this. The
    record has these bytes only on an emulated Link, where a reduce-scatter has its own bytes.

    When to use it: as the yardstick, over gloo on CPUs. Our own ZeRO3, unlike it, lets you change buckets, compressor
    and strategy during a run.

    Reference: Zhao et al., "PyTorch FSDP", VLDB 2023, https://arxiv.org/abs/2304.11277; Rajbhandari et al., "ZeRO:
    Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, https://arxiv.org/abs/1910.02054
    """

    known_as: ClassVar[tuple[str, ...]] = ("FSDP", "FSDP2", "FullyShardedDataParallel")
    exact: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"
    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients", "parameters"})

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
