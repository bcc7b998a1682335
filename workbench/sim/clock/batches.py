"""A virtual rank draws batches, and reads and updates embedding rows. This takes no time."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Op, StrategyError
from workbench.sim.clock.fiber import Fiber


class BatchPerformer:
    """Draws batches. body: the rank's tensors or sizes"""

    def __init__(self, body: Any) -> None:
        self._body = body

    def next_batch(self, fiber: Fiber, op: Op) -> Any:
        return self._body.next_batch()

    def look_up(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        return self._body.look_up()

    def row_grads(self, fiber: Fiber, op: Op) -> Any:
        self._body.activate_worker(fiber.origin)
        return self._body.row_grads(*op.args)

    def update_rows(self, fiber: Fiber, op: Op) -> Any:
        return self._body.update_rows(*op.args)


class BatchOutline:
    """The part of RankSizes that stands for batches, which have no contents here."""

    examples: Callable[[], int] = int  # examples per batch; the session sets it
    taken_batches = 0  # batches so far
    whole: Any

    @property
    @abstractmethod
    def layout(self) -> ParameterLayout: ...

    @abstractmethod
    def note_shard_step(self) -> None: ...

    def next_batch(self) -> Any:
        raise StrategyError("sizes only: there is no batch to look at; simulate with real=True")

    def batch_nbytes(self, batch: int) -> int:
        return int(self.whole.passes.count_batch_bytes(batch))

    def use_client(self, index: int, count: int) -> None:
        """Does nothing: no example exists here."""

    def look_up(self) -> dict[str, torch.Tensor]:
        """Returns one batch's rows, which stand for every batch."""
        return dict(self.whole.find_rows(self.examples(), self.layout))

    def row_grads(self, rows: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        like = {place.name: place.param.data for place in self.layout.order if place.name in rows}
        return {name: like[name].new_empty(len(mine), like[name].shape[1]) for name, mine in rows.items()}

    def update_rows(self, table: str, rows: torch.Tensor, grad: torch.Tensor, lr: float) -> None:
        """Changes no row, but the optimizer holds state from the first step on."""
        self.note_shard_step()
