"""The outer optimizer of SlowMo, BMUF, DiLoCo and Streaming DiLoCo: what they make of the ranks' mean displacement.

Ranks train alone from a common anchor. How far they have got on average, d = (1/p) sum_j (params_j - anchor), is taken
as one large gradient (with its sign turned), on which a momentum works:

    momentum <- m momentum + gain d
    anchor   <- anchor + rate momentum                    heavy-ball
    anchor   <- anchor + rate (gain d + m momentum)       Nesterov, as torch.optim.SGD(nesterov=True) writes it

The first step has momentum = gain d. Only the units differ, so one can hand its momentum on to another: what a unit of
it is as a displacement is 1 for DiLoCo, 1 / zeta for BMUF, minus the learning rate for SlowMo, which keeps gradients.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple

from torch import Tensor

from workbench.rank import Bucket, Memory, Op, Rank
from workbench.strategies._copies import copies


class Outer(NamedTuple):
    """One outer optimizer: heavy-ball or Nesterov momentum on mean displacements."""

    momentum: float
    gain: float = 1.0
    rate: float = 1.0
    nesterov: bool = False

    def step(self, anchor: Tensor, momentum: Tensor, moved: Tensor) -> None:
        """One outer step, in place; `moved` is d and is used up."""
        moved.mul_(self.gain)
        momentum.mul_(self.momentum).add_(moved)
        if self.nesterov:
            anchor.add_(moved, alpha=self.rate).add_(momentum, alpha=self.rate * self.momentum)
        else:
            anchor.add_(momentum, alpha=self.rate)


class OuterState:
    """What one rank remembers: how long it has trained alone, and in slots "anchor" and "momentum" the outer state."""

    def __init__(self, params: list[Bucket]) -> None:
        self.since = 0
        self.rates = 0.0  # the sum of the learning rates of these steps
        self.memory = copies(params, "anchor")

    def trained(self, rank: Rank) -> None:
        """One step alone is done."""
        self.since += 1
        self.rates += rank.lr

    @property
    def rate(self) -> float:
        """The mean learning rate of the steps since the anchor."""
        return self.rates / self.since


def handed(memory: Memory, unit: float) -> dict[str, Tensor] | None:
    """The outer momentum as displacements, by parameter; None where there is none yet. See `Strategy.hands_on`."""
    kept = memory.buffers.get("momentum", {})
    return {name: piece * unit for name, piece in kept.items()} or None


def taken(memory: Memory, momentum: dict[str, Tensor] | None, unit: float) -> None:
    """Goes on with what another strategy has `handed` on."""
    if momentum and unit:
        memory.buffers["momentum"] = {name: piece / unit for name, piece in momentum.items()}


async def outer_step(rank: Rank, state: OuterState, outer: Outer | None) -> None:
    """All ranks tell each other how far they have got, make the same outer step and begin again from its anchor.

    Without an outer optimizer they go to their mean, and the momentum is left as it is.
    """
    pending = []
    for bucket in await rank.params():
        held = state.memory.flat("anchor", bucket), state.memory.flat("momentum", bucket)
        pending.append(await rank.start(_step_of(rank, bucket, *held, outer), name=bucket.name))
    for handle in pending:
        await rank.wait(handle)
    state.since, state.rates = 0, 0.0


def _step_of(rank: Rank, bucket: Bucket, start: Tensor, momentum: Tensor,
             outer: Outer | None) -> Coroutine[Op, Any, None]:
    async def child() -> None:
        moved = bucket.like(bucket.data.sub_(start).div_(rank.size))
        await rank.compressor.reduce(rank, moved, rank.memory)
        if outer is None:
            start.add_(moved.data)
        else:
            outer.step(start, momentum, moved.data)
        bucket.data.copy_(start)

    return child()
