"""The common part of PowerSGD and ACPSGD, which send matrices as thin factors."""

from __future__ import annotations

import math
import zlib
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import ErrorFeedback
from workbench.rank import Bucket, Memory, Part, Rank
from workbench.settings import knob

LEFT, RIGHT = "low rank P", "low rank Q"  # Memory slots of factors (n, rank) and (m, rank), by parameter
TURN_NAME = "low rank turn"  # names of the parameters whose P is newer than their Q
MAX_MAGNITUDE = 1e30  # far below fp32's overflow, even after sums
DRAWS_NAME = "low rank draws"  # by parameter, the number of random draws; equal on all ranks


@dataclass(frozen=True, kw_only=True)
class LowRank(Compressor):
    """Sends a matrix as its product with a few directions, which its memory keeps.

    A gradient is an n x m matrix, dimensions after the first joined. It is compressed under 2 conditions. `rank` is
    below both sides, and the elements sent per step are less than 1 / `min_compression_rate` of the matrix. Other
    matrices and vectors are sent whole with the first factor.

    Factors are kept by parameter. So changes of bucket size, strategy or low-rank compressor keep them. A smaller rank
    cuts columns; a larger one adds random columns. A column of zeros is replaced by another direction. A non-finite
    column keeps its previous direction.
    """

    rank: int = knob(4, 1, 1024, log=True, doc="columns of each factor: the rank of the approximation")
    min_compression_rate: float = knob(
        2.0, 1.0, 1e6, log=True, doc="a matrix that shrinks by less than this factor is sent whole"
    )
    warm_start: bool = knob(True, doc="start from the directions of the previous step; false: from random ones")

    linear: ClassVar[bool] = True
    kind: ClassVar[str] = "low rank"
    drops: ClassVar[tuple[str, ...]] = (LEFT, RIGHT, TURN_NAME, DRAWS_NAME)

    @classmethod
    def usual(cls) -> Any:
        return ErrorFeedback(of=cls())

    @abstractmethod
    def sends(self, n: int, m: int) -> float:
        """Returns the elements sent per step for an n x m matrix, on average."""

    def worth(self, n: int, m: int) -> bool:
        return self.rank < min(n, m) and self.sends(n, m) * self.min_compression_rate < n * m

    def refuses_model(self, parts: list[Part]) -> str | None:
        n, m = max(map(matrix, parts), key=min, default=(1, 1))
        if self.rank <= min(n, m) or min(n, m) == 1:
            return None
        return (
            f"rank={self.rank}: the largest matrix of this model is {n} x {m}, so nothing would be compressed; take a "
            f"rank below {min(n, m)}, or Dense"
        )

    def sorted(self, bucket: Bucket, turned: Iterable[str] = ()) -> tuple[list[Stack], list[Part]]:
        """Returns the bucket's matrices by shape (`turned` ones transposed), and the parts to send whole."""
        stacks: dict[tuple[int, int, bool], Stack] = {}
        whole = []
        for part in bucket.parts:
            n, m = matrix(part)
            if self.worth(n, m):
                turn = part.name in turned
                sides = (m, n) if turn else (n, m)
                stacks.setdefault((*sides, turn), Stack(*sides, turn, [])).parts.append(part)
            else:
                whole.append(part)
        return list(stacks.values()), whole

    def directions(self, memory: Memory, stack: Stack, like: Tensor, fresh: bool = False) -> Tensor:
        """Returns the stack's directions `(matrices, m, rank)`, random if none are kept. Equal on all ranks."""
        slot = LEFT if stack.turned else RIGHT
        kept, draws = memory.parts.setdefault(slot, {}), memory.parts.setdefault(DRAWS_NAME, {})
        out = []
        for part in stack.parts:
            known = like.new_empty(stack.m, 0) if fresh else kept.get(part.name, like.new_empty(stack.m, 0))
            q = known[:, : self.rank].to(like)
            if q.shape[1] < self.rank:
                draw = draws[part.name] = draws.get(part.name, 0) + 1
                more = _random(f"{slot} {part.name} {draw}", stack.m, self.rank - q.shape[1])
                q = torch.cat([q, more.to(like)], 1)
            out.append(q)
        return torch.stack(out)

    def remember(self, memory: Memory, stack: Stack, found: Tensor, old: Tensor) -> None:
        """Keeps the stack's columns, `(matrices, m, rank)`. Reads no value, so it also works with sizes only."""
        peak = found.abs().amax(1, keepdim=True)
        good = torch.where((peak > 0) & (peak < math.inf), found, torch.where(peak == 0, old.roll(1, 1), old))
        slot = memory.parts.setdefault(LEFT if stack.turned else RIGHT, {})
        newer = memory.parts.setdefault(TURN_NAME, {})
        for part, one in zip(stack.parts, good, strict=True):
            slot[part.name] = one
            if stack.turned:
                newer[part.name] = True
            else:
                newer.pop(part.name, None)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        own = await self.reduce_owing(rank, bucket, memory)
        return None if own is None else own.written(bucket.data)

    @abstractmethod
    async def reduce_owing(self, rank: Rank, bucket: Bucket, memory: Memory) -> Contribution | None:
        """Writes the sum over ranks into `bucket.data`; returns this rank's part of it as factors."""

    async def summed(
        self, rank: Rank, bucket: Bucket, x: Tensor, stacks: list[Stack], bases: list[Tensor], whole: list[Part]
    ) -> tuple[list[Tensor], Contribution]:
        """Returns M B for each matrix M of `x` and its B in `bases`: `(matrices, n, rank)`. One all-reduce sums over
        ranks.

        The parts in `whole` are sent in the same all-reduce and written into `x`. The second result is this rank's own
        (M B) B^T, with M B as sent. Factors are sent in the bucket's dtype; arithmetic is at least fp32.
        """
        tail = torch.cat([x[:0], *(x[part.start : part.stop] for part in whole)])
        sizes = [len(s.parts) * s.n * self.rank for s in stacks]
        flat = x.new_empty(sum(sizes) + tail.numel())

        def views(of: Tensor) -> tuple[list[Tensor], Tensor]:
            *found, rest = of.split([*sizes, tail.numel()])
            return [f.view(len(s.parts), s.n, self.rank) for f, s in zip(found, stacks, strict=True)], rest

        found, rest = views(flat)
        rest.copy_(tail)
        for stack, base, f in zip(stacks, bases, found, strict=True):
            multiply(stack.matrices(x), base, f)
        sent = flat.to(bucket.data.dtype)
        flat.copy_(sent)
        own = Contribution(stacks, bases, *views(flat.clone()), whole, sent.dtype)
        flat.copy_(await rank.all_reduce(sent, "sum", bucket.name))
        scatter(x, whole, rest)
        own.sums = [*found, rest]
        return found, own


class Contribution:
    """One rank's contribution: F B^T for each matrix, and the elements sent whole.

    sums: the contributions of all ranks, as factors and elements
    """

    def __init__(
        self,
        stacks: list[Stack],
        bases: list[Tensor],
        found: list[Tensor],
        rest: Tensor,
        whole: list[Part],
        wire: torch.dtype,
    ) -> None:
        self.stacks, self.bases, self.found = stacks, bases, found
        self.whole, self.rest, self.wire = whole, rest, wire
        self.sums: list[Tensor] = []

    def finite(self) -> bool:
        """Infinities and NaNs appear in the factors. Small factors and unit columns have finite products."""
        if self.wire.itemsize < 4:
            return False
        factors = [t for t in (*self.found, *self.sums, self.rest) if t.numel()]
        return bool(torch.stack([t.abs().amax() for t in factors]).amax() < MAX_MAGNITUDE)

    def written(self, like: Tensor) -> Tensor:
        """(n,) in the dtype that was sent."""
        own = torch.empty_like(like, dtype=self.rest.dtype)
        for stack, base, f in zip(self.stacks, self.bases, self.found, strict=True):
            multiply(f, base.mT, stack.matrices(own))
        scatter(own, self.whole, self.rest)
        return own.to(self.wire)

    def leave(self, x: Tensor) -> None:
        """Subtracts it from `x`; materialises it only if the dtype needs rounding."""
        if self.wire != x.dtype:
            x.sub_(self.written(x))
            return
        for stack, base, f in zip(self.stacks, self.bases, self.found, strict=True):
            for m, one, b in zip(stack.matrices(x), f, base, strict=True):
                m.addmm_(one, b.T, alpha=-1)
        start = 0
        for part in self.whole:
            stop = start + part.stop - part.start
            x[part.start : part.stop].sub_(self.rest[start:stop])
            start = stop


class Stack(NamedTuple):
    """The matrices of one shape in one bucket, n x m as seen here. turned: they are transposes."""

    n: int
    m: int
    turned: bool
    parts: list[Part]

    @property
    def other(self) -> Stack:
        """The same matrices, transposed."""
        return Stack(self.m, self.n, not self.turned, self.parts)

    def matrices(self, x: Tensor) -> list[Tensor]:
        """Views (n, m) of the flat bucket."""
        if self.turned:
            return [x[part.start : part.stop].view(self.m, self.n).T for part in self.parts]
        return [x[part.start : part.stop].view(self.n, self.m) for part in self.parts]


def matrix(part: Part) -> tuple[int, int]:
    """Returns the sides of a parameter as a matrix. A vector gives `(n, 1)`."""
    n = part.shape[0] if part.shape else 1
    return n, (part.stop - part.start) // max(n, 1)


def scatter(x: Tensor, parts: list[Part], values: Tensor) -> None:
    """Writes the joined values of `parts` back to their places in `x`."""
    start = 0
    for part in parts:
        x[part.start : part.stop] = values[start : (start := start + part.stop - part.start)]


def multiply(xs: Iterable[Tensor], ys: Iterable[Tensor], outs: Iterable[Tensor]) -> None:
    """Multiplies matrices pair by pair. Writes into `outs`, because copies of large ones are slow."""
    for x, y, out in zip(xs, ys, outs, strict=True):
        torch.mm(x, y, out=out)


def orthonormal(a: Tensor) -> Tensor:
    """Returns orthonormal columns with the same span: `(..., n, r)`. A zero `a` works; NaN only if `a` has NaN."""
    q: Tensor = torch.linalg.qr(a).Q
    return q


def random_directions(like: Tensor, r: int) -> Tensor:
    """Returns `(m, r)` of N(0, 1) for a matrix `(n, m)`. Always the same, and equal on all ranks."""
    return _random("directions", like.shape[1], r).to(like)


def _random(seed: str, m: int, r: int) -> Tensor:
    """Returns `(m, r)` of N(0, 1), equal on all ranks without communication."""
    generator = torch.Generator().manual_seed(zlib.crc32(seed.encode()))
    return torch.randn(r, m, generator=generator).T
