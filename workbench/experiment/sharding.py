"""Whose optimizer must step each element by itself: that of a strategy in shards, and of matrices in slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.experiment.momentum import tried
from workbench.optimizers import elementwise

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment


def refused(e: Experiment, made: Callable[[], Any] | None = None) -> str | None:
    """Why `e`'s optimizer cannot be shared out as `e`'s strategy wants, in a sentence that says what would do; or None.

    made: makes `e`'s optimizer for its model; without it nothing is said of a task's own, which shows only then.
    """
    sliced = e.partition.slices > 1
    if not (e.strategy.shards or sliced or e.strategy.tables) or e.ranks == 1 or (made is None and e.optimizer.of_task):
        return None
    if elementwise(optimizer := (made or tried(e))()):
        return None
    if sliced:
        return (
            f"partition={type(e.partition).__name__}: ranks have slices of each matrix, and {type(optimizer).__name__} "
            f"is not known to step each element by itself; take optimizer=AdamW() or SGD(), let the class of your own "
            f"say `elementwise = True`, or take another partition"
        )
    if e.strategy.tables:
        return (
            f"strategy={type(e.strategy).__name__}: servers step single rows of a table, and "
            f"{type(optimizer).__name__} is not known to step each element by itself; take optimizer=AdamW() or SGD(), "
            f"let the class of your own say `elementwise = True`, or use ShadowEASGD"
        )
    return (
        f"strategy={type(e.strategy).__name__}: it shares out the optimizer's state element by element, and "
        f"{type(optimizer).__name__} is not known to step each element by itself; take optimizer=AdamW() or SGD(), let "
        f"the class of your own say `elementwise = True`, or use DDP"
    )
