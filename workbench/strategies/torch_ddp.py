"""torch's own DistributedDataParallel, as the baseline that everything is measured against."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchDDP(Strategy):
    """torch.nn.parallel.DistributedDataParallel at its best, run as it is and seen only from outside.

    The host wraps the model when this strategy enters and unwraps it when it leaves; buckets are torch's
    (`gradient_as_bucket_view`, `static_graph`), capped at the experiment's `bucket_mb`. Same bytes as DDP.
    On an emulated Link a comm hook puts torch's buckets on it.

    With `static_graph` torch learns in the first step which parameters a step uses, and fails if that changes. Set
    `find_unused_parameters` for a model that does not use the same parameters in every step and on every rank.

    When to use it: as the yardstick. Not to be confused with DDP, ours, whose buckets, compressor and
    strategy can be changed while it runs.

    Reference: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704
    """

    find_unused_parameters: bool = knob(False, doc="steps may use different parameters; takes static_graph's place")

    known_as: ClassVar[tuple[str, ...]] = ("DistributedDataParallel",)
    exact: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
