"""Distributed Newton steps by conjugate gradients."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors import inside
from workbench.rank import FLOATS, Bucket, Memory, Rank, outlined, values_of
from workbench.settings import knob
from workbench.strategies._base import Strategy
from workbench.strategies._mean import mean_of_all
from workbench.strategies.second_order.verbs import curve, value

MIN_DECREASE = 0.1  # Armijo's rule: share of the decrease promised by the slope that a step length must reach


class _State:
    """The vectors of a solve, each as long as the model; they exist from the first step on."""

    def __init__(self) -> None:
        self.memory = Memory()

    def of(self, name: str, buckets: list[Bucket]) -> list[Bucket]:
        return [bucket.like(self.memory.flat(name, bucket)) for bucket in buckets]


@dataclass(frozen=True, kw_only=True)
class Newton(Strategy):
    """Each step solves (B + damping I) d = -g by conjugate gradients, which need only products B v.

        g   = (1/p) sum_i grad_i,    B_i the Gauss-Newton matrix of rank i's batch
        "summed":   d = CG(v -> (1/p) sum_i B_i v + damping v, -g)              an all-reduce in every iteration
        "local":    d = (1/p) sum_i CG(v -> B_i v + damping v, -g)              GIANT: one all-reduce for all of them
        params <- params + s d,   s the first of lr, lr/2, lr/4, ... whose mean loss f has f(s) <= f(0) + 0.1 s g . d

    B = J^T H J, with the Jacobian J of the model's output and the Hessian H of the loss in that output. If the model is
    linear in its parameters, B is the Hessian. Otherwise B leaves out the model's own curvature and is never negative.
    So conjugate gradients meet no direction of negative curvature. With a network's Hessian they do. The number of
    `iterations` is fixed, so all ranks issue the same operations. With `tries` = 1 it tries no length and s = lr. If no
    length is good enough, the parameters stay. DANE (Shamir et al. 2014) solves a problem of each rank's own loss, with
    its gradient corrected to g. On a quadratic its solution is GIANT's.

    Set the learning rate to 1, Newton's own step. It is the longest length that is tried. The task's optimizer is not
    used. An iteration costs about as much compute as two gradients. Per step a rank sends DDP's bytes and one number
    per try. It sends as many bytes as DDP again for d ("local") or for each iteration ("summed"). It keeps four vectors
    as long as the model.

    When to use it: small models and large batches, because g and B of a few examples are noise. "local" suits a slow
    network. It needs batches with several times as many examples as the model has parameters, or `damping` near the
    curvature. Otherwise a rank moves by 1/damping times the gradient where its own batch has no curvature. It works on
    a transformer, but a step costs about as much as 8 steps of SGD. So it is measured on Digits only. In one trial
    ByteGPT on two ranks reached a loss of 2.6 in 16 steps with `damping` 0.1 or 1 and `tries` = 10. SGD with momentum
    (lr 0.1) reached 3.1. With 0.01 and 4 tries it stopped after its first step, because no length was good enough.

    Reference: Wang et al., "GIANT: Globally Improved Approximate Newton Method for Distributed Optimization", NeurIPS
    2018, https://arxiv.org/abs/1709.03528; Shamir, Srebro and Zhang, "Communication-Efficient Distributed Optimization
    using an Approximate Newton-type Method", ICML 2014, https://arxiv.org/abs/1312.7853; Martens, "Deep Learning via
    Hessian-free Optimization", ICML 2010; Schraudolph, "Fast Curvature Matrix-Vector Products for Second-Order Gradient
    Descent", Neural Computation 2002
    """

    products: str = knob(
        "summed", choices=("summed", "local"), doc="curvature: the mean over ranks, or each rank's own"
    )
    iterations: int = knob(10, 1, 1000, log=True, doc="conjugate gradient iterations of a step")
    damping: float = knob(1e-2, 1e-10, 1e4, log=True, doc="added to the curvature; smaller values take larger steps")
    tries: int = knob(4, 1, 30, doc="step lengths to try: lr and its halves; 1: lr untested")

    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    alike: ClassVar[bool] = True
    plain: ClassVar[bool] = False
    clips: ClassVar[bool] = False
    sees_all: ClassVar[bool] = True
    own: ClassVar[dict[str, str]] = {"conjugate": "drop", "direction": "drop", "residual": "drop", "start": "drop"}

    def refuses(self, compressor: Any) -> str | None:
        if not all(c.lossless for c in inside(compressor)):
            return (
                f"compressor={type(compressor).__name__}: Newton solves for the gradient and searches a step length, "
                f"so the gradient must be exact; use Dense with it, or DDP with {compressor}"
            )
        return super().refuses(compressor)

    def init(self, rank: Rank, params: list[Bucket]) -> _State:
        return _State()

    async def step(self, rank: Rank, state: _State) -> None:
        loss = await rank.forward()
        pending = []
        async for bucket in rank.backward(1.0 / rank.size):
            pending.append(await rank.start(rank.compressor.reduce(rank, bucket, rank.memory), name=bucket.name))
        for handle in pending:
            await rank.wait(handle)
        grads = await rank.grads()
        direction = await self._solved(rank, state, grads)
        if self.products == "local":
            await mean_of_all(rank, direction)
        length = rank.lr if self.tries == 1 else await self._length(rank, state, loss, grads, direction)
        await rank.update(by=partial(_move, await rank.params(), direction, length))

    async def _solved(self, rank: Rank, state: _State, grads: list[Bucket]) -> list[Bucket]:
        """Returns about -(B + damping I)^-1 g, by conjugate gradients that start at zero."""
        x, r, p = (state.of(name, grads) for name in ("direction", "residual", "conjugate"))
        for into, left, along, grad in zip(x, r, p, grads, strict=True):
            into.data.zero_()
            left.data.copy_(grad.data).neg_()
            along.data.copy_(left.data)
        square = _dot(r, r)
        for _ in range(self.iterations):
            bent = [b.like(c) for b, c in zip(p, await curve(rank, [b.data for b in p]), strict=True)]
            for b, along in zip(bent, p, strict=True):
                if self.products == "summed":
                    await rank.all_reduce(b.data, "mean", b.name)
                b.data.add_(along.data, alpha=self.damping)
            step = _ratio(square, _dot(p, bent))
            for into, left, along, b in zip(x, r, p, bent, strict=True):
                into.data.add_(along.data * step.to(along.data.dtype))
                left.data.sub_(b.data * step.to(b.data.dtype))
            before, square = square, _dot(r, r)
            share = _ratio(square, before)
            for left, along in zip(r, p, strict=True):
                along.data.mul_(share.to(along.data.dtype)).add_(left.data)
        return x

    async def _length(self, rank: Rank, state: _State, loss: Any, grads: list[Bucket],
                      direction: list[Bucket]) -> float:  # fmt: skip
        """Returns the first length that lowers the mean loss enough, or 0; ranks send one number per length."""
        params = await rank.params()
        start, lengths = state.of("start", params), [rank.lr / 2**k for k in range(self.tries)]
        for kept, x in zip(start, params, strict=True):
            kept.data.copy_(x.data)
        losses = [_scalar(grads[0].data, loss)]
        for length in lengths:
            _move(params, direction, length)
            losses.append(_scalar(grads[0].data, await value(rank)))
            for kept, x in zip(start, params, strict=True):
                x.data.copy_(kept.data)
        found = await rank.all_reduce(torch.cat(losses), "mean", "tries")
        slope = float(values_of(_dot(direction, grads), otherwise=0.0))
        first, *others = values_of(found, otherwise=0.0).tolist()
        good = (s for s, f in zip(lengths, others, strict=True) if f <= first + MIN_DECREASE * s * slope)
        length = next(good, 0.0)
        await rank.sample("step length", length)
        return length


def _move(params: list[Bucket], direction: list[Bucket], length: float) -> None:
    for x, d in zip(params, direction, strict=True):
        x.data.add_(d.data, alpha=length)


def _dot(left: list[Bucket], right: list[Bucket]) -> Tensor:
    """Returns the dot product of two vectors in buckets, () float64."""
    return torch.stack([_product(a.data, b.data) for a, b in zip(left, right, strict=True)]).sum()


@outlined(lambda a, b: a.new_empty((), dtype=torch.float64))
def _product(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(dtype=torch.float64)


@outlined(lambda above, below: torch.empty_like(above))
def _ratio(above: Tensor, below: Tensor) -> Tensor:
    """Returns above / below, or 0 if `below` is 0, because the solution is then reached."""
    return torch.where(below > 0, above / below, torch.zeros_like(above))


@outlined(lambda like, loss: like.new_empty(1, dtype=torch.float64))  # sizes only: the value is unknown
def _scalar(like: Tensor, loss: Tensor) -> Tensor:
    """Returns a loss as (1,) float64 on the device of `like`."""
    return loss.detach().reshape(1).to(like.device, torch.float64)
