"""Reassembles a model that was divided among ranks, after a loss.

Every rank of a complete group gets the whole model from the pieces of one boundary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from workbench.host.checkpoint.whole_state import RecoveryCheckpoint, load_whole_state
from workbench.host.elastic.reentry import Membership
from workbench.host.placement.move_state import State, move_state
from workbench.host.placement.optimizer_slots import make_slot_likes, put_slots
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.placement import Placement
from workbench.host.placement.replica_spread import find_spread
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer import handover
from workbench.host.transfer.boundary import Boundary, list_held_slices
from workbench.host.transfer.change_view import ChangeView


async def assemble_model(
    run: ChangeView, came: Membership, bounds: Sequence[Boundary], former: RecoveryCheckpoint | None
) -> None:
    """All ranks of a new generation call it. Their models have memory but no values.

    bounds: the boundary that this rank goes back to; former: the checkpoint that all ranks go back to instead
    """
    salvaged = came.salvaged
    assert salvaged is not None
    if former is not None:
        return load_whole_state(run, former)
    mine = bounds[0] if bounds else None
    sizes, like, slots = await _measure_tensors(run, mine)
    spread = find_spread(salvaged.was, run.model, run.learner)
    kept = {name: bool(like[name].numel()) for name in slots}
    cut, sharded = (mine.cut, mine.sharded) if mine is not None else (None, False)
    me, own = run.rank.id, next((k for k, group in enumerate(salvaged.sources) if run.rank.id in group), None)
    lies: dict[int, dict[str, tuple[StridedSlice, ...]]] = {}
    comes: dict[int, dict[str, tuple[StridedSlice, ...]]] = {}
    names: dict[str, int] = {}
    for k, group in enumerate(salvaged.sources):
        names |= {f"{k}:{name}": n for name, n in sizes.items()}
        for place in group:
            here = list_held_slices(came.places[place], salvaged.size, sizes, kept, spread, cut, sharded)
            lies[place] = {f"{k}:{name}": slices for name, slices in here.items()}
            comes[place] = {f"{k}:{name}": (StridedSlice(0, n),) for name, n in sizes.items()}
    was, to = Placement(names, lies), Placement(names, comes)
    state = {name: _find_values(mine, name, was.count_elements(me, name), like) for name in was.slices_of_rank(me)}
    alike = {name: like[name.partition(":")[2]] for name in names}
    given = await move_state(run.rank, state, was, to, range(run.rank.size), alike)
    if own is not None:
        _load_values(run, {name.partition(":")[2]: x for name, x in given.items()}, set(slots), like)


async def _measure_tensors(run: ChangeView, mine: Boundary | None) -> tuple[dict[str, int], State, list[str]]:
    layout: ParameterLayout = run.layout
    like = {place.name: place.param.data.new_empty(0) for place in layout.order}
    sizes = {place.name: place.numel for place in sorted(layout.order, key=lambda place: place.name)}
    buffers = {name: x for name, x in run.model.named_buffers() if x.numel()}
    sizes |= {name: x.numel() for name, x in buffers.items()}
    of = make_slot_likes(layout.order, run.optimizer)
    slots = await _list_slots(run, of, mine.state if mine is not None else {})
    sizes |= {name: of[name].numel() or sizes[name.partition("/")[2]] for name in slots}
    return sizes, {**like, **{name: x.new_empty(0) for name, x in buffers.items()}, **of}, slots


async def _list_slots(run: ChangeView, like: State, here: State) -> list[str]:
    """With sizes only, returns all or none."""
    if not run.layout.has_sizes_only:
        return await handover.list_slots(run, like, here)
    return list(like) if any(await run.gather(int(any(name in here for name in like)))) else []


def _find_values(mine: Boundary | None, name: str, n: int, like: State) -> torch.Tensor:
    of = name.partition(":")[2]
    found = mine.state.get(of) if mine is not None else None
    return like[of].new_zeros(n) if found is None or found.is_meta else found


def _load_values(run: ChangeView, given: State, slots: set[str], like: State) -> None:
    with torch.no_grad():
        for place in run.layout.order:
            place.param.data.copy_(given[place.name].view(place.param.shape))
        for name, x in run.model.named_buffers():
            if name in given:
                x.copy_(given[name].view(x.shape))
    put_slots(run.layout, run.optimizer, {name: x for name, x in given.items() if name in slots}, like)
