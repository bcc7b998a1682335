"""The messages of an all-reduce algorithm between ranks, by round. No rank sends them."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

from workbench.fabric.algorithms._base import Algorithm, Among
from workbench.fabric.fabric import Fabric
from workbench.settings import KnobError

ITEM = 4  # bytes of a float


class RoundMessage(NamedTuple):
    """A message of a round: part of the tensor, from one rank to another.

    start, stop: the part as fractions of the tensor, from 0 to 1
    adds:        whether the receiver adds it to its own part; otherwise it replaces its part
    """

    source: int
    to: int
    start: float
    stop: float
    adds: bool

    @property
    def share(self) -> float:
        """The part's size as a fraction of the tensor."""
        return self.stop - self.start


def list_rounds(
    algorithm: Algorithm, ranks: int, fabric: Fabric | None = None, nbytes: int = 1 << 20
) -> list[list[RoundMessage]]:
    """Returns the messages of each round of an all-reduce of `nbytes` bytes among `ranks` ranks.

    In a round, each rank sends at most 1 message and receives at most 1. A round is as long as its longest message.
    Runs the algorithm's own code. Raises KnobError for one without messages, such as Native.

    >>> from workbench.fabric.algorithms import Ring
    >>> [len(messages) for messages in list_rounds(Ring(), 3)]
    [3, 3, 3, 3]
    """
    every = tuple(range(ranks))
    chosen = algorithm.chosen(fabric or Fabric(), None, every, nbytes)
    name = type(chosen).__name__
    if reason := chosen.refuses():
        raise KnobError(reason)
    if chosen.native:
        raise KnobError(f"algorithm={name}(): the backend's algorithm shows no messages; take Ring()")
    size = max(nbytes // ITEM, ranks)
    network = _Network()
    todo = [chosen.all_reduce(Among(_Port(rank, network), every, "sum", "sum"), _Part(0, size)) for rank in every]  # type: ignore[arg-type]
    rounds: list[list[_Sent]] = []
    while todo := [one for one in todo if not _has_ended(one)]:
        if not (moved := network.move()):
            raise KnobError(f"algorithm={name}(): a rank waits for a message that no rank sends; correct all_reduce")
        rounds.append(moved)
    while moved := network.move():
        rounds.append(moved)
    return [[RoundMessage(m.source, m.to, m.start / size, m.stop / size, m.adds) for m in one] for one in rounds]


def _has_ended(coroutine: Any) -> bool:
    """Runs a rank until it waits for a message. Returns whether it has finished."""
    try:
        coroutine.send(None)
    except StopIteration:
        return True
    return False


@dataclass
class _Part:
    """Stands for elements `[start, stop)` of a tensor, without values."""

    start: int
    stop: int

    @property
    def shape(self) -> tuple[int]:
        return (self.stop - self.start,)

    def tensor_split(self, count: int) -> tuple[_Part, ...]:
        each, more = divmod(self.stop - self.start, count)
        ends = [self.start + k * each + min(k, more) for k in range(count + 1)]
        return tuple(_Part(a, b) for a, b in pairwise(ends))

    def add_(self, came: _Sent) -> None:
        came.adds = True

    def copy_(self, came: _Sent) -> None:
        came.adds = False


@dataclass
class _Sent:
    source: int
    to: int
    name: str
    start: int
    stop: int
    adds: bool = False

    def view(self, shape: Any) -> _Sent:
        return self


@dataclass
class _Network:
    """The messages that wait for their ports, and those that have arrived."""

    posted: list[_Sent] = field(default_factory=list)
    inbox: dict[tuple[int, int, str], deque[_Sent]] = field(default_factory=lambda: defaultdict(deque))

    def move(self) -> list[_Sent]:
        """Delivers the messages of 1 round, in the order in which ranks posted them."""
        sending: set[int] = set()
        receiving: set[int] = set()
        moved, later = [], []
        for message in self.posted:
            ready = message.source not in sending and message.to not in receiving
            sending.add(message.source)  # a port keeps the order of its messages
            if ready:
                receiving.add(message.to)
                moved.append(message)
                self.inbox[message.source, message.to, message.name].append(message)
            else:
                later.append(message)
        self.posted = later
        return moved


@dataclass
class _Port:
    """The part of a rank that an algorithm uses."""

    id: int
    network: _Network

    async def send(self, part: _Part, to: int, name: str) -> None:
        self.network.posted.append(_Sent(self.id, to, name, part.start, part.stop))

    async def recv(self, like: Any, source: int, name: str) -> tuple[_Sent]:
        return (await _Arrival(self.network.inbox[source, self.id, name]),)


@dataclass
class _Arrival:
    queue: deque[_Sent]

    def __await__(self) -> Generator[None, None, _Sent]:
        while not self.queue:
            yield
        return self.queue.popleft()
