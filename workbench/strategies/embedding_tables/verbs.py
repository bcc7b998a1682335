"""The verbs for rows of embedding tables. Both hosts perform them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.rank import Op, Rank
from workbench.rank.verbs import list_verbs

if TYPE_CHECKING:
    from torch import Tensor


def look_up(rank: Rank) -> Op:
    """Returns the rows that the batch of this worker's next `forward()` reads, by embedding table.

    Each is `(n,)` int64, distinct and ascending. With sizes only, the rows of one batch stand for those of every batch.
    """
    return Op("look_up")


def row_grads(rank: Rank, rows: dict[str, Tensor]) -> Op:
    """Takes the gradient of these rows, `(n, width)` by table, and returns it. `update` then skips these tables."""
    return Op("row_grads", rows)


def update_rows(rank: Rank, table: str, rows: Tensor, grad: Tensor, lr: float) -> Op:
    """Steps these rows of a table by their gradient (n, width) at rate `lr`.

    The optimizer state of other rows stays; the step counter is the whole table's. A background of a rank that only
    serves may use it. It takes no time under a pace.
    """
    return Op("update_rows", table, rows, grad, lr)


VERBS = list_verbs(look_up, row_grads, update_rows)
