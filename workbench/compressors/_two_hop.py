"""Sums of codes that cannot be added: every rank adds up one chunk, codes it again and hands it round."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.knobs import knob
from workbench.ops import Bucket, Memory, Rank


@dataclass(frozen=True, kw_only=True)
class Coded(Compressor):
    """A compressor whose codes take two hops: to the rank that adds up their chunk, and from there to all.

        rank i:  code of its chunk j -> rank j;     rank j:  total_j = sum of what came;  code of total_j -> all

    A bucket of n elements is cut into p chunks of m = ceil(n / p), and these into k = ceil(m / block) blocks of equal
    length; what is missing at the end repeats the last element. Everybody, the owner too, takes what the codes
    say, so all ranks hold the same bits. A message is a chunk's scales (float32), then its codes, packed.

    The error of the second coding belongs to nobody's data. The owner counts it as its own: then what ranks contribute
    adds up to the result, and under ErrorFeedback the residual holds the errors of both hops.
    """

    block: int = knob(0, choices=(0, 64, 256, 1024), unit="elements", doc="elements with a scale in common; 0: a chunk")

    scalars: ClassVar[int]  # numbers that travel with each block's codes

    @property
    @abstractmethod
    def width(self) -> int:
        """Bits of a code: 1, 2, 4 or 8."""

    @abstractmethod
    def quantise(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        """(rows, blocks, n) float32 -> codes (rows, blocks, n) uint8, scales (rows, blocks, scalars) float32."""

    @abstractmethod
    def restore(self, codes: Tensor, scales: Tensor, memory: Memory) -> Tensor:
        """The way back."""

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
        own[rank.index] += out[rank.index] - total
        bucket.data.copy_(out.view(-1)[:n])
        return own.view(-1)[:n].to(bucket.data.dtype)

    def _chunks(self, x: Tensor, size: int) -> Tensor:
        """(n,) -> (size, blocks, elements of a block)."""
        m = -(-x.numel() // size)
        blocks = -(-m // (self.block or m))
        rest = size * blocks * -(-m // blocks) - x.numel()
        return torch.cat([x, x[-1:].expand(rest)]).view(size, blocks, -1)

    def _message(self, x: Tensor, memory: Memory) -> Tensor:
        """(rows, blocks, n) -> (rows, bytes) uint8."""
        codes, scales = self.quantise(x, memory)
        rows = len(x)
        return torch.cat([scales.reshape(rows, -1).view(torch.uint8), packed(codes.view(rows, -1), self.width)], 1)

    def _opened(self, message: Tensor, like: Tensor, memory: Memory) -> Tensor:
        """(rows, bytes) uint8 -> (rows, blocks, n) float32."""
        _, blocks, n = like.shape
        head = 4 * blocks * self.scalars
        scales = message[:, :head].reshape(-1).view(torch.float32).view(len(message), blocks, -1)
        codes = unpacked(message[:, head:], self.width, blocks * n)
        return self.restore(codes.view(len(message), blocks, n), scales, memory)


def packed(codes: Tensor, width: int) -> Tensor:
    """(rows, n) uint8 codes of `width` bits -> (rows, ceil(n width / 8)): those that lie a plane apart share a byte."""
    share = 8 // width
    if share == 1:
        return codes
    rows, n = codes.shape
    planes = torch.nn.functional.pad(codes, (0, -n % share)).view(rows, share, -1)
    out = planes[:, 0].clone()
    for j in range(1, share):
        out |= planes[:, j] << (width * j)
    return out


def unpacked(data: Tensor, width: int, n: int) -> Tensor:
    """The first n codes of each row that `packed` made: (rows, n)."""
    share = 8 // width
    if share == 1:
        return data.contiguous()
    planes = [(data >> (width * j)) & (2**width - 1) for j in range(share)]
    return torch.cat(planes, 1)[:, :n].contiguous()
