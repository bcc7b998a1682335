"""Gives a loop the batches of its passes, and ends its block, on the loop's thread."""

from __future__ import annotations

import itertools
import json
import queue
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from workbench.engine.script.interception import DDPShim, LoopEnded
from workbench.engine.script.script_view import ScriptView
from workbench.settings import Change, KnobError


class LoopForward:
    """The `forward` of a loop's model. A copy of the model, or the model in a file, has its class's `forward`."""

    def __init__(self, batches: ScriptBatches, model: nn.Module, plain: Callable[..., Any]) -> None:
        self._batches, self._model, self._plain = batches, model, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._batches.call_model(self._model, self._plain, args, kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._model, "forward")  # called before the copy has attributes of its own


class ScriptBatches:
    """One rank's batches of a pass, and the block in which the loop uses them.

    changes:  made so far
    in_block: whether the loop has begun its block
    settled:  whether the block is over and all ranks have the same model
    exits:    whether the loop has left the block by SystemExit
    """

    run: ScriptView
    model: nn.Module | None
    in_block = settled = exits = False
    _last = True  # whether this is the last of `accumulate` batches
    _inside = False  # whether a forward or a backward of the loop runs

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self._arrivals: queue.SimpleQueue[tuple[str, BaseException | None]] = queue.SimpleQueue()
        self._patched: list[nn.Module] = []  # models with a replaced `forward`

    @abstractmethod
    def enter_forward(self, model: nn.Module, exchanges: bool) -> Callable[..., Any] | None: ...

    @abstractmethod
    def _wait_at(self, where: str) -> None: ...

    @property
    def rank_and_size(self) -> tuple[int, int]:
        return self.run.rank.id, self.run.rank.size

    def enter_block(self) -> None:
        if self.in_block:
            raise KnobError("training: a run has only one block of workbench.training; put both loops into one block")
        self.in_block = True

    def leave_block(self, error: BaseException | None) -> bool:
        """Without `error` it waits until all ranks have the same model.

        Returns whether the rank is done, so that `error` only ends the loop and is no failure.
        """
        if error is None:
            try:
                self._wait_at("end")
            except LoopEnded:
                if not self.settled:  # the rank has failed or must leave
                    raise
        elif isinstance(error, Exception):
            self._arrivals.put(("end", error))
        self.exits = isinstance(error, SystemExit)
        self.restore_forwards()
        return self.settled

    def restore_forwards(self) -> None:
        for model in self._patched:
            vars(model).pop("forward", None)
        self._patched.clear()

    def share_out_batches(self, loader: Iterable[Any], model: nn.Module, accumulate: int) -> Iterator[Any]:
        """Yields this rank's batches of a pass. The last of `accumulate` batches exchanges gradients.

        See `workbench.tasks.steps`. Raises KnobError if the block is over.
        """
        if self.settled:
            raise KnobError(
                "steps: the block of workbench.training has ended, and so have the run's steps; loop inside the block"
            )
        return self._count_batches(loader, model, accumulate)

    def _count_batches(self, loader: Iterable[Any], model: nn.Module, accumulate: int) -> Iterator[Any]:
        for number, batch in enumerate(self._share_batches(loader, model), 1):
            self._last = number % accumulate == 0
            yield batch

    def _share_batches(self, loader: Iterable[Any], model: nn.Module) -> Iterator[Any]:
        """Replaces the model's `forward`, and yields every n-th batch for n ranks, in rank 0's order."""
        plain = model.forward
        if self.model is not model and not isinstance(model, DDPShim):
            model.forward = LoopForward(self, model, plain)
            self.model = self.model or model
            self._patched.append(model)
        (rank, size), sampler = self.rank_and_size, getattr(loader, "batch_sampler", None)
        if size == 1:
            yield from loader
        elif sampler is None or isinstance(loader.dataset, IterableDataset):  # type: ignore[attr-defined]
            few = iter(loader)
            while len(batches := list(itertools.islice(few, size))) == size:
                yield batches[rank]
        else:
            order = json.loads(self.run.broadcast_text_now(json.dumps([list(indices) for indices in sampler])))
            data: Any = loader
            for indices in order[rank : len(order) // size * size : size]:
                yield data.collate_fn([data.dataset[i] for i in indices])

    def call_model(self, model: nn.Module, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self._inside:  # torch's own wrapper calls it
            return plain(*args, **kwargs)
        self._inside = True
        try:
            around = self.enter_forward(model, self._last) if torch.is_grad_enabled() else None
            return (plain if around in (None, model) else around)(*args, **kwargs)
        finally:
            self._inside = False
