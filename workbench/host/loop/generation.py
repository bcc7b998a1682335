"""Begins a generation after other ranks were lost or new ranks came."""

from __future__ import annotations

import json

from workbench.host.elastic.carried_state import CarriedState
from workbench.host.elastic.reassembling import assemble_model
from workbench.host.elastic.reentry import Membership, agree_on_state, broadcast_momentum
from workbench.host.loop.bucket_order import split_state
from workbench.host.loop.entering_view import EnteringView
from workbench.host.reconfigure.changes import take_role
from workbench.host.reconfigure.unfreezing import freeze_parameters, unfreeze_parameters
from workbench.host.transfer import residual


def begin_generation(run: EnteringView) -> None:
    """Begins a generation. Its ranks can reach each other, but have exchanged nothing yet."""
    e = run.experiment
    run.set_fabric(e, e)
    take_role(run, e)
    run.reset_groups()
    residual.start_compressor(run)
    run.choose_lane()


async def train_in_generation(run: EnteringView, came: Membership) -> None:
    """Trains in a new generation to the last step."""
    if came.salvaged is not None:
        await assemble_model(run, came, run.carried.bounds, run.carried.former)
    run.carried = CarriedState(outer=run.carried.outer)
    await align_order(run)
    await agree_on_state(run, came)
    if len(came.members) > len(came.places):
        await run.rate.agree_on_factor(run)
        await run.non_finite_guard.agree_on_first_loss()
    await run.policy_runner.agree_on_changes()
    _start_strategy(run)
    await split_state(run, ahead=came.salvaged is not None)
    if run.experiment.strategy.has_outer and run.experiment.partition.size == 1:
        await broadcast_momentum(run, run.carried.outer, min(came.furthest))
    run.take_carried()
    await run.confirm_formed()
    run.set_phase("running")
    await run.run_steps()


async def align_order(run: EnteringView) -> None:
    """Gives all ranks rank 0's order of parameters and its frozen ones. A new rank knows neither."""
    here = [place.name for place in run.layout.order], run.layout.frozen_names
    names, frozen = json.loads(await run.broadcast_text(json.dumps(here) if run.rank.id == 0 else ""))
    unfreeze_parameters(run, names)
    freeze_parameters(run, frozen)
    if names != [place.name for place in run.layout.order]:
        await run.reorder_parameters(names)


def _start_strategy(run: EnteringView) -> None:
    run.rate.set_rate(run)
    run.enter_strategy(None, run.experiment)
    if run.experiment.strategy.opaque:
        run.enter_opaque()
    run.choose_lane()
    run.policy_runner.restart_plan()
    run.checkpointer.plan_next()
    run.memory_account.recount_standing()
