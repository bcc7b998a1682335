"""Hybrid sharding: ZeRO stage 3 within groups of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies import _grouped
from workbench.strategies._sharded import ShardGroups
from workbench.strategies.zero_3 import ZeRO3


@dataclass(frozen=True, kw_only=True)
class HSDP(ZeRO3):
    """ZeRO3 within groups of g ranks. Each group holds the whole model, and groups average their gradients.

        before a pass reads a bucket:                params <- params_r of the group    all-gather, in the group
        g_r <- sum over the group, of rank r's shard                    reduce-scatter, in the group
        g_r <- sum over the q = p/g ranks that keep the same shard      all-reduce, between groups
        params_r, state_r <- optimizer(params_r, state_r, g_r)

    Each g = `group` consecutive ranks are a group (the mesh is "between" p/g x "within" g). A rank holds (4 + 4 + K)
    Psi / g bytes in fp32. It sends 3 (g-1)/g of the model's bytes within its group. Between groups it sends 2 (q-1)/q
    of 1/g of them. DDP sends 2 (p-1)/p of them. A compressor acts among all ranks. Sums are added group by group, so
    with several groups the last bits differ from ZeRO3's.

    When to use it: the model fits into the memory of one host's ranks together, and links between hosts are slow.

    Reference: Zhao et al., "PyTorch FSDP", VLDB 2023, https://arxiv.org/abs/2304.11277, section 3.2.2; MiCS: Zhang et
    al., VLDB 2022, https://arxiv.org/abs/2205.00119
    """

    group: int = knob(2, 1, 4096, unit="ranks", doc="g: ranks that shard the model among themselves")

    shared_along: ClassVar[tuple[str, ...]] = ("within",)

    def refuses_size(self, size: int) -> str | None:
        return _grouped.refuses(self.group, size)

    def dims(self, size: int) -> tuple[tuple[str, int], ...]:
        return _grouped.dims(self.group, size)

    def among(self, rank: Rank) -> ShardGroups:
        return ShardGroups(rank, rank.group("within"), rank.group("between"))
