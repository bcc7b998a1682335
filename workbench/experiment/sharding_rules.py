"""Checks that the optimizer is element-wise if a strategy shards or a partition slices."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.experiment.momentum_rules import make_trial
from workbench.optimizers import elementwise

if TYPE_CHECKING:
    from workbench.experiment.views import ExperimentView


def explain_refusal(e: ExperimentView, made: Callable[[], Any] | None = None) -> str | None:
    """Returns why `e` cannot shard its optimizer, with a remedy; or None.

    made: makes `e`'s optimizer for its model. Without it a task's own optimizer passes
    """
    sliced = e.partition.slices > 1
    if not (e.strategy.shards or sliced or e.strategy.tables) or e.ranks == 1 or (made is None and e.optimizer.of_task):
        return None
    if elementwise(optimizer := (made or make_trial(e))()):
        return None
    if sliced:
        return (
            f"partition={type(e.partition).__name__}: ranks hold slices of each matrix, and "
            f"{type(optimizer).__name__} is not known to step each element by itself; take optimizer=AdamW() "
            f"or SGD(), set `elementwise = True` in your own class, or take another partition"
        )
    if e.strategy.tables:
        return (
            f"strategy={type(e.strategy).__name__}: servers step single rows of a table, and "
            f"{type(optimizer).__name__} is not known to step each element by itself; take optimizer=AdamW() "
            f"or SGD(), set `elementwise = True` in your own class, or use ShadowEASGD"
        )
    return (
        f"strategy={type(e.strategy).__name__}: it shards the optimizer's state by element, and "
        f"{type(optimizer).__name__} is not known to step each element by itself; take optimizer=AdamW() or "
        f"SGD(), set `elementwise = True` in your own class, or use DDP"
    )
