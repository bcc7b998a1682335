"""Batches for one rank: drawn from the task's data and moved to the device."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.memory.memory import tensors
from workbench.rank import StrategyError
from workbench.tasks import Learner, TaskError
from workbench.tasks._chance import Chance as Chance
from workbench.tasks._chance import Numbers as Numbers
from workbench.tasks._chance import numbers as numbers

BOUNDARIES = 64  # at so many the count of examples is remembered


class Stand(NamedTuple):
    """Where one who reads stands: batches drawn since it began, and in this pass of the data; how many of them early.

    opened, began: random numbers when it began, and when this pass did; last: a hash of some of the last batch
    """

    total: int
    drawn: int
    early: int
    opened: Numbers | None
    began: Numbers | None
    last: int


def nbytes_of(batch: Any) -> int:
    """Bytes of a batch's tensors, wherever they are views of."""
    return sum(x.numel() * x.element_size() for x in tensors(batch))


class Batches:
    """What one rank learns from: read again from its beginning when it ends; running out is said in words."""

    def __init__(self, data: Callable[..., Iterable[Any]], rank: int, size: int, device: str,
                 indexed: bool = False) -> None:  # fmt: skip
        """data, indexed: as in workbench.tasks.Learner"""
        self._data, self._rank, self._size, self._device, self._indexed = data, rank, size, device, indexed
        self._source: Iterable[Any] = ()
        self._iterator: Iterator[Any] = iter(())
        self._drawn = 0
        self._total = 0  # with those of passes that are over
        self._last = 0  # a hash of some of the last batch
        self._opened: Numbers | None = None  # random numbers when the data was opened, and when this pass began
        self._pass_began: Numbers | None = None
        self.taken = 0  # by `next`, so far
        self.nbytes = 0  # of the last one's tensors
        self._early: deque[Any] = deque()  # drawn before their turn
        self._chance: Chance | None = None
        self._began = 0, 0, 0, 0  # the last restart's arguments
        self._used: dict[int, int] = {}  # by step, how many examples were used up before it
        self._client = 0, 1
        self._clients: dict[tuple[int, int], tuple[Any, ...]] = {}  # by client: where those stand who do not read now

    def share(self, rank: int, size: int, seed: int | None = None) -> None:
        """What is drawn from the next restart on is the data of `rank` of `size`.

        seed: of random numbers of its own, so that all who read the same data draw alike; None: the process's
        """
        self._rank, self._size = rank, size
        self._chance = None if seed is None else Chance(seed)

    def restart(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        """Draws from now on batches of `batch` examples, of data with an index those behind the `used` first.

        A later restart takes other examples than the first, where there is none.
        """
        self._began = batch, seed, step, used
        self._used = {at: n for at, n in self._used.items() if at < step}
        self._clients.clear()
        self._open()

    def client(self, index: int, count: int) -> None:
        """Draws from now on for client `index` of `count` on this rank, from where that one was; (0, 1) is the rank."""
        if not 0 <= index < count:
            raise StrategyError(f"client {index} of {count}: there are 0 to {count - 1}")
        if (index, count) == self._client:
            return
        self._set_aside()
        self._client = index, count
        if self._client in self._clients:
            (self._source, self._iterator, self._drawn, self._early, self._total, self._last,
             self._opened, self._pass_began) = self._clients.pop(self._client)  # fmt: skip
        else:
            self._open()

    def _set_aside(self) -> None:
        """Who reads now goes on from here when it reads again."""
        self._clients[self._client] = (self._source, self._iterator, self._drawn, self._early, self._total, self._last,
                                       self._opened, self._pass_began)  # fmt: skip

    def _open(self) -> None:
        batch, seed, step, used = self._began
        index, count = self._client
        order = (seed, used) if self._indexed else (seed + 7919 * step,)
        with self._chance or nullcontext():
            self._opened = self._pass_began = numbers()
            self._source = self._data(self._rank * count + index, self._size * count, batch, *order)
            self._iterator, self._drawn, self._total = iter(self._source), 0, 0
            self._early = deque()

    def next(self) -> Any:
        self.taken += 1
        batch = self._early.popleft() if self._early else self._draw()
        self.nbytes = nbytes_of(batch)
        return batch

    def coming(self, after: int) -> Any:
        """The batch that `next` gives after so many others."""
        while len(self._early) <= after:
            self._early.append(self._draw())
        return self._early[after]

    def _draw(self) -> Any:
        with self._chance or nullcontext():
            batch = self._next()
        self._last = marked(batch)
        return to_device(batch, self._device)

    def _next(self) -> Any:
        for batch in self._iterator:
            self._drawn, self._total = self._drawn + 1, self._total + 1
            return batch
        if not self._drawn:
            raise TaskError(f"the data of rank {self._rank} yields nothing: give every rank at least one batch")
        drawn, self._drawn = self._drawn, 0
        self._pass_began = numbers()
        self._iterator = iter(self._source)
        for batch in self._iterator:
            self._drawn, self._total = 1, self._total + 1
            return batch
        raise TaskError(
            f"the data of rank {self._rank} ran out after {drawn} batches and cannot start over: return something that "
            f"can be iterated again (a list, a DataLoader), or a generator that does not end"
        )

    # -- how much of the data's order is used up --

    @property
    def used(self) -> int:
        """How many examples, of all who read, as far as this rank knows: all have drawn as often as it has."""
        batch, _, _, used = self._began
        here = [(self._client, self._total, self._early)]
        here += [(client, kept[4], kept[3]) for client, kept in self._clients.items()]
        return used + batch * self._size * max((total - len(early)) * count for (_, count), total, early in here)

    def at_boundary(self, step: int) -> None:
        """This rank is about to make the step, whose examples do not count before it has."""
        self._used[step] = self.used
        if len(self._used) > BOUNDARIES:
            del self._used[min(self._used)]

    def used_before(self, step: int) -> list[tuple[int, int]]:
        """At the last boundaries, of which `step` is the newest: (the step that came next, how many were used up)."""
        self._used.setdefault(step, self.used)
        return [(at, n) for at, n in self._used.items() if at <= step]

    # -- where it stands, and to stand there again --

    def stands(self) -> dict[tuple[int, int], Stand]:
        """Where each client stands; the last one is who reads now."""
        mine, found = self._client, dict[tuple[int, int], Stand]()
        for client in (*self._clients, mine):
            self.client(*client)
            stand = self._total, self._drawn, len(self._early), self._opened, self._pass_began, self._last
            found[client] = Stand(*stand)
        self.client(*mine)
        return found

    @property
    def began(self) -> tuple[int, int, int, int]:
        """The batch, the seed and the step of the last restart, and how many examples were used up then."""
        return self._began

    @property
    def chance(self) -> Chance | None:
        """Random numbers of its own."""
        return self._chance

    def stand(self, began: tuple[int, int, int, int], chance: Numbers | None,
              stands: dict[tuple[int, int], Stand]) -> bool:  # fmt: skip
        """Everyone stands there, having read the same again; no random number of the process is used up.

        Is the last batch of each the one that it was? Else the data yields others when it is read again.
        """
        self._began, self._chance, same, last = began, None, True, list(stands)[-1]
        self._clients.clear()
        for self._client, at in stands.items():
            with Chance(at.opened or numbers()):
                self._open()
                for n in range(at.total - at.drawn):
                    self._read_again(n, at)
            with Chance(at.began or numbers()):
                for n in range(at.total - at.drawn, at.total):
                    self._read_again(n, at)
            same &= self._last == at.last
            self._opened, self._pass_began = at.opened, at.began
            if self._client != last:
                self._set_aside()
        self._chance = None if chance is None else Chance(chance)
        return same

    def _read_again(self, number: int, at: Stand) -> None:
        batch = self._next()
        if number == at.total - 1:
            self._last = marked(batch)
        if number >= at.total - at.early:
            self._early.append(to_device(batch, self._device))


def marked(batch: Any) -> int:
    """A hash of a few bytes of a batch's first tensors, by which it is told from another; 0 where none is here."""
    found = 0
    for x in islice(tensors(batch), 2):
        if x.device.type == "cpu" and x.layout == torch.strided and x.numel():
            few = x.detach().reshape(-1)[:16].contiguous().view(torch.uint8)
            found = zlib.crc32(few.numpy().tobytes(), found)
    return found


def example(learner: Learner, e: Experiment, device: str) -> Any:
    """A batch, the same on all ranks; no random number that training would draw is used up.

    Training does not miss it, unless `data` hands out what is there once for all that ask.
    """
    with Chance(e.seed):
        batches = Batches(learner.data, 0, e.ranks, device)
        batches.restart(e.batch, e.seed, 0)
        return batches.next()


def to_device(batch: Any, device: str) -> Any:
    """Tensors, and tensors in tuples, lists and dicts, on `device`; anything else as it is."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        moved = {k: to_device(v, device) for k, v in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(to_device(v, device) for v in batch)
    return batch
