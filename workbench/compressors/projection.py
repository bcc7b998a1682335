"""Projection: sends a tensor along the few directions with most of its norm."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Codec, Coder, Payload
from workbench.compressors._low_rank import orthonormal, random_directions
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import outlined, values_of
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Projection(Codec):
    """Sends each vector of features as its r coordinates in a basis that the whole tensor shares.

        V = orthonormal((X^T X)^q W),  W fixed random numbers;   sent: X V and V;   C(X) = X V V^T

    X `(n, m)` are a tensor's features. m is the last dimension. A vector, such as a bucket, is folded into a matrix
    about as wide as long. Bytes for an fp32 tensor: 4 r (n + m), to every other rank. A tensor that is not larger is
    sent whole.
    Time: 2 q + 1 products of n m r. It has no memory: q = `iterations` power iterations find V for each tensor, and V
    is sent with it. So it also works for an activation, which has no place in the model. PowerSGD needs the previous
    directions and does not.

    An activation's gradient goes back along the same directions, G V V^T. Between 2 stages it is sent as G V. This is
    the gradient of a linear map with a fixed V. So components across V train nothing, and V itself gets no gradient.
    For a zero tensor V is arbitrary, and a layer with initial output zero would learn only in these directions. So its
    gradient is sent whole.

    The linear autoencoder of Bian et al. learns V with the model. It sends only X V and adds it up by all-reduces.
    Projection is the best case of this autoencoder for one tensor. It needs no learning, but also sends V.

    Biased, so for gradients in buckets it wants error feedback: the bare name Projection means
    ErrorFeedback(of=Projection()). A bucket's elements are not features. PowerSGD finds more, because it takes each
    matrix by itself.

    When to use it: for activations, if few directions hold most of their norm. A flat spectrum loses most.

    Reference: Halko, Martinsson and Tropp, "Finding Structure with Randomness", SIAM Review 2011,
    https://arxiv.org/abs/0909.4061; Bian et al., "Does compressing activations help model parallel training?", 2023,
    https://arxiv.org/abs/2301.02654
    """

    rank: int = knob(8, 1, 1024, log=True, doc="r: number of directions to keep")
    iterations: int = knob(1, 1, 8, doc="q: power iterations that find the directions")

    contraction: ClassVar[bool] = True
    kind: ClassVar[str] = "low rank"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    def worth(self, x: Tensor) -> bool:
        n, m = sides(x)
        return self.rank < min(n, m) and self.rank * (n + m) < x.numel()

    def encode(self, x: Tensor) -> Payload:
        if not self.worth(x):
            return (x.clone(),)
        a = matrix(x)
        v = self._directions(a)
        return (a @ v).flatten().to(x.dtype), v.flatten().to(x.dtype)

    @outlined(lambda self, a: a.new_empty(a.shape[1], self.rank))
    def _directions(self, a: Tensor) -> Tensor:
        """Returns orthonormal `(m, r)` for `(n, m)` of any scale. NaN if the input is not finite."""
        v, peak = random_directions(a, self.rank), a.abs().amax()
        if not peak.isfinite():
            return torch.full_like(v, torch.nan)
        a = a / peak.where(peak > 0, 1.0)
        for _ in range(self.iterations):
            v = orthonormal(a.T @ (a @ v))
        return v

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        if len(payload) == 1:
            return payload[0].to(like.dtype)
        return _Along(payload[1]).decode(payload, like)

    def chosen(self, payload: Payload) -> Tensor | None:
        if len(payload) == 1:
            return None
        nothing = not values_of(payload[0].any(), otherwise=1.0)  # zero tensor: its directions are arbitrary
        return payload[1].new_empty(0) if nothing else payload[1]

    def through(self, chosen: Tensor) -> Coder:
        return _Along(chosen) if chosen.numel() else _Whole()


class _Along:
    """A tensor's coordinates in a basis `(m, r)`. Both are flat, as they are sent."""

    def __init__(self, basis: Tensor) -> None:
        self._basis = basis

    def encode(self, x: Tensor) -> Payload:
        a = matrix(x)
        return ((a @ self._basis.to(a.dtype).view(a.shape[1], -1)).flatten().to(x.dtype),)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        wide = torch.promote_types(like.dtype, torch.float32)
        n, m = sides(like)
        made = payload[0].to(wide).view(n, -1) @ self._basis.to(wide).view(m, -1).T
        return made.reshape(-1)[: like.numel()].view(like.shape).to(like.dtype)


class _Whole:
    """The unchanged tensor."""

    def encode(self, x: Tensor) -> Payload:
        return (x.clone(),)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return payload[0].view(like.shape)


def sides(x: Tensor) -> tuple[int, int]:
    """Returns `(n, m)` of a tensor as a matrix of its features. A vector is folded first."""
    m = x.shape[-1] if x.dim() > 1 else math.ceil(math.sqrt(x.numel()))
    return -(-x.numel() // max(m, 1)), m


def matrix(x: Tensor) -> Tensor:
    """Returns `(n, m)`, fp32 at least, padded with zeros."""
    n, m = sides(x)
    wide = x.reshape(-1).to(torch.promote_types(x.dtype, torch.float32))
    return torch.cat([wide, wide.new_zeros(n * m - x.numel())]).view(n, m)
