"""The whole contract of an all-reduce's algorithm: what one rank sends and receives, and how long all of it takes."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.settings import Family

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.fabric.link import Fabric
    from workbench.rank import Group


class Among:
    """One rank among those of an all-reduce, as an algorithm sees it: it sends, and takes or adds what others send.

    ranks:       their numbers in the run, in order
    index, size: which of them this is, and how many there are
    op:          what becomes of two tensors: "sum", "max" or "min"
    """

    def __init__(self, rank: Any, ranks: Sequence[int], op: str, name: str) -> None:
        self.rank, self.ranks, self.op, self.name = rank, ranks, op, name
        self.index, self.size = ranks.index(rank.id), len(ranks)

    def few(self, ranks: Sequence[int], name: str) -> Among:
        """This rank among some of them. Their messages bear a name of their own."""
        return Among(self.rank, ranks, self.op, f"{self.name} {name}")

    async def send(self, x: Tensor, to: int) -> None:
        """Posts a copy of `x` and goes on at once."""
        await self.rank.send(x, self.ranks[to], self.name)

    async def take(self, x: Tensor, source: int) -> None:
        """`x` becomes what rank `source` has sent."""
        x.copy_((await self._next(x, source)).view(x.shape))

    async def add(self, x: Tensor, source: int) -> None:
        """`x` becomes the sum (or the larger, or the smaller) of itself and what rank `source` has sent."""
        came = (await self._next(x, source)).view(x.shape)
        match self.op:
            case "sum":
                x.add_(came)
            case "max":
                x.copy_(x.maximum(came))
            case "min":
                x.copy_(x.minimum(came))

    async def _next(self, like: Tensor, source: int) -> Tensor:
        got = await self.rank.recv(None, self.ranks[source], self.name)
        if got is None:
            raise ConnectionError(f"rank {self.ranks[source]} left in the middle of {self.name}")
        data: Tensor = got[0]
        return data


@dataclass(frozen=True, kw_only=True)
class Algorithm(Family):
    """How an all-reduce goes. Every rank ends with the same bits, whatever their messages' order was.

    Times are those of messages on ports that send one and take in one at a time (full duplex), each of which takes
    alpha + n beta: the Link's latency, and the time of n bytes at its bandwidth. A byte that is added takes gamma.

    native: is it the backend's own way, of which nothing is asked here?
    """

    home: ClassVar[str] = "workbench.fabric.algorithms"
    native: ClassVar[bool] = False

    @abstractmethod
    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        """What one rank does: `x` (n,) of any dtype becomes its sum over all ranks, in place."""

    @abstractmethod
    def seconds(self, fabric: Fabric, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        """What `nbytes` among `ranks`, which all begin now, take if ports are free; gamma: seconds a byte."""

    def chosen(self, fabric: Fabric, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        """The one that sums `nbytes` among `ranks` (group: None where these are all of the run); the same on each."""
        return self

    def refuses(self) -> str | None:
        """Why these knobs cannot be together, in a sentence that says what would do; or None."""
        return None


def sharing(fabric: Fabric, count: int) -> Fabric:
    """`fabric` as messages between a few of `count` ranks find it that all send: of a bus each has an equal share."""
    if not fabric.shared:
        return fabric
    link = replace(fabric.link, bandwidth=fabric.link.bandwidth / count)
    return replace(fabric, link=link, between_bandwidth=fabric.between_bandwidth / count, shared=False)


def alpha_beta(fabric: Fabric, ranks: Sequence[int]) -> tuple[float, float]:
    """Seconds of a message and of each of its bytes among `ranks`, in the order of their numbers; without jitter."""
    link = fabric.path(ranks)
    return link.seconds(0, 1), link.seconds(len(ranks) if fabric.shared else 1, 0)
