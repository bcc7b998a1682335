"""Gives all ranks that hold the same part of the model one order of gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.engine.rank.views import ModelView


def _take_first_order(run: ModelView, order: Tensor) -> Tensor:
    """Returns the order of the first rank that holds the same part of the model as this rank."""
    assert run.control is not None
    if run.spread is None:
        run.control.wait(run.control.broadcast(order, 0))
        return order
    trained = {name for name, p in run.model.named_parameters() if p.requires_grad}
    for place in range(len(run.spread)):
        count = len(run.spread.select_trained(place, trained))
        said = order if place == run.rank.id % len(run.spread) else torch.empty(count, dtype=torch.int64)
        run.control.wait(run.control.broadcast(said, place))
    return order


def take_first_names(run: ModelView, names: list[str]) -> list[str]:
    """Returns one order of gradients: rank 0's, or that of the first rank that holds the same parts."""
    index = {p.name: i for i, p in enumerate(run.layout.order)}
    order = torch.tensor([index[n] for n in names], dtype=torch.int64)
    if run.control is not None:
        run.take_early_requests()
        order = _take_first_order(run, order)
    return [run.layout.order[i].name for i in order.tolist()]


def adopt_order(run: ModelView, names: list[str]) -> None:
    """Lays parameters out in this order once, as torch's DDP does."""
    run.host.hooks.detach_hooks()
    run.shared.share_again(lambda: run.layout.reorder_buckets(names))
    run.mark_buckets()
