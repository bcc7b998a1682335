"""Parameters that a model unfreezes while it is trained: all ranks train them from the same step on.

Ranks that exchange gradients learn in a step which parameters some rank has unfrozen
(`host/sharding/parameter_usage.py`). All other ranks train such a parameter by themselves until they meet. Then they
take the mean of the parameter and of its optimizer state. Ranks without a common step meet for that.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Protocol

from workbench.experiment.mesh_rules import make_mesh
from workbench.host.passes.pipelining import drain_pipeline
from workbench.host.placement.canonical_state import create_optimizer_state
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.reconfigure.changes import make_state_canonical
from workbench.host.transfer import handover
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.state_layout import find_layout
from workbench.rank import StrategyError


class SteppedView(ChangeView, Protocol):
    """A rank after a step.

    is_asynchronous: whether ranks make steps without a meeting in every round
    has_met:         whether all ranks have exchanged something in this step
    """

    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def has_met(self) -> bool: ...


def unfreeze_parameters(run: ChangeView, names: Collection[str]) -> None:
    """Trains and lays out these parameters if they are frozen here.

    Changes nothing if the model lies on several ranks.
    """
    here = {place.name for place in run.layout.order}
    frozen = {name: p for name, p in run.model.named_parameters() if name in names and not p.requires_grad}
    more = {name: p for name, p in frozen.items() if name not in here}
    if run.spread is not None or not more:
        return
    for p in more.values():
        p.requires_grad_(True)
    run.lay_out_parameters(here | set(more), None)


def freeze_parameters(run: ChangeView, names: Collection[str]) -> None:
    """Other ranks, or those of a checkpoint, have frozen these parameters: they are frozen here from now on."""
    for name, p in run.model.named_parameters():
        if name in names:
            p.requires_grad_(False)


async def agree_on_unfrozen(run: ChangeView) -> None:
    """Between steps, when all ranks have met: all train what some rank has unfrozen.

    run: a RankLoop
    """
    usage = run.usage
    if not usage.frozen:
        return
    mine = json.dumps(found) if (found := usage.list_unfrozen()) else ""
    lengths = await run.gather(len(mine))
    names: set[str] = set()
    for by, length in enumerate(lengths):
        if length:
            names.update(json.loads(await run.broadcast_text(mine, by)))
    if names:
        await train_unfrozen(run, [name for name in usage.frozen if name in names], apart=True)


async def agree_in_common_step(run: ChangeView) -> None:
    """Agrees on what some rank has unfrozen, if ranks have a common step and have not agreed in that step."""
    if run.experiment.strategy.lockstep and not run.usage.settled:
        await agree_on_unfrozen(run)


async def train_unfrozen_in_step(run: SteppedView) -> None:
    """Trains what the model has unfrozen in this step, if the ranks have met in it."""
    usage = run.usage
    if names := list(usage.unfrozen):
        await train_unfrozen(run, names)
    elif not (run.is_asynchronous or usage.settled or usage.step is not None) and (run.has_met or run.rank.size == 1):
        await agree_on_unfrozen(run)


async def train_unfrozen(run: ChangeView, names: Sequence[str], apart: bool = False) -> None:
    """Ranks exchange, average and save these parameters like all others.

    apart: whether ranks have trained them by themselves; then all take their mean

    Leaves and enters the strategy again, to cut shards anew. Raises StrategyError if the model lies on several ranks.
    """
    e = run.experiment
    if run.spread is not None:
        raise StrategyError(
            f"parameter {names[0]}: was unfrozen while a replica takes several ranks "
            f"(partition={type(e.partition).__name__}); unfreeze it before the run, or take partition=Whole"
        )
    await drain_pipeline(run.micros_in_flight)
    if e.strategy.in_flight:
        await e.strategy.drain(run.rank.replicas, run.state)
    with run.record_switch(e, e):
        await make_state_canonical(run, e, e, find_layout(run, e.strategy).shards, ())
        momentum = e.strategy.hands_on(run.rank.replicas, run.state)
        run.lay_out_parameters({*(place.name for place in run.layout.order), *names}, None)
        if apart:
            await average_new(run, names)
        await run.unsharder.forget_trace()
        await handover.reshard_slots(run, None, handover.find_shards(run, e.strategy))
        run.enter_strategy(e, e)
        e.strategy.takes(run.rank.replicas, run.state, momentum)
        await handover.require_agreement(run)
        if e.strategy.opaque:
            run.enter_opaque()
        await run.unsharder.shard_parameters()
    run.choose_lane()
    if run.rank.id == 0:
        run.mark("unfrozen", {"names": [*names], "text": f"{', '.join(names)}: unfrozen, and trained from now on"})


async def average_new(run: ChangeView, names: Collection[str]) -> None:
    """Averages new parameters and their optimizer state."""
    rank, new = run.rank, [place for place in run.layout.order if place.name in names]
    for place in new:
        place.param.grad = None  # gradients of steps without an update
    stepped = await run.gather(sum(bool(run.optimizer.state.get(place.param)) for place in new))
    if any(stepped) and min(stepped) < len(new):
        create_optimizer_state(run.layout, run.optimizer)
    state = [x for name, x in read_slots(run.layout, run.optimizer).items() if name.partition("/")[2] in names]
    trained = make_mesh(run.experiment.strategy, rank.size).ranks
    among = trained if len(trained) < rank.size else ()
    await handover.average_tensors(rank.replicas, [place.param.data for place in new] + state, "unfrozen", among)
