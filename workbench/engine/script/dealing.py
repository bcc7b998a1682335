"""What a loop of its own is given of its passes, and how its block ends: the part of a Led on the loop's thread."""

from __future__ import annotations

import itertools
import json
import queue
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from workbench.engine.script.wrapped import Over, Wrapped
from workbench.settings import Change, KnobError

if TYPE_CHECKING:
    from workbench.engine.rank.following import Following


class Dealing:
    """Batches of a pass for one rank, and the block in which it goes over them.

    changes: made so far; in_block: has the loop begun one? settled: is it over, and the model what all have together?
    exits: does the loop leave it, and all that follows?
    """

    run: Following
    model: nn.Module | None
    in_block = settled = exits = False
    _last = True  # of the batches that are added up
    _inside = False  # of a forward or a backward of the loop's own

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._came: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        self._lent: list[nn.Module] = []  # whose forward is heard

    @abstractmethod
    def enter_forward(self, model: nn.Module, exchanges: bool) -> Callable[..., Any] | None: ...

    @abstractmethod
    def _meet(self, where: str) -> None: ...

    @property
    def place(self) -> tuple[int, int]:
        return self.run.rank.id, self.run.rank.size

    def enter(self) -> None:
        """A block begins; see `workbench.tasks.training`."""
        if self.in_block:
            raise KnobError("training: a run has one block, and its steps end with that; put both loops into one")
        self.in_block = True

    def leave(self, error: BaseException | None) -> bool:
        """It ends, by this `error`: waits until ranks are alike. Is `error` how a rank that is done ends a loop?"""
        if error is None:
            try:
                self._meet("end")
            except Over:
                if not self.settled:  # the rank has failed, or was told to leave
                    raise
        elif isinstance(error, Exception):
            self._came.put(("end", error))
        self.exits = isinstance(error, SystemExit)
        self.give_back()
        return self.settled

    def give_back(self) -> None:
        """Models that were lent are their loop's own again."""
        for model in self._lent:
            vars(model).pop("forward", None)
        self._lent.clear()

    def dealt(self, loader: Iterable[Any], model: nn.Module, accumulate: int) -> Iterator[Any]:
        """This rank's batches of a pass, and which of their backwards are exchanged; see `workbench.tasks.steps`."""
        if self.settled:
            raise KnobError("steps: the run's steps are over with its block of workbench.training; loop inside of it")
        return self._counted(loader, model, accumulate)

    def _counted(self, loader: Iterable[Any], model: nn.Module, accumulate: int) -> Iterator[Any]:
        for number, batch in enumerate(self._shared_out(loader, model), 1):
            self._last = number % accumulate == 0
            yield batch

    def _shared_out(self, loader: Iterable[Any], model: nn.Module) -> Iterator[Any]:
        """Every so-manieth batch, in rank 0's order."""
        plain = model.forward
        if self.model is not model and not isinstance(model, Wrapped):
            model.forward = lambda *args, **kwargs: self._called(model, plain, args, kwargs)
            self.model = self.model or model
            self._lent.append(model)
        (rank, size), sampler = self.place, getattr(loader, "batch_sampler", None)
        if size == 1:
            yield from loader
        elif sampler is None or isinstance(loader.dataset, IterableDataset):  # type: ignore[attr-defined]
            few = iter(loader)
            while len(batches := list(itertools.islice(few, size))) == size:
                yield batches[rank]
        else:
            order = json.loads(self.run.told_at_once(json.dumps([list(indices) for indices in sampler])))
            data: Any = loader
            for indices in order[rank : len(order) // size * size : size]:
                yield data.collate_fn([data.dataset[i] for i in indices])

    def _called(self, model: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:  # by torch's own wrapper
            return plain(*args, **kwargs)
        self._inside = True
        try:
            around = self.enter_forward(model, self._last) if torch.is_grad_enabled() else None
            return (plain if around in (None, model) else around)(*args, **kwargs)
        finally:
            self._inside = False
