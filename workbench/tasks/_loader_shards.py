"""Adopts a script's own loader and gives each rank its batches."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils import data as torch_data

from workbench.settings import KnobError
from workbench.tasks._base import TaskError, in_turn
from workbench.tasks._chance import Chance

_ALONE = threading.RLock()  # ranks as threads share the process's random numbers

Order = torch_data.Sampler[Any] | torch_data.BatchSampler


class Micros(list[Any]):
    """The micro-batches of one step, whose gradients are averaged."""


class Epochs:
    """Endless passes of a sampler, the same on all ranks: as in a process with this seed."""

    def __init__(self, dataset: Any, sampler: Any, generator: torch.Generator | None) -> None:
        self._dataset = dataset
        self._sampler, self._generator = self._copied(sampler, generator)

    def _copied(self, *of: Any) -> Any:
        return copy.deepcopy(of, {id(self._dataset): self._dataset})

    def of(self, seed: int) -> Iterator[list[Any]]:
        """Yields each pass as a list. A sampler continues its own random numbers."""
        sampler, generator = self._copied(self._sampler, self._generator)
        if isinstance(sampler, torch_data.DistributedSampler):  # ranks share one replica's examples
            first, was = sampler.epoch, sampler
            sampler = torch_data.DistributedSampler(was.dataset, num_replicas=1, rank=0, shuffle=was.shuffle,
                                                    seed=was.seed, drop_last=was.drop_last)  # fmt: skip
        else:
            first = 0
        process = torch.Generator().manual_seed(seed)  # draws as a process with this seed
        bare = getattr(sampler, "generator", process) is None
        known = type(sampler).__module__.startswith("torch.utils.data")
        chance = nullcontext() if known else Chance(seed)
        for epoch in count(first):
            with _ALONE if not known else nullcontext(), chance:
                draws = process if known and generator is None else generator
                torch.empty((), dtype=torch.int64).random_(generator=draws)  # a DataLoader's draw for its workers
                if bare and known:
                    sampler.generator = _of_its_own(process) if type(sampler) is torch_data.RandomSampler else process
                if callable(getattr(sampler, "set_epoch", None)):
                    sampler.set_epoch(epoch)
                found = list(sampler)
            if not found:
                raise TaskError(f"the loader's {type(sampler).__name__} yields no examples: give it a longer dataset")
            yield found


def _of_its_own(process: torch.Generator) -> torch.Generator:
    """Returns the generator that a bare RandomSampler makes for a pass."""
    return torch.Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=process)))


class Examples:
    """`(rank, ranks, seed, batch, used)` -> a rank's endless batches of examples, which ranks share by index.

    A batch may continue into the next pass.

    batch:  examples per rank and step, over all micro-batches
    micros: micro-batches per step, of equal size
    cut:    a pass is cut to a multiple of this many examples, as `drop_last` does
    """

    def __init__(self, loader: Any, sampler: Any, batch: int, micros: int, drop_last: bool) -> None:
        self.dataset, self.collate = loader.dataset, loader.collate_fn
        self.epochs = Epochs(loader.dataset, sampler, loader.generator)
        self.batch, self.micros, self.cut = batch * micros, micros, batch if drop_last else 1

    def __call__(self, rank: int, ranks: int, seed: int, batch: int, used: int = 0) -> Iterator[Any]:
        for indices in in_turn(self._lines(seed), rank, ranks, batch, used):
            parts = [self._read(part) for part in indices.view(self.micros, -1).tolist()]
            yield Micros(parts) if self.micros > 1 else parts[0]

    def _lines(self, seed: int) -> Iterator[Tensor]:
        for found in self.epochs.of(seed):
            yield torch.tensor(found[: len(found) - len(found) % self.cut], dtype=torch.int64)

    def _read(self, indices: list[int]) -> Any:
        together = getattr(self.dataset, "__getitems__", None)
        return self.collate(together(indices) if together else [self.dataset[i] for i in indices])

    def refuses(self, batch: int) -> str | None:
        if batch % self.micros:
            return f"batch={batch}: must be a multiple of {self.micros}, the batches of a step (accumulate)"
        return None

    def __repr__(self) -> str:
        return f"adopted {type(self.dataset).__name__}, {self.batch} examples per step"


class Whole:
    """`(rank, ranks, seed)` -> a rank's endless batches: every `ranks`-th batch of a loader.

    Every rank reads all batches. With a sampler of indices (`Sampled`) it reads only its own.
    """

    def __init__(self, source: Any, micros: int) -> None:
        self.source, self.micros = source, micros

    def __call__(self, rank: int, ranks: int, seed: int) -> Iterator[Any]:
        mine = self._mine(rank, ranks, seed)
        while True:
            parts = list(islice(mine, self.micros))
            if len(parts) < self.micros:
                raise TaskError(f"the data of rank {rank} ran out: the loader must yield batches each time it is read")
            yield Micros(parts) if self.micros > 1 else parts[0]

    def _mine(self, rank: int, ranks: int, seed: int) -> Iterator[Any]:
        chance, turn = Chance(seed), 0
        while True:
            source, empty = iter(self.source), True
            while True:
                with _ALONE, chance:
                    batch = next(source, Epochs)
                if batch is Epochs:
                    break
                empty = False
                if turn % ranks == rank:
                    yield batch
                turn += 1
            if empty:
                return

    def refuses(self, batch: int) -> str | None:
        if not batch:
            return None
        return f"batch={batch}: the adopted loader makes its own batches; take 0, or adopt one with a batch_size"

    def __repr__(self) -> str:
        return f"adopted batches of a {type(self.source).__name__}"


class Sampled(Whole):
    """`Whole` for a batch sampler: each batch is a list of its indices."""

    def __init__(self, loader: Any, micros: int) -> None:
        super().__init__(loader.dataset, micros)
        by = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
        self.single = loader.batch_sampler is None  # each example is a batch
        self.collate, self.epochs = loader.collate_fn, Epochs(loader.dataset, by, loader.generator)

    def _mine(self, rank: int, ranks: int, seed: int) -> Iterator[Any]:
        turn = 0
        for found in self.epochs.of(seed):
            for indices in found[(rank - turn) % ranks :: ranks]:
                yield self.collate(self.source[indices] if self.single else [self.source[i] for i in indices])
            turn += len(found)


def adopt_loader(loader: Any, batch: int, micros: int) -> Examples | Whole:
    """Returns a DataLoader, a Dataset or an iterable of batches as a task's data. Raises KnobError.

    batch:  examples per batch of a Dataset; 0 for a DataLoader
    micros: batches per step
    """
    if isinstance(loader, torch_data.Dataset) and not isinstance(loader, torch_data.IterableDataset):
        if not batch:
            raise KnobError(f"batch=0: must be 1 or more for a {type(loader).__name__}; take batch=32")
        return _by_index(torch_data.DataLoader(loader, batch, shuffle=True), micros)
    if batch:
        raise KnobError(f"batch={batch}: the loader makes its own batches; omit batch or give the Dataset itself")
    if isinstance(loader, torch_data.DataLoader):
        if not isinstance(loader.dataset, torch_data.IterableDataset):
            return _by_index(loader, micros)
        loader = torch_data.DataLoader(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn,
                                       drop_last=loader.drop_last)  # fmt: skip
    if isinstance(loader, Iterator):
        raise KnobError(f"loader=a {type(loader).__name__}: can be read only once; give a DataLoader, a Dataset or a "
                        f"list of batches")  # fmt: skip
    if not isinstance(loader, Iterable):
        raise KnobError(f"loader={_named(loader)}: must be a DataLoader, a Dataset or an iterable of batches")
    return Whole(loader, micros)


def _by_index(loader: Any, micros: int) -> Examples | Whole:
    by: Any = loader.batch_sampler
    if by is None or type(by) is not torch_data.BatchSampler:
        _require_length(by if by is not None else loader.sampler)
        return Sampled(loader, micros)
    _require_length(by.sampler)
    if len(by) == 0:
        raise KnobError(f"loader=a DataLoader of {len(loader.sampler)} examples: has no whole batch of "
                        f"{by.batch_size}; give it more examples or a smaller batch_size")  # fmt: skip
    return Examples(loader, by.sampler, by.batch_size, micros, by.drop_last)


def _require_length(sampler: Any) -> None:
    try:
        len(sampler)
    except TypeError:
        raise KnobError(f"sampler={type(sampler).__name__}: must have a length so that ranks can share its examples; "
                        f"give it __len__") from None  # fmt: skip


def _named(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
