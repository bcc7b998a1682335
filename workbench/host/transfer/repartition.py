"""Moves a model between partitions (stages, slices, whole, shards) between 2 steps.

Parameters, buffers and optimizer state move bit-identically. Shards move straight to new ranks: none gathers the whole
model. A parameter of another stage is absent (workbench.host.placement.unmaterialized).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from workbench.host.placement import sliced_parameter as sliced
from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.canonical_state import RankDisagreement
from workbench.host.placement.checksum import SUM_MASK
from workbench.host.placement.move_state import State, move_state
from workbench.host.placement.optimizer_slots import make_slot_likes, put_slots, read_slots
from workbench.host.placement.replica_spread import ReplicaSpread, place_replica
from workbench.host.placement.sliced_parameter import whole_numel, whole_shape
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.placement.transfer_plan import plan_transfers
from workbench.host.transfer.boundary import list_own_elements
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.handover import average_tensors, find_shards, hash_state, list_slots
from workbench.host.transfer.state_layout import WHOLE, StateLayout, place_tensors
from workbench.rank import StrategyError
from workbench.tasks import at_rate, rate

OUTER_PREFIX = "outer"  # a name's prefix


class _MovedState(NamedTuple):
    """State that moves.

    sizes: the elements of each tensor, the same on every rank
    like:  a tensor of each one's dtype
    here:  this rank's part
    slots: optimizer state by name, and whether each is one number for any size of its parameter
    """

    sizes: dict[str, int]
    like: State
    here: State
    slots: dict[str, bool]


class UnplacedState(NamedTuple):
    """State that the caller still has to place, of this rank's parameters by name.

    outer:  the outer momentum
    pieces: the shard of each parameter, flat, if parameters are sharded
    """

    outer: State | None
    pieces: State | None


async def repartition_state(
    run: ChangeView, was: StateLayout, to: StateLayout, outer: State | None = None
) -> UnplacedState:
    """All ranks call it at the same boundary. Replicas must be equal.

    Raises RankDisagreement if the hash of the state has changed.

    outer: the outer momentum of this rank's parameters, by name
    """
    rank, everyone, began = run.rank, range(run.rank.size), run.now
    await _average_buffers(run, was.spread)
    trained = {name: p for name, p in run.model.named_parameters() if p.requires_grad}
    what = await _collect_state(run, trained, outer, was)
    if was == WHOLE and to.spread is not None and run.layout.has_sizes_only:
        return await _cut_sizes(run, trained, what, to, began)
    lies, comes = (
        place_tensors(tuple(what.sizes.items()), tuple(what.slots.items()), each, rank.size) for each in (was, to)
    )
    if run.layout.has_sizes_only:
        here = {
            name: what.like[name].new_empty(lies.count_elements(rank.id, name)) for name in lies.slices_of_rank(rank.id)
        }
        what = what._replace(here=here)
    given, sums = State(), [0, 0]
    for names in _group_names(run, what) if was.shards or to.shards else [set(what.sizes)]:
        now, then = (each.select_names(names) if len(names) < len(what.sizes) else each for each in (lies, comes))
        own = {name: what.here[name] for name in now.slices_of_rank(rank.id)}
        new = await move_state(rank, own, now, then, everyone, {name: what.like[name] for name in names})
        sums = [sums[0] + hash_state(run, own, now), sums[1] + hash_state(run, new, then)]
        given |= new
    gone = [what.here[name] for name in lies.slices_of_rank(rank.id) if given.get(name) is not what.here[name]]
    run.memory_account.note_surge(sum(x.numel() * x.element_size() for x in gone))
    before, after = [sum(await run.gather(total & SUM_MASK)) for total in sums]
    if (before - after) & SUM_MASK:
        raise RankDisagreement("the model's state changed while ranks moved it to the new partition")
    mine = to.spread.select_trained(rank.id, set(trained)) if to.spread else set(trained)
    await _place_state(run, trained, given, mine, to, what)
    widths = {name: what.like[name].element_size() for name in comes.sizes}
    sent = (
        sum(map(sum, plan_transfers(lies, comes, everyone, widths).list_lengths(tuple(everyone))))
        if rank.id == 0
        else 0
    )
    _mark_partition(run, to, sent, began)
    return UnplacedState(
        _pick_momentum(given, mine), {name: given[name] for name in given if name in trained} if to.sharded else None
    )


def _group_names(run: ChangeView, what: _MovedState) -> Iterator[set[str]]:
    """Groups are about a bucket, to bound each rank's memory."""
    limit, names, nbytes = run.layout.bucket_mb * 1e6, set[str](), 0
    for name, n in what.sizes.items():
        names.add(name)
        nbytes += n * what.like[name].element_size()
        if nbytes >= limit:
            yield names
            names, nbytes = set(), 0
    if names:
        yield names


async def _cut_sizes(
    run: ChangeView, trained: dict[str, nn.Parameter], what: _MovedState, to: StateLayout, began: float
) -> UnplacedState:
    """Each rank has its part, so ranks send nothing."""
    rank, spread = run.rank, to.spread
    assert spread is not None
    wants = place_replica(tuple(what.sizes.items()), spread, len(spread)).slices_of_rank(rank.id % len(spread))
    stays = {name for name, slices in wants.items() if slices == (StridedSlice(0, what.sizes[name]),)}
    given = {name: what.like[name].new_empty(sum(s.element_count for s in slices)) for name, slices in wants.items()}
    run.memory_account.note_surge(
        sum(n * what.like[name].element_size() for name, n in what.sizes.items() if name not in stays)
    )
    mine = spread.select_trained(rank.id, set(trained))
    await _place_state(run, trained, given, mine, to, what)
    _mark_partition(run, to, 0, began)
    return UnplacedState(_pick_momentum(given, mine), None)


def _mark_partition(run: ChangeView, lies: StateLayout, nbytes: int, began: float) -> None:
    if run.rank.id == 0:
        to, whole = lies.spread, "ranks shard the model" if lies.sharded else "every rank holds the whole model"
        text = f"each replica is split into {to}" if to else whole
        stages, slices = len(to.stages) if to and to.stages else 1, to.split.ways if to and to.split else 1
        said = {"stages": stages, "slices": slices, "nbytes": nbytes, "seconds": run.now - began}
        run.mark("partition", said | {"text": text})


def _pick_momentum(given: State, mine: set[str]) -> State | None:
    return {name: given[f"{OUTER_PREFIX}/{name}"] for name in mine if f"{OUTER_PREFIX}/{name}" in given} or None


def _list_buffers(run: ChangeView) -> State:
    return {name: b for name, b in run.model.named_buffers() if b.numel()}


async def _average_buffers(run: ChangeView, was: ReplicaSpread | None) -> None:
    rank, here = run.rank, _list_buffers(run)
    if was and was.stages:
        stage, _ = was.locate_rank(rank.id)
        here = {name: b for name, b in here.items() if name in was.stages.names[stage]}
    if rank.replicas.size > 1 and here:
        await average_tensors(rank.replicas, list(here.values()), "buffers")


async def _collect_state(
    run: ChangeView, trained: dict[str, nn.Parameter], outer: State | None, was: StateLayout
) -> _MovedState:
    buffers, here = _list_buffers(run), read_slots(run.layout, run.optimizer)
    places = [ParameterPlace(name, p) for name, p in trained.items()]
    like = make_slot_likes(places, run.make_optimizer(run.experiment, list(trained.values())))
    kept = await list_slots(run, like, here)
    if run.layout.has_sizes_only:  # one optimizer for all ranks
        kept = list(like) if any(await run.gather(int(run.memory_account.has_optimizer_state))) else []
    sizes = {name: whole_numel(p) for name, p in trained.items()} | {name: b.numel() for name, b in buffers.items()}
    sizes |= {name: like[name].numel() or whole_numel(trained[name.partition("/")[2]]) for name in kept}
    like = {**{name: unmaterialized.read_data(p) for name, p in trained.items()}, **buffers, **like}
    here = list_own_elements(run.layout, was.shards if was.sharded else None, run.rank.id) | buffers | here
    if any(await run.gather(int(bool(outer)))):  # some have none yet
        wide = {name: torch.promote_types(p.dtype, torch.float32) for name, p in trained.items()}
        sizes |= {f"{OUTER_PREFIX}/{name}": whole_numel(p) for name, p in trained.items()}
        like |= {
            f"{OUTER_PREFIX}/{name}": torch.empty(0, dtype=wide[name], device=p.device) for name, p in trained.items()
        }
        for place in run.layout.order:
            none = torch.zeros(place.numel, dtype=wide[place.name], device=place.param.device)
            here[f"{OUTER_PREFIX}/{place.name}"] = (outer or {}).get(place.name, none).to(none.dtype)
    return _MovedState(sizes, like, here, {name: bool(like[name].numel()) for name in kept})


async def _place_state(run: ChangeView, trained: dict[str, nn.Parameter], given: State, mine: set[str], to: StateLayout,
                  what: _MovedState) -> None:  # fmt: skip
    """Leaves sharded parameters to the caller."""
    spread = to.spread
    run.unsharder.release_shards()
    if not run.layout.has_sizes_only:
        buffers = _list_buffers(run)
        with torch.no_grad():
            for name in buffers.keys() & given.keys():
                buffers[name].copy_(given[name].view(buffers[name].shape))
            followed = spread.select_followed(run.rank.id, set(trained)) if spread else set[str]()
            _place_parameters(trained, given, set() if to.sharded else mine, spread, followed)
        for p in trained.values() if to.sharded else ():
            unmaterialized.make_present(p)  # for other code they are present
    run.lay_out_parameters(mine, spread, not to.sharded)
    if to.order:
        await run.reorder_parameters(list(to.order))
    if to.shards is not None and find_shards(run, run.experiment.strategy) != to.shards:
        raise RankDisagreement("buckets do not match the ranks' shards")
    run.sharded(to.shards)
    if run.layout.has_sizes_only:
        return
    made = run.make_optimizer(run.experiment)
    if rate(made) != run.rank.lr:
        at_rate(made, run.rank.lr)
    run.use_optimizer(made)
    put_slots(run.layout, made, {name: given[name] for name in what.slots if name in given}, what.like)


def _place_parameters(trained: dict[str, nn.Parameter], given: State, mine: set[str], to: ReplicaSpread | None,
         followed: set[str]) -> None:  # fmt: skip
    """Sets `mine`, and makes all other parameters absent, except those `followed`, which another rank trains."""
    for name, p in trained.items():
        shape = whole_shape(p)
        if name in mine:
            unmaterialized.make_present(p)
            sliced.set_slice(p, given[name].view(to.shape_of_part(name, shape) if to else shape), shape)
        elif name in followed:
            unmaterialized.make_present(p)
            sliced.set_slice(p, given.get(name, torch.empty(shape, dtype=p.dtype, device=p.device)).view(shape), shape)
        else:
            nothing = unmaterialized.read_data(p).new_full((), torch.nan).expand(shape)
            unmaterialized.make_absent(p, _raise_absent)
            with unmaterialized.prevent_fetches():
                sliced.set_slice(p, nothing, shape)


def _raise_absent(params: list[nn.Parameter], others: list[nn.Parameter]) -> None:
    shape = tuple(params[0].shape)
    raise StrategyError(
        f"a parameter of shape {shape} is read, and it is on another stage. Parts of a pipeline and `evaluate` may "
        f"read a model only by calling it: move the parameter to the part that reads it, or take partition=Whole()"
    )
