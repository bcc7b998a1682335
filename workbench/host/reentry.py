"""How a run goes on without ranks that it has lost: those that are left agree on one state, and begin a generation.

No strategy takes part: what it would do in `leave` may need a rank that is gone. Where replicas are equal after each
step, who is behind takes the state of one that is furthest. Where they drift apart, all take the mean of those that
trained, as at a switch. What each rank has of its own goes by the rules that its owner declares ("The hand-over" in
workbench/DESIGN.md); a strategy begins as it does when it is switched to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from workbench.experiment import Experiment
from workbench.host import handover, own, residual
from workbench.host.canonical import prime
from workbench.host.changing import Changing
from workbench.settings import KnobError


class Came(NamedTuple):
    """How ranks came to a new generation, the same on all of them.

    members:  by place from now on, the number that a rank has had from the run's beginning
    places:   by place from now on, the place that it had in the generation before
    furthest: the places of those who have made as many steps and changes as anybody
    trained:  the places of those who trained; others only served
    step:     the step that comes next
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    furthest: tuple[int, ...]
    trained: tuple[int, ...]
    step: int


def unfit(e: Experiment) -> str:
    """What of `e` does not outlive a rank, in words; "" where everything does."""
    name = type(e.strategy).__name__
    if e.partition.size > 1:
        return f"under partition={type(e.partition).__name__} a part of a replica is gone with its rank"
    if e.strategy.shards:
        return f"under strategy={name} nobody else has the rank's shard"
    if e.strategy.tables:
        return f"under strategy={name} a server's tables are gone with it"
    return ""


def fitting(e: Experiment, left: Sequence[int]) -> tuple[Experiment, tuple[int, ...]]:
    """As many of those who are `left`, the first of them, as can train as `e` says: (`e` for these, their places).

    left: places before, those first who are to stay. Raises KnobError where no number of them can.
    """
    reason: KnobError | None = None
    for count in range(len(left), 0, -1):
        places = tuple(sorted(left[:count]))
        try:
            return fewer(e, places), places
        except KnobError as error:
            reason = reason or error
    raise KnobError(f"{len(left)} of {e.ranks} ranks are left, and cannot go on so: {reason}")


def fewer(e: Experiment, places: tuple[int, ...], ranks: int = 0) -> Experiment:
    """`e` for those who are left, by their places before, and for those who come, so many `ranks` in all.

    Raises KnobError where so many cannot train as `e` says.
    """
    faults = [f for f in e.fabric.faults if getattr(f, "rank", places[0]) in places]
    moved = tuple(_at(f, places) for f in faults)
    return replace(e, ranks=ranks or len(places), fabric=replace(e.fabric, faults=moved)).checked()


def _at(fault: Any, places: tuple[int, ...]) -> Any:
    return replace(fault, rank=places.index(fault.rank)) if hasattr(fault, "rank") else fault


async def reenter(run: Changing, came: Came) -> None:
    """All ranks of the new generation ask for it together, before their next step."""
    strategy = run.experiment.strategy
    residual.begin(run)
    await own.carry(run, None, None)
    if any(await run.gather(int(bool(run.optimizer.state)))):  # some may be yet to make their first step
        prime(run.layout, run.optimizer)
    if strategy.periodic:
        state = [*handover.parameters(run.layout).values(), *handover.drifting(run, run.experiment.optimizer)]
        await handover.averaged(run.rank, [x for x in state if x.numel()], "those who are left", came.trained)
    elif len(came.furthest) < run.rank.size:
        await handover.bring(run, came.furthest)
    await handover.check(run)
