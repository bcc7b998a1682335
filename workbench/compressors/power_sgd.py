"""PowerSGD: matrices cross the wire as two thin factors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Part, Rank


@dataclass(frozen=True, kw_only=True)
class PowerSGD(Compressor):
    """Each weight matrix's gradient crosses the wire as two thin factors, found by one power iteration per step.

        P = orthonormal(sum over ranks of M_i Q);   Q <- sum over ranks of M_i^T P;   out = P Q^T

    M_i is rank i's gradient as an n x m matrix (dimensions after the first are joined), Q of the step before is
    where this one begins, and r = `rank` is the number of columns of P and Q. Bytes sent per rank: 2 (p-1)/p * 4
    r (n + m) for an fp32 matrix, in two all-reduces per bucket, the second after the first. Vectors, and
    matrices for which r (n + m) is not less than n m, cross whole, beside the first factor.

    What a rank contributes is P (M_i^T P)^T: contributions add up to `out`, so the result does not depend on how
    the batch is spread over ranks. Biased, so it wants error feedback: the bare name PowerSGD means
    ErrorFeedback(of=PowerSGD()). With one rank it still approximates that rank's own gradient. Q is kept by
    parameter: a change of bucket size or strategy keeps it, a smaller rank cuts columns, a larger one adds random
    ones. `rank` is that of linear algebra; Rank, the process, is another thing.

    When to use it: wires slow enough that two short messages beat a long one, and layers with large matrices.
    Unlike TopK its bytes per rank do not grow with the number of ranks.

    Reference: Vogels, Karimireddy and Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for Distributed
    Optimization", NeurIPS 2019, https://arxiv.org/abs/1905.13727
    """

    rank: int = knob(4, 1, 1024, log=True, doc="columns of each factor: the rank of the approximation")

    linear: ClassVar[bool] = True
    slot: ClassVar[str] = "power_sgd"

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        stacks, whole = self._sorted(bucket)
        if not stacks:
            await rank.all_reduce(bucket.data, "sum", bucket.name)
            return None
        wire = bucket.data.dtype  # factors cross in the bucket's dtype; arithmetic is at least fp32
        x = bucket.data.to(torch.promote_types(wire, torch.float32))
        own = torch.empty_like(x)
        before = [_orthonormal(self._recalled(memory, stack, x)) for stack in stacks]

        flat, ps, rest = _room(x, [(len(s.parts), s.n, self.rank) for s in stacks], whole)
        for stack, p, q in zip(stacks, ps, before, strict=True):
            _multiply(stack.matrices(x), q, p)
        _copy(own, whole, rest)
        flat.copy_(await rank.all_reduce(flat.to(wire), "sum", bucket.name))
        _copy(x, whole, rest)
        ps = [_orthonormal(p) for p in ps]

        flat, qs, _ = _room(x, [(len(s.parts), s.m, self.rank) for s in stacks], [])
        for stack, p, q in zip(stacks, ps, qs, strict=True):
            _multiply([m.T for m in stack.matrices(x)], p, q)
        sent = flat.to(wire)
        flat.copy_(sent)  # rounded as it is sent
        for stack, p, q in zip(stacks, ps, qs, strict=True):
            _multiply(p, q.mT, stack.matrices(own))
        flat.copy_(await rank.all_reduce(sent, "sum", bucket.name))
        for stack, p, q, old in zip(stacks, ps, qs, before, strict=True):
            _multiply(p, q.mT, stack.matrices(x))
            self._remember(memory, stack, q, old)
        bucket.data.copy_(x)
        return own.to(wire)

    def _sorted(self, bucket: Bucket) -> tuple[list[_Stack], list[Part]]:
        """The bucket's matrices, those of one shape together, and what crosses whole."""
        stacks: dict[tuple[int, int], _Stack] = {}
        whole = []
        for part in bucket.parts:
            n = part.shape[0] if part.shape else 1
            m = (part.stop - part.start) // max(n, 1)
            if self.rank * (n + m) < n * m:
                stacks.setdefault((n, m), _Stack(n, m, [])).parts.append(part)
            else:
                whole.append(part)
        return list(stacks.values()), whole

    def _recalled(self, memory: Memory, stack: _Stack, like: Tensor) -> Tensor:
        """The directions of the step before: (matrices, m, rank), random where there are none; equal on all ranks."""
        kept = memory.parts.setdefault(self.slot, {})
        out = []
        for part in stack.parts:
            q = kept.get(part.name, like.new_empty(stack.m, 0))[:, : self.rank].to(like)
            if q.shape[1] < self.rank:
                q = torch.cat([q, _random(part.name, stack.m, self.rank)[:, q.shape[1] :].to(like)], 1)
            out.append(q)
        return torch.stack(out)

    def _remember(self, memory: Memory, stack: _Stack, q: Tensor, old: Tensor) -> None:
        """Keeps (matrices, m, rank) for the next step, without asking for a value: sizes alone must do, too."""
        peak = q.abs().amax(1, keepdim=True)
        found = (peak > 0) & (peak < math.inf)
        q = torch.where(found, q, old.roll(1, 1))  # a direction in which nothing was found gives way to another
        memory.parts[self.slot].update((part.name, one) for part, one in zip(stack.parts, q, strict=True))


class _Stack(NamedTuple):
    """The matrices of one shape in one bucket."""

    n: int
    m: int
    parts: list[Part]

    def matrices(self, x: Tensor) -> list[Tensor]:
        """Views (n, m) of the flat bucket."""
        return [x[part.start : part.stop].view(self.n, self.m) for part in self.parts]


def _room(like: Tensor, shapes: list[tuple[int, int, int]], whole: list[Part]) -> tuple[Tensor, list[Tensor], Tensor]:
    """One flat vector for a phase: it, views of it in these shapes, and its end, which holds `whole`'s elements."""
    tail = torch.cat([like[:0], *(like[part.start : part.stop] for part in whole)])
    sizes = [math.prod(shape) for shape in shapes]
    flat = like.new_empty(sum(sizes) + tail.numel())
    *views, rest = flat.split([*sizes, tail.numel()])
    rest.copy_(tail)
    return flat, [view.view(shape) for view, shape in zip(views, shapes, strict=True)], rest


def _multiply(xs: Iterable[Tensor], ys: Iterable[Tensor], outs: Iterable[Tensor]) -> None:
    """Matrix products pair by pair, written where they belong: large ones are never copied."""
    for x, y, out in zip(xs, ys, outs, strict=True):
        torch.mm(x, y, out=out)


def _copy(x: Tensor, parts: list[Part], values: Tensor) -> None:
    """The joined values of `parts` back to where they belong."""
    start = 0
    for part in parts:
        x[part.start : part.stop] = values[start : (start := start + part.stop - part.start)]


def _orthonormal(a: Tensor) -> Tensor:
    """(..., n, r) -> as many orthonormal columns with the same span; never NaN unless `a` is, even if `a` is zero."""
    q: Tensor = torch.linalg.qr(a).Q
    return q


def _random(name: str, m: int, r: int) -> Tensor:
    """(m, r) of N(0, 1), the same on every rank without asking."""
    dice = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return torch.randn(r, m, generator=dice).T
