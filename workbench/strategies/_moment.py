"""Adam that exchanges its momentum with a frozen variance; base of QAdam and OneBitAdam."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from workbench.rank import FLOATS, Bucket, Memory, Rank
from workbench.settings import knob
from workbench.strategies._base import Strategy


class Moments:
    """State of one rank: both moments, and the weight 1 - beta^t of the gradients in each."""

    def __init__(self, scaled: bool) -> None:
        self.scaled = scaled  # fixed until the strategy is left, because the residual is in these units
        self.steps = 0
        self.memory = Memory()
        self.m_weight = 0.0
        self.v_weight = 0.0

    def of(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Returns m and v of a bucket's parameters."""
        return self.memory.flat("m", bucket), self.memory.flat("v", bucket)


@dataclass(frozen=True, kw_only=True)
class MomentExchange(Strategy):
    """Warms up as Adam on mean gradients. Then v is frozen, and ranks exchange m plus their own gradients.

    Both moments are this strategy's state and equal on all ranks. The task's optimizer is not used.
    """

    beta1: float = knob(0.9, 0.0, 0.9999, doc="decay rate of the first moment m, which ranks exchange")
    beta2: float = knob(0.999, 0.0, 0.999999, doc="decay rate of the second moment v, until it is frozen")
    eps: float = knob(1e-8, 1e-12, 1.0, log=True, doc="added to sqrt(v_hat), so that nothing divides by zero")
    scaled: bool = knob(False, live=False, doc="send each element of m in units of its sqrt(v_hat) + eps")
    weight_decay: float = knob(0.0, 0.0, 10.0, doc="decoupled weight decay: a step shrinks by lr times this")

    dtypes: ClassVar[tuple[str, ...]] = FLOATS[1:]  # float16 can represent neither eps nor the squares
    alike: ClassVar[bool] = True
    moves_frozen: ClassVar[bool] = True
    exchanges: ClassVar[str] = "moments"
    clips: ClassVar[bool] = False
    plain: ClassVar[bool] = False
    own: ClassVar[dict[str, str]] = {
        "m": "drop", "v": "drop", "m_weight": "drop", "v_weight": "drop", "scaled": "drop", "steps": "drop",
    }  # fmt: skip

    @property
    @abstractmethod
    def warm_steps(self) -> int:
        """The steps of warm-up."""

    def init(self, rank: Rank, params: list[Bucket]) -> Moments:
        return Moments(self.scaled)

    async def step(self, rank: Rank, state: Moments) -> None:
        warm = state.steps < self.warm_steps
        agree = self._gradients if warm else self._momenta
        await rank.forward()
        pending = []
        async for bucket in rank.backward(1.0 / rank.size):
            pending.append(await rank.start(agree(rank, bucket, state), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        state.steps += 1
        state.m_weight += (1 - self.beta1) * (1 - state.m_weight)
        state.v_weight += (1 - self.beta2) * (1 - state.v_weight) if warm else 0.0
        await rank.update(by=partial(self._move, await rank.params(), rank.lr, state))

    def _move(self, params: list[Bucket], lr: float, state: Moments) -> None:
        for bucket in params:
            m, v = state.of(bucket)
            bucket.data.mul_(1 - lr * self.weight_decay)
            bucket.data.addcdiv_(m, self._root(v, state), value=-lr / state.m_weight)

    async def _gradients(self, rank: Rank, bucket: Bucket, state: Moments) -> None:
        """Updates both moments with the mean gradient, sent uncompressed."""
        m, v = state.of(bucket)
        grad = await rank.all_reduce(bucket.data, "sum", bucket.name)
        m.lerp_(grad, 1 - self.beta1)
        v.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)

    async def _momenta(self, rank: Rank, bucket: Bucket, state: Moments) -> None:
        """Sets m to the mean of the ranks' m. Elements without gradients in the warm-up have no v and do not move."""
        m, v = state.of(bucket)
        known = v > 0
        bucket.data.mul_(1 - self.beta1).add_(m, alpha=self.beta1 / rank.size).mul_(known)
        unit = self._root(v, state) if state.scaled else None
        if unit is not None:
            bucket.data.div_(unit)
        await rank.compressor.reduce(rank, bucket, rank.memory)
        if unit is not None:
            bucket.data.mul_(unit)
        m.copy_(bucket.data).mul_(known)

    def _root(self, v: Tensor, state: Moments) -> Tensor:
        """Returns sqrt(v_hat) + eps."""
        return (v / state.v_weight).sqrt_().add_(self.eps)
