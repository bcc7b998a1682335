"""Joins of new ranks: virtual ranks gather their state, and end their generation.

The rules are the engine's (`engine/rank/resizing.py`), without processes and without a store.
"""

from __future__ import annotations

from dataclasses import dataclass

from workbench.host.core.data_positions import count_used_up
from workbench.host.core.planned_event import PlannedEvent
from workbench.host.elastic.reentry import resize_experiment
from workbench.host.elastic.resizing import gather_state
from workbench.rank import Op
from workbench.settings import Json, KnobError
from workbench.settings.rank_text import format_ranks
from workbench.sim.rank.changes import Reconfigurable


@dataclass(frozen=True)
class JoinEvent(PlannedEvent):
    """New ranks join. new: their numbers"""

    new: tuple[int, ...] = ()


async def end_generation(run: Reconfigurable, join: JoinEvent) -> None:
    """Gathers the state and ends the generation, or records a Mark with the reason why no rank can join."""
    here = run.world.members
    try:
        wanted = run.require_trainable(
            resize_experiment(run.experiment, tuple(range(len(here))), len(here) + len(join.new))
        )
    except KnobError as error:
        if run.rank.id == 0:
            said: dict[str, Json] = {"path": "ranks", "value": len(here) + len(join.new)}
            run.mark("refused", said | {"reason": f"{format_ranks(join.new)} cannot come: {error}"})
        return
    with run.guard_step(True):
        if run.rollback is not None:
            run.rollback.begin_gathering()
        await gather_state(run, tuple(range(len(here))))
        used = await count_used_up(run)
        if run.rollback is not None:
            run.rollback.end_guard()
    del run.queue.taken[0]
    run.queue.count_obeyed()
    run.world.end_generation(join.new, wanted, used)
    await Op("park", lambda fiber: None, "the ranks that come")
