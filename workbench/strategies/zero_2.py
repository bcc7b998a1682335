"""ZeRO stage 2: ranks also shard summed gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from workbench.strategies.zero_1 import ZeRO1


@dataclass(frozen=True, kw_only=True)
class ZeRO2(ZeRO1):
    """ZeRO1 that also keeps only this rank's shard of a bucket's gradients once they are summed.

        g_r <- sum_i grad_i, of rank r's shard of every bucket         reduce-scatter; the bucket's memory is free again
        params_r, state_r <- optimizer(params_r, state_r, g_r)
        params <- all ranks' params_r                                  all-gather

    Of Psi parameters a rank holds 2 Psi bytes in 16 bits. Gradients and optimizer state take (2 + K) Psi / p bytes. In
    fp32 these are 4 Psi and (4 + K) Psi / p. It also holds the buckets that backward has filled until they are summed.
    Small buckets or a fast network reduce them. Bytes and results are ZeRO1's.

    When to use it: as ZeRO1, if gradients also need too much memory. The record has their memory as "memory gradients".

    Reference: Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020,
    https://arxiv.org/abs/1910.02054, section 5.2
    """

    shards: ClassVar[frozenset[str]] = frozenset({"optimizer state", "gradients"})
