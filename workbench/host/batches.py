"""Batches for one rank: drawn from the task's data and moved to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.tasks import Learner, TaskError


class Batches:
    """What one rank learns from: read again from its beginning when it ends; running out is said in words."""

    def __init__(self, data: Callable[[int, int, int, int], Iterable[Any]], rank: int, size: int, device: str) -> None:
        self._data, self._rank, self._size, self._device = data, rank, size, device
        self._source: Iterable[Any] = ()
        self._iterator: Iterator[Any] = iter(())
        self._drawn = 0

    def share(self, rank: int, size: int) -> None:
        """What is drawn from the next restart on is the data of `rank` of `size`."""
        self._rank, self._size = rank, size

    def restart(self, batch: int, seed: int, step: int) -> None:
        """Draws from now on batches of `batch` examples; a later restart takes other examples than the first."""
        self._source = self._data(self._rank, self._size, batch, seed + 7919 * step)
        self._iterator, self._drawn = iter(self._source), 0

    def next(self) -> Any:
        for batch in self._iterator:
            self._drawn += 1
            return to_device(batch, self._device)
        if not self._drawn:
            raise TaskError(f"the data of rank {self._rank} yields nothing: give every rank at least one batch")
        drawn, self._drawn = self._drawn, 0
        self._iterator = iter(self._source)
        for batch in self._iterator:
            self._drawn = 1
            return to_device(batch, self._device)
        raise TaskError(
            f"the data of rank {self._rank} ran out after {drawn} batches and cannot start over: return something that "
            f"can be iterated again (a list, a DataLoader), or a generator that does not end"
        )


def example(learner: Learner, e: Experiment, device: str) -> Any:
    """A batch, the same on all ranks, that training does not miss; no random number that it would draw is used up."""
    with torch.random.fork_rng(devices=[]):
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
