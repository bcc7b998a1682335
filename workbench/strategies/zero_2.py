"""ZeRO stage 2: the optimizer's state and the summed gradients are shared out; parameters stay whole on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies.zero_1 import ZeRO1


@dataclass(frozen=True, kw_only=True)
class ZeRO2(ZeRO1):
    """ZeRO1, and once a bucket's gradients are summed each rank keeps its shard of them and no more.

        g_r <- sum_i grad_i, of rank r's shard of every bucket         reduce-scatter; the bucket's memory is free again
        params_r, state_r <- optimizer(params_r, state_r, g_r)
        params <- all ranks' params_r                                  all-gather

    Of Psi parameters a rank holds 2 Psi bytes of them in 16 bits and (2 + K) Psi / p of gradients and optimizer state
    (4 Psi and (4 + K) Psi / p in fp32), and for a while the buckets that backward has filled and that are not summed
    yet: small buckets, or a fast wire, make it less. It sends as much as ZeRO1 and DDP, 2 (p-1)/p of the model's bytes
    per step, and its shards make together what one process would, to the bit.

    When to use it: as ZeRO1, where gradients are in the way, too. What is held is on the record as "memory gradients".

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054, section 5.2
    """

    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients"})
