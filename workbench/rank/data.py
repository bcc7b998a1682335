"""The verbs of a Rank about what it draws, and about embedding tables, of which a batch reads a few rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.rank.awaitables import Op

if TYPE_CHECKING:
    from torch import Tensor


class Data:
    """The part of a Rank that draws batches, and looks up rows of tables and steps them."""

    # data and embedding tables
    def batch(self) -> Op:
        """The next batch of this rank's data, to be looked at before `forward(batch)`."""
        return Op("batch")

    def client(self, index: int, count: int) -> Op:
        """Batches are now those of client `index` of `count` on this rank, dealt as to `count` times as many ranks."""
        return Op("client", index, count)

    def look_up(self) -> Op:
        """-> by embedding table which of its rows the batch reads that this worker's next `forward()` is about.

        (n,) int64 each, distinct, ascending. With sizes only the rows of one batch stand for those of all.
        """
        return Op("look_up")

    def row_grads(self, rows: dict[str, Tensor]) -> Op:
        """-> by table the gradient of these rows, (n, width). It is used up: `update` leaves these tables alone."""
        return Op("row_grads", rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> Op:
        """One step of the optimizer, at the rate `lr`, of these rows of a table, with their gradient (n, width).

        What it remembers of other rows stays as it is, and its step counter is the table's. A background of a rank that
        only serves may ask for it, too; it takes no time under a pace.
        """
        return Op("update_rows", table, rows, grad, lr)
