"""SlowMo: a slow momentum over the rounds of Local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._outer import Outer, OuterState, handed, outer_step, taken
from workbench.strategies._slots import MOMENTUM, combine_slots


@dataclass(frozen=True, kw_only=True)
class SlowMo(Strategy):
    """Each rank trains on its own for `every` steps; a slow momentum then works on how far all got on average.

        params_i <- optimizer_i(params_i, grad_i)                                    every step
        u <- beta u + (anchor - (1/p) sum_j params_j) / lr                           every H steps
        anchor <- anchor - alpha lr u;    params_i <- anchor

    u is in units of gradients, so it keeps its meaning when the learning rate changes; `lr` is the mean learning rate
    of the round's steps, so that one set in the middle of a round does not blow u up. `buffers` says what becomes of
    the inner optimizer's memory after each round: each rank keeps its own, it is zeroed, or averaged.

    It sends what LocalSGD sends, 2 (p-1)/p of the model's bytes once per H = `every` steps while all wait; "average"
    sends the optimizer's state, too. With beta = 0 and alpha = 1 it is LocalSGD, with H = 1 and plain SGD it is DDP
    with heavy-ball momentum beta at alpha times the rate. When it is left, a begun round ends in the plain mean;
    BMUF, DiLoCo and StreamingDiLoCo go on with its momentum.

    When to use it: wherever LocalSGD costs loss. The paper uses H = 12 over Local SGD, alpha = 1 throughout, beta
    between 0.4 and 0.8, zeroed buffers under Nesterov SGD and kept ones under Adam. The default H here is short, so
    that a lesson sees several rounds.

    Reference: Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", ICLR 2020, https://arxiv.org/abs/1910.00643
    """

    every: int = knob(4, 1, 256, unit="steps", log=True, doc="tau: steps each rank trains alone between outer steps")
    beta: float = knob(0.5, 0.0, 0.99, doc="beta, the slow momentum: decay rate of the outer update u")
    alpha: float = knob(1.0, 0.0, 2.0, doc="alpha, the slow learning rate: factor on the outer step lr u")
    buffers: str = knob("keep", choices=MOMENTUM, doc="what becomes of the inner optimizer's state after a round")

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
            await rank.grads()  # where there is none it is zero, so that all ranks remember something of each parameter
        await rank.update()
        state.trained(rank)
        if state.since >= self.every:
            await outer_step(rank, state, self._outer(state.rate))
            await combine_slots(rank, self.buffers)

    async def leave(self, rank: Rank, state: OuterState) -> None:
        if state.since:
            await outer_step(rank, state, None)

    def hands_on(self, rank: Rank, state: OuterState) -> Any:
        return handed(state.memory, -rank.lr)

    def takes(self, rank: Rank, state: OuterState, momentum: Any) -> None:
        taken(state.memory, momentum, -rank.lr)

    def _outer(self, lr: float) -> Outer:
        """With the paper's signs: the slot "momentum" is u. Where nothing was learned nothing has moved."""
        return Outer(self.beta, gain=-1.0 / lr if lr else 0.0, rate=-self.alpha * lr)
