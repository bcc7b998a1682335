"""The contract of a compressor, which sums buckets over ranks in fewer bytes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, ClassVar, Protocol

from workbench.rank import FLOATS, Bucket, Memory, Part, Rank, each
from workbench.settings import Family

if TYPE_CHECKING:
    from torch import Tensor

Payload = tuple["Tensor", ...]


class Coder(Protocol):
    """Encodes and decodes any tensor: a gradient, an activation, a message to a server, a fragment.

    Payloads compose: another coder can encode the floats of a payload again.
    """

    def encode(self, x: Tensor) -> Payload:
        """(...) of any float -> the tensors to send. Their number and sizes follow from the shape."""

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """The payload of `encode` -> (...) in the shape and the dtype of `like`, approximately the input."""


class Owed(Protocol):
    """A rank's contribution that is not materialised, because subtracting it is faster."""

    def leave(self, x: Tensor) -> None:
        """Subtracts the contribution from `x`, in place."""

    def finite(self) -> bool:
        """Whether the input and the result are certainly finite, judged from fewer than all elements."""


@dataclass(frozen=True, kw_only=True)
class Compressor(Family):
    """Sums a bucket over all ranks, usually approximately and in fewer bytes.

    `reduce` replaces the bucket's data by (an approximation of) its sum over all ranks, in place. It returns this
    rank's own contribution to that sum, or None if that is exactly its data. A strategy that wants the mean passes
    shares (data / size), which costs nothing because it scales the loss.

    dtypes:      element types of the gradients that it takes; hosts refuse models with other types
    linear:      the sum of compressed equals the compressed sum, so an all-reduce can add payloads
    unbiased:    the expected result is the input
    contraction: ||x - C(x)||^2 <= (1 - delta) ||x||^2 for some delta > 0; wants error feedback
    immediate:   `reduce` is one sum of the unchanged bucket. It needs no thread, so a strategy may exchange in its
                 own way
    varies:      the number of sent bytes depends on the values. With sizes only, `rank.density` is the assumed share,
                 and bytes are estimates
    assumes:     the assumption that replaces the values with sizes only, as text; "" if none
    alike:       whether all ranks send and receive alike, so that one may represent thousands
    residual:    the buffer of its Memory for the unsent part; "" if it has none
    kind:        one of `kinds`, which group a list of compressors. "wrappers" hold another compressor
    drops:       parts of its Memory that restart when ranks hold another part of the model (see `own`)
    starter:     one of the few to begin with: well known, and good on its own

    `strays` follows from the knobs. Under error feedback the unsent part shrinks by this factor in each step, in some
    norm and on average. So it is bounded if the factor is below 1.

    Its methods take these arguments:

    rank:    this rank with its verbs
    bucket:  the bucket to sum, `data` `(n,)`
    memory:  its Memory on this rank, kept between steps
    parts:   the model's parameters in order, each with its name and shape
    """

    home: ClassVar[str] = "workbench.compressors"
    renamed: ClassVar[dict[str, str]] = {"owes": "residual"}
    dtypes: ClassVar[tuple[str, ...]] = FLOATS
    linear: ClassVar[bool] = False
    unbiased: ClassVar[bool] = False
    contraction: ClassVar[bool] = False
    immediate: ClassVar[bool] = False
    varies: ClassVar[bool] = False
    assumes: ClassVar[str] = ""
    alike: ClassVar[bool] = True
    residual: ClassVar[str] = ""
    kinds: ClassVar[tuple[str, ...]] = ("none", "casts", "quantised", "sparse", "low rank", "wrappers")
    kind: ClassVar[str] = ""
    starter: ClassVar[bool] = False
    drops: ClassVar[tuple[str, ...]] = ()

    @property
    def carries(self) -> bool:
        """Whether its Memory keeps the momentum (MOMENTUM), so that the optimizer steps without momentum."""
        return False

    @property
    def own(self) -> dict[str, str]:
        """How each part of a rank's Memory changes when ranks hold another part of the model.

        "sum": the ranks' values add up to one sum, which stays the same. A rank that gives up an element adds its part
        to that of a rank that holds it. A new holder begins at zero. "mean": the ranks hold shares of one value. All
        take the mean, in shares of the new number of ranks. "keep": belongs to the rank and stays. "drop": becomes
        meaningless and restarts, as do unlisted parts.
        """
        named = {self.residual: "sum"} if self.residual else {}
        return named | {"generator": "keep"} | dict.fromkeys(self.drops, "drop")

    @property
    def lossless(self) -> bool:
        """Whether the result is the exact sum of the inputs, up to rounding. A wrapper asks each compressor in it."""
        held = [c for c in inside(self) if c is not self]
        return bool(held) and all(c.lossless for c in held)

    @property
    def strays(self) -> float | None:
        """The largest distance of C(x) from x: E ||C(x) - x|| <= strays ||x|| for every x; None without a bound."""
        return None

    def whole(self) -> Compressor:
        """Returns the compressor that sends its `residual` in one step, with that step's data; else itself."""
        return self

    @abstractmethod
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        """Writes the sum over ranks into `bucket.data`; returns this rank's own contribution (None: all of it).

        `(n,)`, in the dtype of the bucket or a wider one.
        """

    def coder(self, memory: Memory) -> Coder | None:
        """Returns its Coder for any tensor, with generator and levels of `memory`. None if it needs other ranks."""
        return None

    def refuses(self) -> str | None:
        """Returns why these knobs conflict and a remedy, or None."""
        return None

    def refuses_feedback(self) -> str | None:
        """Returns why error feedback is impossible and a remedy, or None."""
        return None

    async def reduce_owing(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | Owed | None:
        """Like `reduce`, for a caller that only subtracts the contribution: it may return an `Owed`."""
        return await self.reduce(rank, bucket, memory)

    def refuses_model(self, parts: list[Part]) -> str | None:
        """Returns why it cannot compress gradients of these parameters and a remedy, or None."""
        return None


def inside(compressor: Compressor) -> Iterator[Compressor]:
    """Yields `compressor` and every compressor in it, from the outside in."""
    yield compressor
    for f in fields(compressor):
        value = getattr(compressor, f.name)
        if isinstance(value, Compressor):
            yield from inside(value)


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """A compressor of 2 pure functions, its Coder. They define the exchange.

    x:        the tensor to encode, of any shape
    payload:  the tensors that `encode` returned
    like:     a tensor with the shape, dtype and device of the result
    chosen:   the part of a payload that selects elements
    """

    @abstractmethod
    def encode(self, x: Tensor) -> Payload:
        """Returns the tensors to send for `x`. Their shapes depend only on the shape of `x`."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """Returns the tensor that a payload stands for, in the shape and the dtype of `like`."""

    def chosen(self, payload: Payload) -> Tensor | None:
        """Returns the part of a payload that selects elements, such as places. None if it covers the whole tensor."""
        return None

    def through(self, chosen: Tensor) -> Coder:
        """Returns the linear coder that keeps the same part of a tensor; a gradient goes back through it.

        By default: chosen (k,) of any integer are flat places.
        """
        return _Places(chosen)

    def coder(self, memory: Memory) -> Coder:
        return self

    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        if not self.linear:
            return await all_told(self, rank, bucket)
        payload = self.encode(bucket.data)
        own = self.decode(payload, bucket.data).clone()
        if rank.size > 1:
            payload = tuple([await rank.all_reduce(part, "sum", bucket.name) for part in payload])
        bucket.data.copy_(self.decode(payload, bucket.data))
        return own


class _Places:
    """Keeps a tensor's elements at some places; the rest become zeros."""

    def __init__(self, places: Tensor) -> None:
        self._places = places.long()

    def encode(self, x: Tensor) -> Payload:
        return (x.reshape(-1)[self._places],)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return like.new_zeros(like.numel()).index_copy_(0, self._places, payload[0]).view(like.shape)


async def all_told(coder: Coder, rank: Rank, bucket: Bucket) -> Tensor:
    """`reduce` with any Coder: every rank sends its payload to all ranks and adds up the decoded ones in rank order.

    Adds in fp32 at least, so that numbers in 16 bits are rounded once. Bytes sent per rank: those of a payload, (p-1)
    times.
    """
    from workbench.compressors._range import deliver, wide  # not at the top: a record opens without torch

    payload = coder.encode(bucket.data)
    own = coder.decode(payload, bucket.data)
    if rank.size == 1:
        bucket.data.copy_(own)
        return own
    rows = [each(await rank.all_gather(part, bucket.name)) for part in payload]
    x = bucket.data
    total = x.zero_() if wide(x.dtype) == x.dtype else x.new_zeros(x.shape, dtype=wide(x.dtype))
    for one in zip(*rows, strict=True):
        total.add_(coder.decode(one, x))
    return deliver(total, x, own, rank.size)
