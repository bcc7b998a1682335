"""Sums codes that cannot be added: each rank adds up one chunk for all ranks."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Coder, Compressor, Payload
from workbench.compressors._pack import packed, unpacked
from workbench.compressors._range import deliver, wide, within
from workbench.rank import Bucket, Memory, Rank, each, outlined, sizes_of
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Coded(Compressor):
    """Sends codes in 2 hops: to the rank that adds up their chunk, and from there to all ranks.

        rank i:  code of its chunk j -> rank j;     rank j:  total_j = sum of what came;  code of total_j -> all

    A bucket of n elements is cut into p chunks of m = ceil(n / p). A chunk is cut into k = ceil(m / block) blocks of
    equal length. The end is padded with the last element or with zeros. Every rank uses the decoded values, also the
    owner, so results are bit-identical. A message is a chunk's scales (float32), then its packed codes.

    The owner of a chunk counts the second hop's error as its own. So the ranks' contributions add up to the result, and
    under ErrorFeedback the residual holds the errors of both hops. Sums are in float32. In a bucket of a narrower type
    finite values are clamped to the type's range. The owner counts that error, too.
    """

    block: int = knob(
        0, choices=(0, 64, 256, 1024), unit="elements", doc="elements that share a scale; 0: a whole chunk"
    )

    scalars: ClassVar[int]  # numbers per block that are sent with its codes
    repeats: ClassVar[bool] = True  # whether padding repeats the last element or is zero
    kind: ClassVar[str] = "quantised"

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits of a code: 1 to 8."""

    @abstractmethod
    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """Returns codes `(rows, blocks, n)` uint8 and scales `(rows, blocks, scalars)` for `(rows, blocks, n)`."""

    @abstractmethod
    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        """The inverse of `quantise`, up to rounding."""

    def coder(self, memory: Memory) -> Coder:
        return _Blocks(self, memory)

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        n = bucket.data.numel()
        if not n:
            return None
        x = self._chunks(bucket.data.float(), rank.size)
        sent = self._message(x, memory)
        own = self._opened(sent, x, memory)
        came = await rank.all_to_all(sent, bucket.name)
        total = self._opened(came, x, memory).sum(0)
        every = await rank.all_gather(self._message(total[None], memory)[0], bucket.name)
        out = self._opened(every, x, memory)
        flat = out.view(-1)[:n]
        bucket.data.copy_(within(flat, bucket.data.dtype))
        if bucket.data.element_size() < 4:
            flat.copy_(bucket.data)
        own[rank.index] += out[rank.index] - total
        return own.view(-1)[:n].to(wide(bucket.data.dtype))

    async def gathered(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        """One hop: every rank sends its whole bucket's codes to all ranks, which add up in rank order."""
        n = bucket.data.numel()
        if not n:
            return None
        x = self._chunks(bucket.data.float(), 1)
        every = await rank.all_gather(self._message(x, memory)[0], bucket.name)
        own, total = x, torch.zeros_like(x)
        for j, row in enumerate(each(every)):
            one = self._opened(row[None], x, memory)
            total += one
            own = one if j == rank.index else own
        return deliver(total.view(-1)[:n], bucket.data, own.view(-1)[:n], rank.size)

    def _chunks(self, x: Tensor, size: int) -> Tensor:
        """Cuts `(n,)` into `(size, blocks, elements of a block)`."""
        m = -(-x.numel() // size)
        blocks = -(-m // (self.block or m))
        rest = size * blocks * -(-m // blocks) - x.numel()
        end = x[-1:] if self.repeats else x.new_zeros(1)
        return torch.cat([x, end.expand(rest)]).view(size, blocks, -1)

    def _message(self, x: Tensor, memory: Memory) -> Tensor:
        codes, scales = self.quantise(x, memory)
        rows = len(x)
        return torch.cat([scales.reshape(rows, -1).view(torch.uint8), packed(codes.view(rows, -1), self.width)], 1)

    def _opened(self, message: Tensor, like: Tensor, memory: Memory) -> Tensor:
        _, blocks, n = like.shape
        head = 4 * blocks * self.scalars
        scales = message[:, :head].reshape(-1).clone().view(torch.float32).view(len(message), blocks, -1)
        codes = unpacked(message[:, head:], self.width, blocks * n)
        return self.restore(codes.view(len(message), blocks, n), scales, memory)


class _Blocks:
    """The Coder of a Coded: one message, of one chunk."""

    def __init__(self, of: Coded, memory: Memory) -> None:
        self._of, self._memory = of, memory

    def _sized(self, x: Tensor) -> Payload:
        if not (n := x.numel()):
            return (x.new_empty(0, dtype=torch.uint8),)
        blocks = -(-n // (self._of.block or n))
        codes = -(-blocks * -(-n // blocks) * self._of.width // 8)
        return (x.new_empty(4 * blocks * self._of.scalars + codes, dtype=torch.uint8),)

    @outlined(_sized)
    def encode(self, x: Tensor) -> Payload:
        if not x.numel():
            return (x.new_empty(0, dtype=torch.uint8),)
        return (self._of._message(self._of._chunks(x.reshape(-1).float(), 1), self._memory)[0],)

    @outlined(lambda self, payload, like: like.new_empty(like.shape))
    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        if not like.numel():
            return like.clone()
        shape = self._of._chunks(sizes_of(like).reshape(-1), 1)
        out = self._of._opened(payload[0][None], shape, self._memory)
        return within(out.view(-1)[: like.numel()], like.dtype).view(like.shape)
