"""DiLoCo: local training with an outer Nesterov optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.rank import Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._outer import Outer, OuterState, handed, outer_step, taken


@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy):
    """Ranks train alone for `every` steps; an outer Nesterov SGD uses the mean displacement as its gradient.

        params_i <- optimizer_i(params_i, grad_i)                             every step
        D <- (1/p) sum_j (anchor - params_j);   b <- mu b + D                 every H steps
        anchor <- anchor - eta (D + mu b);      params_i <- anchor

    eta is `outer_lr`, mu is `outer_momentum` and H is `every`. The first outer step moves by eta (1 + mu) D. The inner
    optimizer is the task's own, and its state stays on each rank. A rank sends 2 (p-1)/p of the model's bytes once per
    H steps and waits for it. With eta = 1 and mu = 0 it is LocalSGD. With H = 1, plain SGD inside and eta = 1 it is DDP
    with Nesterov momentum mu. "heavy-ball" moves the anchor by eta b, as SlowMo does.

    The compressor acts on displacements. Under TopK with error feedback they are SparseLoCo's. SparseLoCo has error
    feedback instead of an outer momentum and also decays the residual. Ours does not decay it, and our TopK selects
    from each bucket.

    If the strategy is left at the end of a round, the outer parameters are the result. Inside a round the result is the
    ranks' mean without an outer step. So ranks lose nothing that they learned, and no momentum acts on part of a round.
    SlowMo, BMUF and StreamingDiLoCo continue with b.

    When to use it: the network is so slow that ranks should exchange only every few hundred steps. The paper trains
    with AdamW inside and H = 500, from a model that was first trained synchronously. The default H here is short, so
    that a lesson shows several rounds.

    Reference: Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023,
    https://arxiv.org/abs/2311.08105; Sarfi et al., "Communication Efficient LLM Pre-training with SparseLoCo", 2025,
    https://arxiv.org/abs/2508.15706
    """

    every: int = knob(8, 1, 2000, unit="steps", log=True, doc="H: steps each rank trains alone between outer steps")
    outer_lr: float = knob(0.7, 0.01, 2.0, doc="outer learning rate, of the mean displacement (outer gradient)")
    outer_momentum: float = knob(0.9, 0.0, 0.99, doc="outer momentum over the rounds; 0: none")
    form: str = knob("nesterov", choices=("nesterov", "heavy-ball"), doc="Nesterov or classical outer momentum")

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
        await rank.update()
        state.trained(rank)
        if state.since >= self.every:
            ahead = self.form == "nesterov"
            await outer_step(rank, state, Outer(self.outer_momentum, rate=self.outer_lr, nesterov=ahead))

    async def leave(self, rank: Rank, state: OuterState) -> None:
        if state.since:
            await outer_step(rank, state, None)

    def hands_on(self, rank: Rank, state: OuterState) -> Any:
        return handed(state.memory, 1.0)

    def takes(self, rank: Rank, state: OuterState, momentum: Any) -> None:
        taken(state.memory, momentum, 1.0)
