"""Refuses optimizers whose step needs a closure. A rank computes its loss once per step."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment


def explain_refusal(e: Experiment, made: Callable[[], Any]) -> str | None:
    """Returns why a rank's step cannot use `e`'s optimizer (as LBFGS, which computes the loss again); or None.

    made: makes `e`'s optimizer for its model
    """
    if e.task.has_own_loop:
        return None
    optimizer = made()
    asks = inspect.signature(type(optimizer).step).parameters.get("closure")
    if asks is None or asks.default is not inspect.Parameter.empty:
        return None
    name = type(optimizer).__name__
    return (
        f"optimizer={name}: it computes the loss several times per step by a closure, but a rank computes it once. "
        f"Take optimizer=AdamW(), or strategy=Newton() for second-order steps"
    )
