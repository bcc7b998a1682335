"""Checks, wraps and orders the model of a rank."""

from __future__ import annotations

import gc
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.torch_ddp import (
    choose_options,
    convert_to_mib,
    remove_hooks,
    require_all_grads,
    wrap_model,
)
from workbench.engine.compute import shared_parameters
from workbench.engine.rank.views import ModelView
from workbench.experiment import Experiment, closure_rules, momentum_rules, sharding_rules, sparse_rules
from workbench.host.reconfigure import validation
from workbench.settings import KnobError


def explain_refusal(run: ModelView, strategy: Any) -> str | None:
    """Returns why the engine cannot run `strategy` here, with an alternative; None if it can."""
    if reason := shared_parameters.explain_refusal(strategy, run.rank.size, run.session.device, run.peers.local):
        return reason
    name = type(strategy).__name__
    if strategy.opaque and strategy.shards and (run.session.kind != "gloo" or run.session.device != "cpu"):
        return f"strategy={name}: torch's fully_shard was tried on CPUs over gloo only; take ZeRO3"
    if strategy.late_update and run.session.kind != "gloo":
        return (
            f"strategy={name}: over {run.session.kind} children run in the order of their start, and it has "
            f"priorities; take DDP"
        )
    if strategy.workers > 1 and run.session.device != "cpu":
        return (
            f"strategy={name}: workers={strategy.workers} have their parameters in the memory of their host, and "
            f"these are on {run.session.device}; take workers=1, or a lab with device='cpu'"
        )
    return None


def require_trainable(run: ModelView, wanted: Experiment) -> Experiment:
    """Returns `wanted`. Raises KnobError if the engine cannot run its strategy here, on this model."""
    made = partial(run.make_optimizer, wanted)
    if not wanted.fabric.algorithm.native and run.session.device != "cpu":
        raise KnobError(
            f"fabric.algorithm={type(wanted.fabric.algorithm).__name__}: its messages go through a host's memory, "
            f"and this run is on {run.session.device}; take Native(), or device='cpu'"
        )
    reason = (
        explain_refusal(run, wanted.strategy)
        or momentum_rules.explain_refusal(wanted, made)
        or sharding_rules.explain_refusal(wanted, made)
    )
    if reason := reason or sparse_rules.explain_refusal(wanted, made) or closure_rules.explain_refusal(wanted, made):
        raise KnobError(reason)
    validation.require_trainable(run, wanted)
    return wanted


def wrap_run_model(run: ModelView) -> None:
    """Wraps the model in torch's own DDP, or a copy in fully_shard. On an emulated Link both use our lane."""
    if run.peers.data is None:
        return
    run.host.hooks.detach_hooks()
    lane = run.lane if run.port.is_active else None
    if run.experiment.strategy.shards:
        from workbench.engine.baselines.fully_sharded import FullySharded  # takes a second to import

        fully = FullySharded(run, run.peers.data, lane)
        run.host.parts.wrap_model(fully.module, fully)
    else:
        options = choose_options(getattr(run.experiment.strategy, "find_unused_parameters", False))
        options["bucket_cap_mb"] = convert_to_mib(run.experiment.bucket_mb)
        with require_all_grads(run.layout):
            run.host.parts.wrap_model(wrap_model(run.model, run.peers.data, options, lane))


def unwrap_run_model(run: ModelView) -> None:
    """Makes forward call the model itself again."""
    remove_hooks(run.host.parts.module)
    fully = run.host.parts.unwrap_model()
    if fully is not None:
        fully.end()
        del fully
        gc.collect()  # torch's hooks and the copy reference each other, and keep shards and sockets


def _take_first_order(run: ModelView, order: Tensor) -> Tensor:
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
