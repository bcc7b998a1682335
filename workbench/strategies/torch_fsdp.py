"""torch's own fully sharded data parallelism (FSDP2), the baseline for ZeRO3."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import FLOATS, Part, Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchFSDP(Strategy):
    """torch.distributed.fsdp.fully_shard as documented, unmodified and observed from outside.

    Each rank keeps its rows of every parameter, gradient and optimizer state. A unit is a block of a transformer, or a
    module of half an experiment's `bucket_mb` or more, and is whole while it is computed. `fully_shard` changes a model
    permanently, so the host trains a copy. At an evaluation, a switch of strategy and the end it copies the parameters
    back. A rank then holds all parameters in addition to its shards. A new optimizer, bucket size or fabric rebuilds
    the copy.

    A parameter that no rank used in a step is not stepped, as under DDP; fully_shard alone would step it with zeros.
    Ranks may use different parameters of a unit, but each rank has to compute all units. torch gathers and sums unit by
    unit. So a rank that skips one (an expert of its own) issues other collectives than the other ranks. If a model's
    control flow depends on values, ranks compare the units that they have reached, and raise an error if these differ.

    On gloo ranks wait for its collectives, and its reduce-scatter moves an all-reduce's bytes. A step then moves 4
    (p-1)/p of the model's bytes, and ZeRO3's 3 (p-1)/p; units that stay whole from forward to backward reduce this. The
    record has these bytes only on an emulated Link, where a reduce-scatter has its own bytes.

    When to use it: as the yardstick, over gloo on CPUs. It is not ZeRO3, our own strategy, whose buckets, compressor
    and strategy can be changed during a run.

    Reference: Zhao et al., "PyTorch FSDP", VLDB 2023, https://arxiv.org/abs/2304.11277; Rajbhandari et al., "ZeRO:
    Memory Optimizations Toward Training Trillion Parameter Models", SC 2020, https://arxiv.org/abs/1910.02054
    """

    known_as: ClassVar[tuple[str, ...]] = ("FSDP", "FSDP2", "FullyShardedDataParallel")
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    exact: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"
    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients", "parameters"})

    def refuses_model(self, parts: list[Part]) -> str | None:
        scalar = next((part.name for part in parts if not part.shape), None)
        if scalar is None:
            return None
        return f"TorchFSDP: {scalar} is a scalar, which has no rows to share out; give it the shape (1,), or use ZeRO3"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
