"""The outer optimizer of SlowMo, BMUF, DiLoCo and Streaming DiLoCo.

Ranks train alone from a common anchor. Their mean displacement d = (1/p) sum_j (params_j - anchor) is used as one large
gradient with opposite sign. A momentum acts on it:

    momentum <- m momentum + gain d
    anchor   <- anchor + rate momentum                    heavy-ball
    anchor   <- anchor + rate (gain d + m momentum)       Nesterov, as torch.optim.SGD(nesterov=True) writes it

The first step has momentum = gain d. The strategies differ only in units, so one can hand its momentum on to another.
As a displacement a unit of momentum is 1 for DiLoCo and 1 / zeta for BMUF. For SlowMo it is minus the learning rate,
because SlowMo keeps gradients.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, NamedTuple

from torch import Tensor

from workbench.rank import Bucket, Memory, Op, Rank
from workbench.strategies._copies import copies


class Outer(NamedTuple):
    """An outer optimizer: heavy-ball or Nesterov momentum on mean displacements."""

    momentum: float
    gain: float = 1.0
    rate: float = 1.0
    nesterov: bool = False

    def step(self, anchor: Tensor, momentum: Tensor, moved: Tensor) -> None:
        """Makes one outer step in place. Overwrites `moved`, which is d."""
        moved.mul_(self.gain)
        momentum.mul_(self.momentum).add_(moved)
        if self.nesterov:
            anchor.add_(moved, alpha=self.rate).add_(momentum, alpha=self.rate * self.momentum)
        else:
            anchor.add_(momentum, alpha=self.rate)


class OuterState:
    """State of one rank: steps trained alone, and the outer state in slots "anchor" and "momentum"."""

    def __init__(self, params: list[Bucket]) -> None:
        self.since = 0
        self.rates = 0.0  # sum of the learning rates of these steps
        self.memory = copies(params, "anchor")

    def trained(self, rank: Rank) -> None:
        """Counts one step that this rank trained alone."""
        self.since += 1
        self.rates += rank.lr

    @property
    def rate(self) -> float:
        """The mean learning rate of the steps since the anchor."""
        return self.rates / self.since


def handed(memory: Memory, unit: float) -> dict[str, Tensor] | None:
    """Returns the outer momentum as displacements by parameter; None without one. See `Strategy.hands_on`."""
    kept = memory.buffers.get("momentum", {})
    return {name: piece * unit for name, piece in kept.items()} or None


def taken(memory: Memory, momentum: dict[str, Tensor] | None, unit: float) -> None:
    """Continues with the momentum that another strategy has `handed` on."""
    if momentum and unit:
        memory.buffers["momentum"] = {name: piece / unit for name, piece in momentum.items()}


async def outer_step(rank: Rank, state: OuterState, outer: Outer | None) -> None:
    """Averages the ranks' displacements and makes the same outer step on all ranks. They restart from its anchor.

    Without an outer optimizer ranks go to their mean, and the momentum does not change.
    """
    pending = []
    for bucket in await rank.params():
        held = state.memory.flat("anchor", bucket), state.memory.flat("momentum", bucket)
        pending.append(await rank.start(_step_of(rank, bucket, *held, outer), name=bucket.name))
    for handle in pending:
        await rank.wait(handle)
    state.since, state.rates = 0, 0.0


def _step_of(
    rank: Rank, bucket: Bucket, start: Tensor, momentum: Tensor, outer: Outer | None
) -> Coroutine[Op, Any, None]:
    async def child() -> None:
        moved = bucket.like(bucket.data.sub_(start).div_(rank.size))
        await rank.compressor.reduce(rank, moved, rank.memory)
        if outer is None:
            start.add_(moved.data)
        else:
            outer.step(start, momentum, moved.data)
        bucket.data.copy_(start)

    return child()
