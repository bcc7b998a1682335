"""A virtual rank draws batches. This takes no time."""

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


class BatchOutline:
    """RankSizes' batches, which have no contents."""

    examples: Callable[[], int] = int  # per batch
    taken_batches = 0  # batches so far
    whole: Any

    @property
    @abstractmethod
    def layout(self) -> ParameterLayout: ...

    def next_batch(self) -> Any:
        raise StrategyError("sizes only: batches have no contents; simulate with real=True")

    def batch_nbytes(self, batch: int) -> int:
        return int(self.whole.passes.count_batch_bytes(batch))

    def use_client(self, index: int, count: int) -> None:
        """No example exists here."""

    def draw_ahead(self) -> None:
        """Draws nothing."""

    def find_usual_rows(self) -> dict[str, torch.Tensor]:
        """Returns one batch's rows, which stand for every batch."""
        return dict(self.whole.find_rows(self.examples(), self.layout))
