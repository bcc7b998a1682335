"""The whole contract of a compressor: what crosses the wire instead of a bucket."""

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
    """Any tensor as what crosses the wire, and back: a gradient, an activation, a message to a server, a fragment.

    Payloads compose: what one coder leaves in floats another can encode again.
    """

    def encode(self, x: Tensor) -> Payload:
        """(...) of any float -> the tensors that cross the wire; how many and how large follows from the shape."""

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """What `encode` made -> (...) in the shape and the dtype of `like`, about what it was."""


class Owed(Protocol):
    """What a rank contributed, not written out: making it would take longer than taking it away."""

    def leave(self, x: Tensor) -> None:
        """Takes what was contributed away from `x`, in place."""

    def finite(self) -> bool:
        """Is it certain, from less than all elements, that what came in and the result are finite?"""


@dataclass(frozen=True, kw_only=True)
class Compressor(Family):
    """What crosses the wire instead of a bucket.

    `reduce` turns the bucket's data into (an approximation of) its sum over all ranks, in place, and
    returns what this rank itself contributed to that sum, or None if that is exactly its data. A strategy
    that wants the mean hands in shares (data / size), which costs nothing: it scales the loss.

    dtypes:      element types of the gradients that it takes; hosts refuse a model with others
    linear:      the sum of compressed equals the compressed sum, so an all-reduce can add payloads
    unbiased:    the expected result is the input
    contraction: ||x - C(x)||^2 <= (1 - delta) ||x||^2 for some delta > 0; wants error feedback
    immediate:   `reduce` is one sum of the bucket as it is: no thread of its own is worth its while, and a strategy
                 with a way of its own to exchange leaves nothing out
    varies:      how much is sent depends on the values; where there are sizes only, `rank.density` is taken for the
                 share that is, and what is sent is an estimate
    assumes:     what is taken for what the values would decide where there are sizes only, in words; "" if nothing is
    alike:       do all ranks send and receive alike? Then one may stand for others among thousands
    residual:    the buffer of its Memory that holds what it has not sent yet; "" where it remembers nothing
    kind:        one of `kinds`, by which a list of compressors is grouped; what holds another is a wrapper
    drops:       what of its Memory begins anew where ranks come to hold another part of the model (see `own`)
    starter:     one of the few to begin with: well known, and good on its own

    `strays` is a number that follows from the knobs: under error feedback what is left unsent shrinks by that factor
    in each step, in some norm and on average, so it stays bounded where the factor is below 1.
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
        """Does it keep the optimizer's momentum, in its Memory's MOMENTUM, so that the optimizer steps without?"""
        return False

    @property
    def own(self) -> dict[str, str]:
        """What becomes of all that a rank remembers in its Memory where ranks come to hold another part of the model.

        "sum": it is a part of what all ranks have together, so that stays what it was: who holds an element no longer
        adds its part to that of one who does, who newly does begins at zero. "mean": of one value in shares all take
        the mean, in shares of as many as there are then. "keep": the rank's and not the model's, it stays. "drop": it
        means nothing afterwards and begins anew, as what is not named does.
        """
        named = {self.residual: "sum"} if self.residual else {}
        return named | {"generator": "keep"} | dict.fromkeys(self.drops, "drop")

    @property
    def lossless(self) -> bool:
        """Is the result the sum of all that was handed in, as exact as additions are? If all that it holds says so."""
        held = [c for c in inside(self) if c is not self]
        return bool(held) and all(c.lossless for c in held)

    @property
    def strays(self) -> float | None:
        """How far C(x) is from x at most, E ||C(x) - x|| <= strays ||x|| for every x; None where nothing is claimed."""
        return None

    def whole(self) -> Compressor:
        """Where it `residual`: what sends all of it in one step, with that step's data, and then owes nothing."""
        return self

    @abstractmethod
    async def reduce(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | None:
        """The sum over ranks into `bucket.data`; returns this rank's own contribution (None: all of it)."""

    def coder(self, memory: Memory) -> Coder | None:
        """What it makes of any tensor, with the generator and levels of `memory`; None where that takes other ranks."""
        return None

    def refuses(self) -> str | None:
        """Why these knobs cannot be together, in a sentence that says what would do; or None."""
        return None

    def refuses_feedback(self) -> str | None:
        """Why its error cannot be fed back, in a sentence that says what would do; or None."""
        return None

    async def reduce_owing(self, rank: Rank, bucket: Bucket, memory: Memory) -> Tensor | Owed | None:
        """As `reduce`, for one who wants only what is left of the data: a contribution may say how to take it away."""
        return await self.reduce(rank, bucket, memory)

    def refuses_model(self, parts: list[Part]) -> str | None:
        """Why it cannot work on gradients of these parameters, in a sentence that says what would do; or None."""
        return None


def inside(compressor: Compressor) -> Iterator[Compressor]:
    """`compressor`, and all that it wraps or chooses among, from the outside in."""
    yield compressor
    for f in fields(compressor):
        value = getattr(compressor, f.name)
        if isinstance(value, Compressor):
            yield from inside(value)


@dataclass(frozen=True, kw_only=True)
class Codec(Compressor):
    """A compressor given by a pair of pure functions, which are its Coder; the exchange follows from them."""

    @abstractmethod
    def encode(self, x: Tensor) -> Payload:
        """(...) -> the tensors that cross the wire; their shapes depend only on the shape of `x`."""

    @abstractmethod
    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        """The tensors of `encode` -> (...) in the shape and the dtype of `like`."""

    def chosen(self, payload: Payload) -> Tensor | None:
        """What of a payload says which part of a tensor it is of, such as places; None where it is of all."""
        return None

    def through(self, chosen: Tensor) -> Coder:
        """What is linear in a tensor and keeps the same part of it: by which a gradient goes back.

        By itself: chosen (k,) of any integer are flat places.
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
    """A tensor's elements at some places, zeros elsewhere."""

    def __init__(self, places: Tensor) -> None:
        self._places = places.long()

    def encode(self, x: Tensor) -> Payload:
        return (x.reshape(-1)[self._places],)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return like.new_zeros(like.numel()).index_copy_(0, self._places, payload[0]).view(like.shape)


async def all_told(coder: Coder, rank: Rank, bucket: Bucket) -> Tensor:
    """Every rank's payload to all, who add up what it says in rank order: `reduce` by any Coder.

    Bytes sent per rank: those of a payload, (p-1) times.
    """
    payload = coder.encode(bucket.data)
    own = coder.decode(payload, bucket.data)
    if rank.size == 1:
        bucket.data.copy_(own)
        return own
    rows = [each(await rank.all_gather(part, bucket.name)) for part in payload]
    bucket.data.zero_()
    for one in zip(*rows, strict=True):
        bucket.data.add_(coder.decode(one, bucket.data))
    return own
