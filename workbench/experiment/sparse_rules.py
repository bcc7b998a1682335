"""Checks that the strategy keeps gradients sparse if the optimizer is SparseAdam."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import SparseAdam

if TYPE_CHECKING:
    from workbench.experiment.experiment import Experiment


def explain_refusal(e: Experiment, made: Callable[[], Any]) -> str | None:
    """Returns why `e`'s optimizer does not accept the gradients of `e`'s strategy; or None.

    made: makes `e`'s optimizer for its model
    """
    strategy = e.strategy
    if strategy.exchanges not in ("gradients", "moments") or (strategy.opaque and not strategy.shards):
        return None
    optimizer = made()
    if not any(issubclass(kind, SparseAdam) for kind in getattr(optimizer, "classes", [type(optimizer)])):
        return None
    name = type(strategy).__name__
    return (
        f"strategy={name}: SparseAdam takes sparse gradients only, and {name} sums gradients in dense buckets; take "
        f"TorchDDP or LocalSGD, or the optimizer Adam"
    )
