"""What one stage of a pipeline has under way from batch to batch: all of it is nothing where every batch is flushed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from workbench.host.passes.crossing import Crossing
from workbench.host.passes.piece import micro_batches
from workbench.host.passes.versions import Versions
from workbench.host.placement.layout import Layout
from workbench.partitions import Partition, Whole
from workbench.partitions.schedules import Action
from workbench.rank import Rank, StrategyError


class Flow:
    """Micro-batches that have gone forward and not yet back, some of them of batches to come.

    A micro-batch is counted from the first of the batch under way. Its number is what messages and spans call it: the
    same from its forward to its backward, and no other's that is in flight.

    batches:  how many are over since nothing was under way
    steps:    how many the run makes; 0: no end is known. No forward is made of a batch after the last one
    inputs:   by number, what went in; nothing with sizes only
    coming:   the batch to come after so many
    buffers:  what forwards of this stage change but parameters
    forget:   drops what is left of these forwards, by number
    """

    crossing: Crossing

    def __init__(self, layout: Callable[[], Layout], coming: Callable[[int], Any],
                 buffers: Callable[[], Iterable[Tensor]], forget: Callable[[list[int]], None]) -> None:  # fmt: skip
        self.coming, self.buffers, self._forget = coming, buffers, forget
        self.versions = Versions(layout)
        self.partition: Partition = Whole()
        self.batches = self.left = 0  # left: batches to come
        self.steps: Callable[[], int] = lambda: 0
        self.inputs: dict[int, Any] = {}
        self._open: deque[tuple[Any, list[Any]]] = deque()  # the batch under way and those to come, and their parts
        self._before: dict[int, list[Tensor]] = {}  # buffers as they were before forwards of batches to come

    # -- a batch, as both hosts live it --

    def begin(self, rank: Rank, partition: Partition, step: int) -> list[Action]:
        """A batch is under way, that of a step of the run; what this rank computes now, in order."""
        self.partition, actions = partition, partition.actions(rank.index)
        if not self.batches:
            self.crossing = Crossing(rank, partition)
        if not self.goes_on:
            return actions
        if partition.delayed:
            self.versions.begin()
        fill = range(0 if self.batches else partition.ahead(rank.index))
        self.left = self.steps() - step if self.steps() else partition.depth
        every = [*(Action("F", micro) for micro in fill), *actions]
        return [action for action in every if action.what != "F" or self.comes(action.micro)]

    def comes(self, micro: int) -> bool:
        """Is a micro-batch one of a batch that the run will get to?"""
        return micro < self.left * self.partition.micro_batches

    @property
    def goes_on(self) -> bool:
        """Does the pipeline never flush?"""
        return self.partition.ahead(0) > 0

    def number(self, micro: int) -> int:
        """What a micro-batch is called."""
        if not self.goes_on:
            return micro
        each = self.partition.micro_batches
        return (self.batches * each + micro) % max(each, self.partition.depth)

    def goes(self, micro: int) -> None:
        """A micro-batch is about to go forward."""
        if self.goes_on:
            later = micro >= self.partition.micro_batches
            versions = self.versions
            version = versions.of_batch(later) if self.partition.delayed else versions.newest
            versions.reads[self.number(micro)] = version

    def back(self, micro: int) -> None:
        """A micro-batch has gone back."""
        number = self.number(micro)
        self.versions.reads.pop(number, None)
        self.inputs.pop(number, None)
        self._before.pop(number, None)

    def over(self) -> None:
        """All of the batch have gone back."""
        if self._open:
            self._open.popleft()
        if self.goes_on:
            self.batches, self.left = self.batches + 1, self.left - 1
            self.versions.over()

    def clear(self) -> None:
        """Nothing is under way any more; those that went ahead are as if they had not."""
        flying = list(self.versions.reads)
        if flying and self._before:
            for now, before in zip(self.buffers(), self._before[self.number(0)], strict=True):
                now.copy_(before)
        self._forget(flying)
        self.versions.forget()
        self.batches = 0
        for held in (self.inputs, self._open, self._before):
            held.clear()

    @property
    def stashed(self) -> Iterator[Tensor]:
        """Copies of weights that a backward is still to read, and of buffers that a drain may put back."""
        yield from self.versions.kept
        for held in self._before.values():
            yield from held

    # -- where there are values --

    def open(self, batch: Any, partition: Partition) -> None:
        """The strategy takes `batch` through the stages now."""
        if self._open and self._open[0][0] is not batch:
            raise StrategyError(
                f"backward of a batch that is not the next one: under schedule="
                f"{type(getattr(partition, 'schedule', partition)).__name__} batches go forward before their step; "
                f"await rank.forward() without examples, and backward before the next one"
            )
        if not self._open:
            self._open.append((batch, micro_batches(batch, partition.micro_batches)))

    def part(self, micro: int) -> Any:
        """The examples of a micro-batch."""
        each = self.partition.micro_batches
        while len(self._open) <= micro // each:
            batch = self.coming(len(self._open) - 1)
            self._open.append((batch, micro_batches(batch, each)))
        part = self.inputs[self.number(micro)] = self._open[micro // each][1][micro % each]
        if self.goes_on and micro >= each:
            self._before[self.number(micro)] = [x.clone() for x in self.buffers()]
        return part

    def forward(self, micro: int) -> AbstractContextManager[None]:
        """Inside it goes forward."""
        return self._version(micro).forward() if self.goes_on else nullcontext()

    def backward(self, micro: int) -> AbstractContextManager[None]:
        """Inside it goes back."""
        return self._version(micro).backward() if self.goes_on else nullcontext()

    def _version(self, micro: int) -> Any:
        return self.versions.reads[self.number(micro)]
