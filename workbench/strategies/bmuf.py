"""BMUF: block momentum on model averaging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._outer import Outer, OuterState, handed, outer_step, taken
from workbench.strategies._slots import MOMENTUM_CHOICES, combine_slots


@dataclass(frozen=True, kw_only=True)
class BMUF(Strategy):
    """Ranks train alone for blocks of `every` steps; a momentum then filters their mean displacement.

        params_i <- optimizer_i(params_i, grad_i)                             every step
        delta <- eta delta + zeta ((1/p) sum_j params_j - anchor)             every H steps
        W <- W + delta
        anchor <- W   or, where `form` is "nesterov", W + eta delta;    params_i <- anchor

    All ranks begin a block at the anchor. delta is in units of parameters. So it keeps its length when the learning
    rate changes. SlowMo's u changes with the rate. At a constant learning rate BMUF(eta, zeta) is SlowMo(beta=eta,
    alpha=zeta).

    A rank sends 2 (p-1)/p of the model's bytes once per H = `every` steps and waits for it. If the strategy is left
    inside a block, the result is the plain mean. Between blocks it is the anchor. SlowMo, DiLoCo and StreamingDiLoCo
    continue with its momentum.

    When to use it: as SlowMo. eta = 1 - 1/p and zeta = 1 are usual. With p ranks a block's displacement then moves the
    model p times as far in the end. Implementations differ in the Nesterov form. In fairseq it moves the anchor by (1 +
    eta) delta each time.

    Reference: Chen and Huo, "Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-block
    Parallel Optimization and Blockwise Model-Update Filtering", ICASSP 2016,
    https://ieeexplore.ieee.org/document/7472805
    """

    every: int = knob(4, 1, 256, unit="steps", log=True, doc="H: steps each rank trains alone between block updates")
    eta: float = knob(0.75, 0.0, 0.99, doc="eta, the block momentum: decay rate of the outer update; 1 - 1/p is usual")
    zeta: float = knob(1.0, 0.0, 2.0, doc="zeta, the block learning rate: factor on the mean displacement")
    form: str = knob("classical", choices=("classical", "nesterov"), doc="classical or Nesterov block momentum")
    buffers: str = knob(
        "keep", choices=MOMENTUM_CHOICES, doc="what happens to the inner optimizer's state after a block"
    )

    moves_frozen: ClassVar[bool] = True
    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    follows: ClassVar[bool] = True
    exchanges: ClassVar[str] = "displacements"
    own: ClassVar[dict[str, str]] = {"momentum": "keep", "anchor": "drop", "rates": "drop", "since": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> OuterState:
        return OuterState(params)

    def steps_apart(self, state: OuterState) -> int | None:
        return state.since

    def anchor(self, state: OuterState) -> Memory | None:
        return state.memory

    async def step(self, rank: Rank, state: OuterState) -> None:
        await rank.forward()
        await rank.backward()
        if self.buffers == "average":
            await rank.grads()  # a missing gradient becomes zero, so all ranks have optimizer state for every parameter
        await rank.update()
        state.trained(rank)
        if state.since >= self.every:
            # W + eta delta moves by zeta G + eta delta, so storing the anchor alone is enough
            await outer_step(rank, state, Outer(self.eta, gain=self.zeta, nesterov=self.form == "nesterov"))
            await combine_slots(rank, self.buffers)

    async def leave(self, rank: Rank, state: OuterState) -> None:
        if state.since:
            await outer_step(rank, state, None)

    def hands_on(self, rank: Rank, state: OuterState) -> Any:
        return handed(state.memory, self._unit)

    def takes(self, rank: Rank, state: OuterState, momentum: Any) -> None:
        taken(state.memory, momentum, self._unit)

    @property
    def _unit(self) -> float:
        return 1.0 / self.zeta if self.zeta else 0.0
