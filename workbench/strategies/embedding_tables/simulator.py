"""Performs the verbs for rows of embedding tables on a virtual rank. This takes no time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor
from torch.optim import Optimizer

from workbench.rank import Op
from workbench.strategies.embedding_tables.rows import (
    CopyOptimizer,
    Lookups,
    TableLayout,
    find_rows,
    outline_gradients,
    step_rows,
    take_gradients,
)


class TableFiber(Protocol):
    """The coroutine that asks. origin: the worker that runs it"""

    origin: str


class TableHost(Protocol):
    """What the performer uses of a virtual rank: its tensors or its sizes."""

    @property
    def learner(self) -> Lookups: ...
    @property
    def layout(self) -> TableLayout: ...
    @property
    def optimizer(self) -> Optimizer: ...
    def activate_worker(self, worker: str) -> None: ...
    def draw_ahead(self) -> Any:
        """Draws the batch of the next forward before it."""

    def find_usual_rows(self) -> dict[str, Tensor]:
        """With sizes only: returns one batch's rows, which stand for every batch."""

    def note_shard_step(self) -> None:
        """With sizes only: notes that the optimizer holds state from now on."""


class TablePerformer:
    """Looks up rows, and takes and applies their gradients."""

    def __init__(self, host: TableHost, has_values: bool, copy_optimizer: CopyOptimizer) -> None:
        """copy_optimizer: returns an optimizer without state"""
        self._host, self._has_values, self._copy_optimizer = host, has_values, copy_optimizer
        self.verbs: dict[str, Callable[[Any, Op], Any]] = {
            "look_up": self.look_up,
            "row_grads": self.row_grads,
            "update_rows": self.update_rows,
        }

    def look_up(self, fiber: TableFiber, op: Op) -> dict[str, Tensor]:
        host = self._host
        host.activate_worker(fiber.origin)
        return find_rows(host.learner, host.draw_ahead(), host.layout) if self._has_values else host.find_usual_rows()

    def row_grads(self, fiber: TableFiber, op: Op) -> dict[str, Tensor]:
        self._host.activate_worker(fiber.origin)
        return (take_gradients if self._has_values else outline_gradients)(self._host.layout, *op.args)

    def update_rows(self, fiber: TableFiber, op: Op) -> None:
        if self._has_values:
            step_rows(self._host.layout, self._host.optimizer, self._copy_optimizer, *op.args)
        else:
            self._host.note_shard_step()
