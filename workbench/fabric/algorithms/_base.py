"""The interface of an all-reduce algorithm: one rank's messages, and the total duration."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from workbench.settings import Family

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.fabric.link import Link
    from workbench.rank import Group


class FabricView(Protocol):
    """The emulated network, as an algorithm sees it: the costs of paths and the sites. `Fabric` implements it."""

    @property
    def site(self) -> int: ...
    @property
    def shared(self) -> bool: ...
    def __hash__(self) -> int: ...

    def crosses(self, ranks: Sequence[int]) -> bool:
        """Whether `ranks` (ascending) are on several sites."""

    def path(self, ranks: Sequence[int]) -> Link:
        """Returns the Link for traffic among `ranks` (ascending)."""

    def split_port(self, size: int) -> FabricView:
        """Returns the fabric with `size` separate ports in place of a shared one, `size` times as slow."""

    def measured(self, latency: float, bandwidth: float) -> FabricView:
        """Returns this fabric with a Link of this latency (ms) and bandwidth (Mbit/s); 0: unchanged."""


class Among:
    """One rank in an all-reduce: it sends tensors, and copies or adds received ones.

    ranks:       their numbers in the run, in order
    index, size: this rank's place in `ranks` and their number
    op:          how to combine 2 tensors: "sum", "max" or "min"
    """

    def __init__(self, rank: Any, ranks: Sequence[int], op: str, name: str) -> None:
        self.rank, self.ranks, self.op, self.name = rank, ranks, op, name
        self.index, self.size = ranks.index(rank.id), len(ranks)

    def few(self, ranks: Sequence[int], name: str) -> Among:
        """Returns this rank among some of the ranks, with message names of their own."""
        return Among(self.rank, ranks, self.op, f"{self.name} {name}")

    async def send(self, x: Tensor, to: int) -> None:
        """Posts a copy of `x` and returns at once."""
        await self.rank.send(x, self.ranks[to], self.name)

    async def take(self, x: Tensor, source: int) -> None:
        """Replaces `x` by the next tensor from rank `source`."""
        x.copy_((await self._next(x, source)).view(x.shape))

    async def add(self, x: Tensor, source: int) -> None:
        """Adds the next tensor from rank `source` to `x`, or takes the larger or smaller elements."""
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
    """The way in which ranks perform an all-reduce. Every rank gets the same bits in any order of messages.

    Times assume full-duplex ports that send one message and receive one at a time. A message takes alpha + n beta: the
    Link's latency plus the time of n bytes at its bandwidth. Adding a byte takes gamma.

    native: whether the backend itself performs it. The host then does not call `all_reduce`
    fabric: the emulated network
    ranks:  numbers of ranks in the run, in ascending order
    nbytes: bytes of the vector on each rank
    """

    home: ClassVar[str] = "workbench.fabric.algorithms"
    native: ClassVar[bool] = False

    @abstractmethod
    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        """Performs one rank's part of the sum.

        rank:  this rank among the ranks that take part
        x:     `(n,)` of any dtype. The method replaces it in place by its sum over all ranks
        """

    @abstractmethod
    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        """Returns the duration in seconds for ranks that begin together on free ports.

        gamma:  seconds to add one byte
        """

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        """Returns the algorithm that performs this sum, the same on every rank.

        group:  None if `ranks` are all ranks of the run
        """
        return self

    def refuses(self) -> str | None:
        """Returns why these knobs do not fit together, with a remedy; or None."""
        return None


def alpha_beta(fabric: FabricView, ranks: Sequence[int]) -> tuple[float, float]:
    """Returns seconds per message and per byte among `ranks` (ascending), without jitter."""
    link = fabric.path(ranks)
    return link.seconds(0, 1), link.seconds(len(ranks) if fabric.shared else 1, 0)
