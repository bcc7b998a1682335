"""Hogwild: all ranks of one machine train one vector of parameters, without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Rank
from workbench.strategies._base import Strategy


@dataclass(frozen=True, kw_only=True)
class Hogwild(Strategy):
    """Every rank reads and updates the same parameters in shared memory, at its own pace, and takes no lock.

        params <- optimizer_i(params, grad_i(params))       every rank i, whenever it is ready

    Nothing is sent and nobody waits: bytes are zero, and a slow rank holds up none. A gradient is computed from
    parameters that others change meanwhile, and where two ranks update one element at the same moment one of the two
    updates is lost. Sparse gradients (`nn.Embedding(sparse=True)`) write only the elements they are about, so ranks
    seldom meet; a dense update reads and writes every element, also where its gradient is zero. Each rank makes a
    whole step, so p ranks move the parameters up to p times as far per step as DDP: lower `lr` where that is too far.
    The optimizer's state and the model's buffers are each rank's own until it is left, then their mean. In the
    simulator an update happens at one moment, so gradients are stale there but no update is lost.

    When to use it: ranks on one host and gradients that are sparse, or ranks of uneven pace. It is refused
    where ranks are on several hosts, and on GPUs, whose memory is not the host's.

    Reference: Niu et al., "Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent", NIPS 2011,
    https://arxiv.org/abs/1106.5730
    """

    lockstep: ClassVar[bool] = False
    periodic: ClassVar[bool] = True
    shared: ClassVar[bool] = True
    exchanges: ClassVar[str] = "parameters"

    def refuses(self, compressor: Any) -> str | None:
        if compressor.immediate:
            return None
        return f"Hogwild sends nothing that {compressor} could encode; use Dense with it, or DDP or LocalSGD"

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
