"""Native: the backend's own all-reduce."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView, alpha_beta

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Native(Algorithm):
    """The backend's own all-reduce: gloo and NCCL show no messages. A Link prices it as a ring.

        time = 2 (p-1) alpha + 2 (p-1)/p n beta + (p-1)/p n gamma

    When to use it: by default, unless you want to see the messages or the Link favours another algorithm. It copies
    least: gloo moves bytes in C++, other algorithms move them through this rank's mailbox.

    Reference: https://github.com/pytorch/gloo/blob/main/docs/algorithms.md
    """

    native: ClassVar[bool] = True

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        raise NotImplementedError("the host performs it")

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        p, (alpha, beta) = len(ranks), alpha_beta(fabric, ranks)
        return 2 * (p - 1) * (alpha + nbytes / p * beta) + (p - 1) / p * nbytes * gamma
