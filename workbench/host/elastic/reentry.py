"""How the remaining ranks agree on one state after a loss and begin a generation.

No strategy takes part, because its `leave` may need a lost rank. If replicas are equal after each step, a rank that is
behind takes the state of a furthest rank. If replicas drift apart, all ranks take the mean of the ranks that trained.
That mean contains the steps of a rank that lacks the newest mean, so this rank counts as if it stood there. Each rank's
own state follows its owner's rules ("The hand-over" in workbench/DESIGN.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from workbench.experiment import Experiment
from workbench.fabric import Fault
from workbench.host.placement.canonical_state import create_optimizer_state
from workbench.host.placement.replica_spread import find_spread
from workbench.host.transfer import handover, rank_state, residual
from workbench.host.transfer.change_view import ChangeView
from workbench.partitions import Partition, Whole
from workbench.settings import KnobError


class RecoverySource(NamedTuple):
    """Where a new generation finds a state that was in parts.

    was:     the experiment that laid the state out, on `size` ranks
    changes: how many changes had been made then
    sources: groups of new places; each group holds the whole state
    steps:   by new place, the step of its boundary; -1: it holds nothing that counts
    checkpoint: the checkpoint to which all ranks go back instead; "": none
    """

    was: Experiment
    changes: int
    size: int
    sources: tuple[tuple[int, ...], ...] = ()
    steps: tuple[int, ...] = ()
    checkpoint: str = ""


class Membership(NamedTuple):
    """How ranks came to a new generation, the same on all of them.

    members:  ranks' numbers in the run, by new place
    places:   places in the previous generation, by new place
    furthest: the places with the most steps and changes
    trained:  the places that trained and have the newest mean of all ranks
    salvaged: how a state in parts is assembled; None if nothing was in parts
    behind:   how many ranks trained and lack the newest mean
    """

    members: tuple[int, ...]
    places: tuple[int, ...]
    furthest: tuple[int, ...]
    trained: tuple[int, ...]
    step: int
    salvaged: RecoverySource | None = None
    behind: int = 0


def _keep_experiment(e: Experiment) -> Experiment:
    return e


def choose_survivors(
    e: Experiment, left: Sequence[int], able: Callable[[Experiment], Experiment] = _keep_experiment
) -> tuple[Experiment, tuple[int, ...]]:
    """Returns (`e` for the ranks that go on, their places): the first of `left`, as many as can train.

    If too few are left, a smaller partition or none replaces the old one. Raises KnobError if no number can train.

    left: previous places, preferred ones first
    able: raises KnobError if the model cannot be trained
    """
    reason: KnobError | None = None
    for way in _list_partitions(e.partition):
        for count in range(len(left), way.size - 1, -1):
            places = tuple(sorted(left[:count]))
            try:
                return able(resize_experiment(replace(e, partition=way), places)), places
            except KnobError as error:
                reason = reason or error
    raise KnobError(f"{len(left)} of {e.ranks} ranks are left, and these settings do not fit them: {reason}")


def _list_partitions(way: Partition) -> Iterator[Partition]:
    yield way
    yield from way.fewer()
    if way.size > 1:
        what, every = way.recompute
        yield Whole(checkpoint=what, checkpoint_every=every)


def resize_experiment(e: Experiment, places: tuple[int, ...], ranks: int = 0) -> Experiment:
    """Resizes `e`. Raises KnobError if so many ranks cannot train under it.

    places: previous places of ranks that stay; ranks: how many in all (0: no new ones)
    """
    faults = [f for f in e.fabric.faults if getattr(f, "rank", places[0]) in places]
    moved = tuple(_move_fault(f, places) for f in faults)
    return replace(e, ranks=ranks or len(places), fabric=replace(e.fabric, faults=moved)).checked()


def _move_fault(fault: Any, places: tuple[int, ...]) -> Fault:
    moved: Fault = replace(fault, rank=places.index(fault.rank)) if hasattr(fault, "rank") else fault
    return moved


async def agree_on_state(run: ChangeView, came: Membership) -> None:
    """All ranks of the new generation call it before their next step."""
    strategy = run.experiment.strategy
    residual.start_compressor(run)
    await rank_state.migrate_rank_state(run, None, find_spread(run.experiment, run.model, run.learner))
    if any(await run.gather(int(bool(run.optimizer.state)))):  # some have perhaps made no step
        create_optimizer_state(run.layout, run.optimizer)
    if strategy.periodic:
        state = [
            *handover.list_parameters(run.layout).values(),
            *handover.prepare_drifting(run, run.experiment.optimizer),
        ]
        await handover.average_tensors(run.rank, [x for x in state if x.numel()], "the remaining ranks", came.trained)
    elif len(came.furthest) < run.rank.size:
        await handover.send_missing(run, came.furthest)
    await handover.require_agreement(run)


async def broadcast_momentum(run: ChangeView, momentum: dict[str, Tensor] | None, first: int) -> None:
    """Broadcasts rank `first`'s outer momentum. Call it after the strategy has entered."""
    if not (await run.gather(int(bool(momentum))))[first]:
        return
    given = {}
    for place in run.layout.order:
        x = place.param.new_zeros(place.numel)
        if momentum is not None and place.name in momentum:
            x.copy_(momentum[place.name])
        given[place.name] = await run.rank.broadcast(x.detach(), first, "outer momentum")
    run.experiment.strategy.takes(run.rank.replicas, run.state, given)
