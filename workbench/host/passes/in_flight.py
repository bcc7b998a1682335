"""Micro-batches in flight from batch to batch on a stage, unless its schedule flushes every batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from workbench.host.passes.stage_messages import StageMessages
from workbench.host.passes.stage_module import cut_batch
from workbench.host.passes.weight_versions import WeightVersions
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.partitions import Partition, Whole
from workbench.partitions.schedules import Action
from workbench.rank import Rank, StrategyError


class InFlight:
    """Micro-batches of the current and later batches between forward and backward.

    `micro` counts from the current batch's first micro-batch. Messages and spans use `number`, which stays the same
    from forward to backward and is unique in flight.

    batches:  batches completed since the pipeline was empty
    steps:    returns the run's number of steps; 0: unknown. No batch after the last one goes forward
    inputs:   by number, a micro-batch's examples; empty with sizes only
    coming:   returns the batch after so many batches
    buffers:  buffers that this stage's forwards change
    forget:   drops the state of these forwards, by number
    """

    crossing: StageMessages

    def __init__(self, layout: Callable[[], ParameterLayout], coming: Callable[[int], Any],
                 buffers: Callable[[], Iterable[Tensor]], forget: Callable[[list[int]], None],
                 steps: Callable[[], int]) -> None:  # fmt: skip
        self.steps = steps
        self.coming, self.buffers, self._forget = coming, buffers, forget
        self.versions = WeightVersions(layout)
        self.partition: Partition = Whole()
        self.batches = self.left = 0  # left: batches to make
        self.inputs: dict[int, Any] = {}
        self._open: deque[tuple[Any, list[Any]]] = deque()  # (batch, micro-batches)
        self._before: dict[int, list[Tensor]] = {}  # buffers before later forwards

    # -- both hosts --

    def begin_batch(self, rank: Rank, partition: Partition, step: int) -> list[Action]:
        """Returns this rank's actions in order."""
        self.partition, actions = partition, partition.actions(rank.index)
        if not self.batches:
            self.crossing = StageMessages(rank, partition)
        if not self.never_flushes:
            return actions
        if partition.delayed:
            self.versions.begin_batch()
        fill = range(0 if self.batches else partition.ahead(rank.index))
        self.left = self.steps() - step if self.steps() else partition.depth
        every = [*(Action("F", micro) for micro in fill), *actions]
        return [action for action in every if action.what != "F" or self.has_step(action.micro)]

    def has_step(self, micro: int) -> bool:
        return micro < self.left * self.partition.micro_batches

    @property
    def never_flushes(self) -> bool:
        return self.partition.ahead(0) > 0

    def number_micro(self, micro: int) -> int:
        if not self.never_flushes:
            return micro
        each = self.partition.micro_batches
        return (self.batches * each + micro) % max(each, self.partition.depth)

    def note_forward(self, micro: int) -> None:
        if self.never_flushes:
            later = micro >= self.partition.micro_batches
            versions = self.versions
            version = versions.version_of_batch(later) if self.partition.delayed else versions.newest_version
            versions.reads[self.number_micro(micro)] = version

    def free_micro(self, micro: int) -> None:
        number = self.number_micro(micro)
        self.versions.reads.pop(number, None)
        self.inputs.pop(number, None)
        self._before.pop(number, None)

    def end_batch(self) -> None:
        if self._open:
            self._open.popleft()
        if self.never_flushes:
            self.batches, self.left = self.batches + 1, self.left - 1
            self.versions.end_batch()

    def drop_micros(self) -> None:
        """Undoes the buffer writes of dropped micro-batches."""
        flying = list(self.versions.reads)
        if flying and self._before:
            for now, before in zip(self.buffers(), self._before[self.number_micro(0)], strict=True):
                now.copy_(before)
        self._forget(flying)
        self.versions.drop_versions()
        self.batches = 0
        for held in (self.inputs, self._open, self._before):
            held.clear()

    @property
    def stashed(self) -> Iterator[Tensor]:
        """Copies of weights for backward, and of buffers for `drop_micros`."""
        yield from self.versions.kept
        for held in self._before.values():
            yield from held

    # -- with values --

    def cut_batch(self, batch: object, partition: Partition) -> None:
        """Raises StrategyError if another batch went forward ahead of its step."""
        if self._open and self._open[0][0] is not batch:
            raise StrategyError(
                f"backward of a batch that is not the next one: under "
                f"schedule={type(getattr(partition, 'schedule', partition)).__name__} a batch's forward comes before "
                f"its step; await rank.forward() without examples, and backward before the next one"
            )
        if not self._open:
            self._open.append((batch, cut_batch(batch, partition.micro_batches)))

    def take_micro(self, micro: int) -> Any:
        """Draws later batches as needed."""
        each = self.partition.micro_batches
        while len(self._open) <= micro // each:
            batch = self.coming(len(self._open) - 1)
            self._open.append((batch, cut_batch(batch, each)))
        part = self.inputs[self.number_micro(micro)] = self._open[micro // each][1][micro % each]
        if self.never_flushes and micro >= each:
            self._before[self.number_micro(micro)] = [x.clone() for x in self.buffers()]
        return part

    def read_in_forward(self, micro: int) -> AbstractContextManager[None]:
        return self._find_version(micro).read_in_forward() if self.never_flushes else nullcontext()

    def read_in_backward(self, micro: int) -> AbstractContextManager[None]:
        return self._find_version(micro).read_in_backward() if self.never_flushes else nullcontext()

    def _find_version(self, micro: int) -> Any:
        return self.versions.reads[self.number_micro(micro)]
