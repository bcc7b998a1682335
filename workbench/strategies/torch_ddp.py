"""torch's own DistributedDataParallel, the baseline for all other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class TorchDDP(Strategy):
    """torch.nn.parallel.DistributedDataParallel with its fastest options, unmodified and observed from outside.

    The host wraps the model when this strategy is entered and unwraps it when it is left. The buckets are torch's
    (`gradient_as_bucket_view`, `static_graph`), capped at the experiment's `bucket_mb`. It sends the same bytes as DDP.
    On an emulated Link a comm hook sends torch's buckets over it.

    With `static_graph` torch learns in the first step which parameters a step uses, and fails if that changes. Set
    `find_unused_parameters` for a model that does not use the same parameters in every step and on every rank.

    torch waits for its exchanges in C++, where nothing else can end a wait. One of two ranks was aborted in
    the middle of an exchange over gloo. In 5 of 37 trials the other rank hung for over 15 s. gloo's own time limit is
    10 minutes.

    When to use it: as the yardstick. Our own DDP, unlike it, lets you change buckets, compressor and strategy during a
    run.

    Reference: Li et al., VLDB 2020, https://arxiv.org/abs/2006.15704
    """

    find_unused_parameters: bool = knob(False, doc="allow steps to use different parameters; replaces static_graph")

    known_as: ClassVar[tuple[str, ...]] = ("DistributedDataParallel",)
    exact: ClassVar[bool] = True
    follows: ClassVar[bool] = True
    opaque: ClassVar[bool] = True
    exchanges: ClassVar[str] = "gradients"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
