"""AdaAlter: AdaGrad whose denominators the ranks average in rounds, with the parameters."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch

from workbench.rank import FLOATS, Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy


class _State:
    """State of one rank: the averaged sums of squares, its own sums, and the steps since the averaging."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.since = 0

    def sums(self, params: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the sums of the last averaging, and these plus this rank's new squares. Both are `(n,)`, fp32 at
        least.
        """
        kind = torch.promote_types(params.data.dtype, torch.float32)
        return self.memory.flat("agreed", params, kind), self.memory.flat("own", params, kind)


@dataclass(frozen=True, kw_only=True)
class AdaAlter(Strategy):
    """Averages parameters and AdaGrad's sums of squares together, between steps that ranks train alone.

        params_i <- params_i - lr grad_i / sqrt(b0^2 + B + t eps^2)       t = 1 ... H, the steps since B was agreed upon
        A_i      <- A_i + grad_i^2
        after H steps:   params_i <- (1/p) sum_j params_j,   B, A_i <- (1/p) sum_j A_j,   t <- 0

    All ranks divide by the same B. t eps^2 stands for the squares that B does not include yet. AdaGrad adds a step's
    squares before it divides by them. Here they count from the next round on (the "alter"), so H = `every` can be more
    than 1. With H = 1 it is the AdaAlter whose ranks average after every step.

    It is a strategy because its denominator depends on when ranks last averaged; an optimizer sees one rank only. It
    replaces the task's optimizer and uses its learning rate. B is 0 when the strategy is entered. Each rank sends 4
    (p-1)/p times the model's bytes per round and waits for them, as for two averagings.

    When to use it: the task wants AdaGrad (sparse features, language models with large vocabularies) and the network is
    slow. An `eps` near the size of a gradient limits the steps late in a round.

    Reference: Xie, Koyejo, Gupta and Lin, "Local AdaAlter: Communication-Efficient Stochastic Gradient Descent with
    Adaptive Learning Rates", 2019, https://arxiv.org/abs/1911.09030
    """

    every: int = knob(4, 1, 256, unit="steps", log=True, doc="H: steps each rank trains alone between averagings")
    initial: float = knob(1.0, 1e-6, 1e3, log=True, doc="b0: root of the initial sum of squares")
    eps: float = knob(
        1.0, 1e-6, 1e3, log=True, doc="root of the value that replaces a step's squares between averagings"
    )

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    alike: ClassVar[bool] = True
    periodic: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    exchanges: ClassVar[str] = "parameters"
    own: ClassVar[dict[str, str]] = {"agreed": "mean", "own": "mean", "since": "drop"}

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    def steps_apart(self, state: _State) -> int | None:
        return state.since

    async def step(self, rank: Rank, state: _State) -> None:
        await rank.forward()
        await rank.backward()
        state.since += 1
        await rank.update(by=partial(self._move, await rank.params(), await rank.grads(), rank.lr, state))
        if state.since >= self.every:
            await self.leave(rank, state)

    async def leave(self, rank: Rank, state: _State) -> None:
        if not state.since:
            return
        for params in await rank.params():
            agreed, own = state.sums(params)
            await rank.all_reduce(params.data, "mean", params.name)
            await rank.all_reduce(own, "mean", params.name)
            agreed.copy_(own)
        state.since = 0

    def _move(self, params: list[Bucket], grads: list[Bucket], lr: float, state: _State) -> None:
        for x, grad in zip(params, grads, strict=True):
            agreed, own = state.sums(x)
            root = (agreed + (self.initial**2 + state.since * self.eps**2)).sqrt_()
            x.data.sub_(grad.data.to(root.dtype).div(root), alpha=lr)
            own.addcmul_(grad.data.to(own.dtype), grad.data.to(own.dtype))
