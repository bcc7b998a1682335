"""Performs the verbs for rows of embedding tables on a real rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.strategies.embedding_tables.rows import (
    CopyOptimizer,
    Lookups,
    TableLayout,
    find_rows,
    step_rows,
    take_gradients,
    take_named_gradients,
)


class TableHost(Protocol):
    """What the performer uses of a real rank. alone: held while the optimizer runs"""

    @property
    def learner(self) -> Lookups: ...
    @property
    def layout(self) -> TableLayout: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def alone(self) -> AbstractContextManager[Any]: ...


class TablePerformer:
    """Looks up rows, and takes and applies their gradients."""

    def __init__(self, host: TableHost, draw_ahead: Callable[[], Any],
                 copy_optimizer: CopyOptimizer) -> None:  # fmt: skip
        """draw_ahead: draws the batch of the next forward before it
        copy_optimizer: returns an optimizer without state
        """
        self._host, self._draw_ahead, self._copy_optimizer = host, draw_ahead, copy_optimizer
        self.verbs: dict[str, Callable[..., Any]] = {
            "look_up": self.look_up,
            "row_grads": self.row_grads,
            "update_rows": self.update_rows,
        }

    def look_up(self) -> dict[str, Tensor]:
        return find_rows(self._host.learner, self._draw_ahead(), self._host.layout)

    def row_grads(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return take_gradients(self._host.layout, rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> None:
        with self._host.alone:
            step_rows(self._host.layout, self._host.optimizer, self._copy_optimizer, table, rows, grad, lr)


class WorkerTablePerformer:
    """The same for one of a rank's workers, whose gradients are its own."""

    def __init__(self, host: TableHost, draw_ahead: Callable[[], Any], params: dict[str, nn.Parameter]) -> None:
        """params: the worker's, by name"""
        self._host, self._draw_ahead, self._params = host, draw_ahead, params
        self.verbs: dict[str, Callable[..., Any]] = {"look_up": self.look_up, "row_grads": self.row_grads}

    def look_up(self) -> dict[str, Tensor]:
        return find_rows(self._host.learner, self._draw_ahead(), self._host.layout)

    def row_grads(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return take_named_gradients(self._params, rows)
