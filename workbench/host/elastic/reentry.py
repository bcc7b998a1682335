"""How a run goes on without ranks that it has lost: those that are left agree on one state, and begin a generation.

No strategy takes part: what it would do in `leave` may need a rank that is gone. Where replicas are equal after each
step, who is behind takes the state of one that is furthest. Where they drift apart, all take the mean of those that
trained, as at a switch. A rank that lacks the newest mean of all ranks counts as if it stood at that mean, which has
its steps already. What each rank has of its own goes by the rules that its owner declares ("The hand-over" in
workbench/DESIGN.md); a strategy begins as it does when it is switched to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from workbench.experiment import Experiment
from workbench.host.core.changing import Changing
from workbench.host.placement.canonical import prime
from workbench.host.placement.spread import spread_of
from workbench.host.transfer import handover, own, residual
from workbench.partitions import Partition, Whole
from workbench.settings import KnobError


class Salvaged(NamedTuple):
    """From where those of a new generation have what lay in parts of which some are lost.

    was:     the settings by which it lay, and of how many ranks (`size`)
    changes: how many had been made then
    sources: places, from now on, which together have all of it, group by group
    steps:   by place from now on, the step of the boundary that it goes back to; -1: it has nothing that counts
    saved:   the checkpoint that all go back to instead; "" where they need none
    """

    was: Experiment
    changes: int
    size: int
    sources: tuple[tuple[int, ...], ...] = ()
    steps: tuple[int, ...] = ()
    saved: str = ""


class Came(NamedTuple):
    """How ranks came to a new generation, the same on all of them.

    members:  by place from now on, the number that a rank has had from the run's beginning
    places:   by place from now on, the place that it had in the generation before
    furthest: the places of those who have made as many steps and changes as anybody
    trained:  the places of those who trained and have the newest mean of all ranks; others only served, or lack it
    step:     the step that comes next
    salvaged: how what lay in parts is put together again; None where nothing did
    behind:   how many ranks trained and lack the newest mean
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    furthest: tuple[int, ...]
    trained: tuple[int, ...]
    step: int
    salvaged: Salvaged | None = None
    behind: int = 0


def _as_it_is(e: Experiment) -> Experiment:
    return e


def fitting(e: Experiment, left: Sequence[int],
            able: Callable[[Experiment], Experiment] = _as_it_is) -> tuple[Experiment, tuple[int, ...]]:  # fmt: skip
    """As many of those who are `left`, the first of them, as can train as `e` says: (`e` for these, their places).

    left: places before, those first who are to stay; able: raises KnobError where the model cannot be trained so

    A partition that takes more ranks than are left becomes one that takes fewer, or none. Raises KnobError where no
    number of them can.
    """
    reason: KnobError | None = None
    for way in _ways(e.partition):
        for count in range(len(left), way.size - 1, -1):
            places = tuple(sorted(left[:count]))
            try:
                return able(fewer(replace(e, partition=way), places)), places
            except KnobError as error:
                reason = reason or error
    raise KnobError(f"{len(left)} of {e.ranks} ranks are left, and cannot go on so: {reason}")


def _ways(way: Partition) -> Iterator[Partition]:
    """How a replica may lie instead, as it does first."""
    yield way
    yield from way.fewer()
    if way.size > 1:
        what, every = way.recompute
        yield Whole(checkpoint=what, checkpoint_every=every)


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
    await own.carry(run, None, spread_of(run.experiment, run.model, run.learner))
    if any(await run.gather(int(bool(run.optimizer.state)))):  # some may be yet to make their first step
        prime(run.layout, run.optimizer)
    if strategy.periodic:
        state = [*handover.parameters(run.layout).values(), *handover.drifting(run, run.experiment.optimizer)]
        await handover.averaged(run.rank, [x for x in state if x.numel()], "those who are left", came.trained)
    elif len(came.furthest) < run.rank.size:
        await handover.bring(run, came.furthest)
    await handover.check(run)


async def hand_on(run: Changing, momentum: dict[str, Tensor] | None, first: int) -> None:
    """All go on with the outer momentum of the rank `first`, if that has one; the strategy has taken over by then."""
    if not (await run.gather(int(bool(momentum))))[first]:
        return
    given = {}
    for place in run.layout.order:
        x = place.param.new_zeros(place.numel)
        if momentum is not None and place.name in momentum:
            x.copy_(momentum[place.name])
        given[place.name] = await run.rank.broadcast(x.detach(), first, "outer momentum")
    run.experiment.strategy.takes(run.rank.replicas, run.state, given)
