"""torch's own fully sharded data parallelism (FSDP2), as the baseline that ZeRO3 is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import FLOATS, Part, Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchFSDP(Strategy):
    """torch.distributed.fsdp.fully_shard as its documentation has it, run as it is and seen only from outside.

    Each rank keeps its rows of every parameter, of its gradient and of what the optimizer remembers; a unit (a block of
    a transformer, or a module of half an experiment's `bucket_mb` or more) is whole while it is computed. `fully_shard`
    changes a model for good, so the host trains a copy, and fetches from it where the run's own model is read: at an
    evaluation, in a switch away and at the end, when a rank holds all of the parameters beside its shards. Another
    optimizer, size of buckets or fabric makes the copy anew.

    A parameter that no rank used in a step is not stepped, as under DDP; fully_shard alone would step it with zeros.
    Ranks may reach other parameters of a unit in a step than others do, but each has to compute all units: torch
    gathers and sums unit by unit, and a rank that skips one (an expert of its own) no longer asks for the same. Where a
    model looks at values, ranks tell each other which unit they have come to, and it ends the run in words.

    On gloo its collectives are waited for and its reduce-scatter moves an all-reduce's bytes: 4 (p-1)/p of the model's
    bytes per step where ZeRO3 sends 3 (p-1)/p, less the units that stay whole from forward to backward. They are on the
    record on an emulated Link only, where a reduce-scatter has the bytes it should.

    When to use it: as the yardstick. Not to be confused with ZeRO3, ours, whose buckets, compressor and strategy can be
    changed while it runs. Over gloo, on CPUs.

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
