"""Draws one rank's batches from the task's data."""

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
from workbench.host.memory.storages import find_tensors
from workbench.rank import StrategyError
from workbench.tasks import Learner, TaskError
from workbench.tasks._chance import Chance as Chance
from workbench.tasks._chance import Numbers as Numbers
from workbench.tasks._chance import numbers as numbers

MAX_BOUNDARIES = 64


class ReaderPosition(NamedTuple):
    """A reader's position.

    total:         batches drawn since it began
    drawn:         in this pass of the data
    early:         drawn ahead
    opened, began: random numbers when it began, and when this pass did
    last:          a hash of part of the last batch
    """

    total: int
    drawn: int
    early: int
    opened: Numbers | None
    began: Numbers | None
    last: int


def count_batch_bytes(batch: object) -> int:
    """Counts tensors, not their storages."""
    return sum(x.numel() * x.element_size() for x in find_tensors(batch))


class BatchReader:
    """The data of one rank, read again after the end. Raises TaskError if that is impossible."""

    def __init__(self, data: Callable[..., Iterable[Any]], rank: int, size: int, device: str,
                 indexed: bool = False) -> None:  # fmt: skip
        """data, indexed: as in workbench.tasks.Learner"""
        self._data, self._rank, self._size, self._device, self._indexed = data, rank, size, device, indexed
        self._source: Iterable[Any] = ()
        self._iterator: Iterator[Any] = iter(())
        self._drawn = 0
        self._total = 0  # including earlier passes
        self._last = 0  # last batch's hash
        self._opened: Numbers | None = None  # random numbers when data and pass began
        self._pass_began: Numbers | None = None
        self.taken = 0  # returned by `next_batch`
        self.nbytes = 0  # of last batch
        self._early: deque[Any] = deque()  # drawn before their turn
        self._chance: Chance | None = None
        self._began = 0, 0, 0, 0  # last restart's arguments
        self._used: dict[int, int] = {}  # examples used, by step
        self._client = 0, 1
        self._clients: dict[tuple[int, int], tuple[Any, ...]] = {}  # other clients' positions

    def set_share(self, rank: int, size: int, seed: int | None = None) -> None:
        """Sets which data the next restart draws: those of `rank` of `size`.

        seed: of separate random numbers, so that all readers of the same data draw alike; None: the process's
        """
        self._rank, self._size = rank, size
        self._chance = None if seed is None else Chance(seed)

    def restart_reading(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        """Draws batches of `batch` examples from now on. With an index, it skips the first `used` examples.

        Without an index, a later restart draws other examples.
        """
        self._began = batch, seed, step, used
        self._used = {at: n for at, n in self._used.items() if at < step}
        self._clients.clear()
        self._open_reader()

    def select_client(self, index: int, count: int) -> None:
        """Draws for client `index` of `count`, from its last position; (0, 1) is the rank."""
        if not 0 <= index < count:
            raise StrategyError(f"client {index} of {count}: there are 0 to {count - 1}")
        if (index, count) == self._client:
            return
        self._save_position()
        self._client = index, count
        if self._client in self._clients:
            (self._source, self._iterator, self._drawn, self._early, self._total, self._last,
             self._opened, self._pass_began) = self._clients.pop(self._client)  # fmt: skip
        else:
            self._open_reader()

    def _save_position(self) -> None:
        self._clients[self._client] = (self._source, self._iterator, self._drawn, self._early, self._total, self._last,
                                       self._opened, self._pass_began)  # fmt: skip

    def _open_reader(self) -> None:
        batch, seed, step, used = self._began
        index, count = self._client
        order = (seed, used) if self._indexed else (seed + 7919 * step,)
        with self._chance or nullcontext():
            self._opened = self._pass_began = numbers()
            self._source = self._data(self._rank * count + index, self._size * count, batch, *order)
            self._iterator, self._drawn, self._total = iter(self._source), 0, 0
            self._early = deque()

    def next_batch(self) -> Any:
        self.taken += 1
        batch = self._early.popleft() if self._early else self._draw_batch()
        self.nbytes = count_batch_bytes(batch)
        return batch

    def peek_batch(self, after: int) -> Any:
        while len(self._early) <= after:
            self._early.append(self._draw_batch())
        return self._early[after]

    def _draw_batch(self) -> Any:
        with self._chance or nullcontext():
            batch = self._read_batch()
        self._last = hash_batch(batch)
        return move_to_device(batch, self._device)

    def _read_batch(self) -> Any:
        for batch in self._iterator:
            self._drawn, self._total = self._drawn + 1, self._total + 1
            return batch
        if not self._drawn:
            raise TaskError(f"the data of rank {self._rank} yields no batch: give every rank at least one batch")
        drawn, self._drawn = self._drawn, 0
        self._pass_began = numbers()
        self._iterator = iter(self._source)
        for batch in self._iterator:
            self._drawn, self._total = 1, self._total + 1
            return batch
        raise TaskError(
            f"the data of rank {self._rank} ran out after {drawn} batches and cannot start again: return an object "
            f"that can be iterated again (a list, a DataLoader), or an endless generator"
        )

    # -- examples used up --

    @property
    def used(self) -> int:
        """Examples used up if each rank has drawn as often as this one."""
        batch, _, _, used = self._began
        here = [(self._client, self._total, self._early)]
        here += [(client, kept[4], kept[3]) for client, kept in self._clients.items()]
        return used + batch * self._size * max((total - len(early)) * count for (_, count), total, early in here)

    def note_boundary(self, step: int) -> None:
        self._used[step] = self.used
        if len(self._used) > MAX_BOUNDARIES:
            del self._used[min(self._used)]

    def list_boundaries(self, step: int) -> list[tuple[int, int]]:
        """Returns (step, examples used up before it)."""
        self._used.setdefault(step, self.used)
        return [(at, n) for at, n in self._used.items() if at <= step]

    # -- positions --

    def list_positions(self) -> dict[tuple[int, int], ReaderPosition]:
        """The present client is last."""
        mine, found = self._client, dict[tuple[int, int], ReaderPosition]()
        for client in (*self._clients, mine):
            self.select_client(*client)
            stand = self._total, self._drawn, len(self._early), self._opened, self._pass_began, self._last
            found[client] = ReaderPosition(*stand)
        self.select_client(*mine)
        return found

    @property
    def restart_arguments(self) -> tuple[int, int, int, int]:
        """Batch, seed, step, used."""
        return self._began

    @property
    def own_randomness(self) -> Chance | None:
        return self._chance

    def restore_positions(self, began: tuple[int, int, int, int], chance: Numbers | None,
              stands: dict[tuple[int, int], ReaderPosition], taken: int) -> bool:  # fmt: skip
        """Takes all clients to these positions by reading again. Leaves the process's random numbers alone.

        taken: the batches that `next_batch` has returned

        Returns False if a last batch differs: then the data yield other batches on a second reading.
        """
        self._began, self._chance, same, last = began, None, True, list(stands)[-1]
        self.taken = taken
        self._clients.clear()
        for self._client, at in stands.items():
            with Chance(at.opened or numbers()):
                self._open_reader()
                for n in range(at.total - at.drawn):
                    self._read_again(n, at)
            with Chance(at.began or numbers()):
                for n in range(at.total - at.drawn, at.total):
                    self._read_again(n, at)
            same &= self._last == at.last
            self._opened, self._pass_began = at.opened, at.began
            if self._client != last:
                self._save_position()
        self._chance = None if chance is None else Chance(chance)
        return same

    def _read_again(self, number: int, at: ReaderPosition) -> None:
        batch = self._read_batch()
        if number == at.total - 1:
            self._last = hash_batch(batch)
        if number >= at.total - at.early:
            self._early.append(move_to_device(batch, self._device))


def hash_batch(batch: object) -> int:
    """Hashes a few bytes; 0 without tensors on a CPU."""
    found = 0
    for x in islice(find_tensors(batch), 2):
        if x.device.type == "cpu" and x.layout == torch.strided and x.numel():
            few = x.detach().reshape(-1)[:16].contiguous().view(torch.uint8)
            found = zlib.crc32(few.numpy().tobytes(), found)
    return found


def make_example(learner: Learner, e: Experiment, device: str) -> Any:
    """Returns the same batch on all ranks. Leaves training's random numbers alone.

    Training still gets this batch, unless `data` gives each batch only once.
    """
    with Chance(e.seed):
        batches = BatchReader(learner.data, 0, e.ranks, device)
        batches.restart_reading(e.batch, e.seed, 0)
        return batches.next_batch()


def move_to_device(batch: object, device: str) -> Any:
    """Moves tensors at any depth."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        moved = {k: move_to_device(v, device) for k, v in batch.items()}
        return moved if type(batch) is dict else type(batch)(moved)
    if isinstance(batch, (list, tuple)) and not hasattr(batch, "_fields"):
        return type(batch)(move_to_device(v, device) for v in batch)
    return batch
