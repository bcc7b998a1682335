"""The verbs of a Rank for batches and for embedding tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.rank.awaitables import Op

if TYPE_CHECKING:
    from torch import Tensor


class Data:
    """The part of a Rank that draws batches, and looks up and updates rows of tables."""

    # data and embedding tables
    def batch(self) -> Op:
        """Returns the next batch of this rank's data, to inspect it before `forward(batch)`."""
        return Op("batch")

    def client(self, index: int, count: int) -> Op:
        """Makes this rank read as client `index` of `count`: the data has `count` shards per rank."""
        return Op("client", index, count)

    def look_up(self) -> Op:
        """Returns, by embedding table, the rows that the batch of this worker's next `forward()` reads.

        Each is (n,) int64, distinct and ascending. With sizes only, the rows of one batch stand for those of every
        batch.
        """
        return Op("look_up")

    def row_grads(self, rows: dict[str, Tensor]) -> Op:
        """Takes the gradient of these rows, (n, width) by table, and returns it. `update` then skips these tables."""
        return Op("row_grads", rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> Op:
        """Steps these rows of a table by their gradient (n, width) at rate `lr`.

        The optimizer state of other rows stays; the step counter is the whole table's. A background of a rank that only
        serves may use it. It takes no time under a pace.
        """
        return Op("update_rows", table, rows, grad, lr)
