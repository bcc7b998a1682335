"""SlowMo: a slow momentum over the rounds of Local SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._outer import Outer, OuterState, handed, outer_step, taken
from workbench.strategies._slots import MOMENTUM_CHOICES, combine_slots


@dataclass(frozen=True, kw_only=True)
class SlowMo(Strategy):
    """Ranks train alone for `every` steps; a slow momentum then acts on their mean displacement.

        params_i <- optimizer_i(params_i, grad_i)                                    every step
        u <- beta u + (anchor - (1/p) sum_j params_j) / lr                           every H steps
        anchor <- anchor - alpha lr u;    params_i <- anchor

    u is in units of gradients, so it keeps its meaning when the learning rate changes. `lr` is the mean learning rate
    of the round's steps. So u does not explode if the rate changes during a round.

    It sends LocalSGD's bytes (2 (p-1)/p of the model once per H = `every` steps) and waits for them. `buffers` =
    "average" also sends the optimizer's state. With beta = 0 and alpha = 1 it is LocalSGD. With H = 1 and plain SGD it
    is DDP with heavy-ball momentum beta at alpha times the learning rate. If the strategy is left inside a round, the
    result is the plain mean. BMUF, DiLoCo and StreamingDiLoCo continue with its momentum.

    When to use it: if LocalSGD costs loss. The paper uses H = 12 over Local SGD, alpha = 1 and beta between 0.4 and
    0.8. It zeroes buffers under Nesterov SGD and keeps them under Adam. The default H here is short, so that a lesson
    shows several rounds.

    Reference: Wang, Tantia, Ballas and Rabbat, "SlowMo: Improving Communication-Efficient Distributed SGD with Slow
    Momentum", ICLR 2020, https://arxiv.org/abs/1910.00643
    """

    every: int = knob(4, 1, 256, unit="steps", log=True, doc="tau: steps each rank trains alone between outer steps")
    beta: float = knob(0.5, 0.0, 0.99, doc="beta, the slow momentum: decay rate of the outer update u")
    alpha: float = knob(1.0, 0.0, 2.0, doc="alpha, the slow learning rate: factor on the outer step lr u")
    buffers: str = knob(
        "keep", choices=MOMENTUM_CHOICES, doc="what happens to the inner optimizer's state after a round"
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
        """Returns the outer optimizer with the paper's signs: slot "momentum" is u. With lr = 0 nothing has moved."""
        return Outer(self.beta, gain=-1.0 / lr if lr else 0.0, rate=-self.alpha * lr)
