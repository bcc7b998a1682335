"""No compression: sends the bucket itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from workbench.compressors._base import Coder, Compressor, Payload
from workbench.rank import COMPLEX, FLOATS, Bucket, Memory, Rank

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Dense(Compressor):
    """No compression: sends every element in the bucket's own dtype.

    Bytes sent per rank: 2 (p-1)/p * 4 n for n fp32 elements (ring all-reduce). Other compressors are compared to it.

    When to use it: first, and as long as no step waits for the network. In docs/project/compression.md no compressor
    clearly reached the loss faster, without a limit or at 1 Gbit/s.
    """

    dtypes: ClassVar[tuple[str, ...]] = FLOATS + COMPLEX
    linear: ClassVar[bool] = True
    unbiased: ClassVar[bool] = True
    immediate: ClassVar[bool] = True
    kind: ClassVar[str] = "none"
    starter: ClassVar[bool] = True

    @property
    def lossless(self) -> bool:
        return True

    def coder(self, memory: Memory) -> Coder:
        return _AsItIs()

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> None:
        await rank.all_reduce(bucket.data, "sum", bucket.name)


class _AsItIs:
    """Keeps every element in its own dtype."""

    def encode(self, x: Tensor) -> Payload:
        return (x,)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return payload[0].to(like.dtype)
