"""Refuses what the engine cannot train on this rank's device, wires and model."""

from __future__ import annotations

from functools import partial
from typing import Any

from workbench.engine.compute import shared_parameters
from workbench.engine.rank.views import ModelView
from workbench.experiment import Experiment, closures, momentum, sharding, sparse
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
    reason = explain_refusal(run, wanted.strategy) or momentum.refused(wanted, made) or sharding.refused(wanted, made)
    if reason := reason or sparse.refused(wanted, made) or closures.refused(wanted, made):
        raise KnobError(reason)
    validation.require_trainable(run, wanted)
    return wanted
