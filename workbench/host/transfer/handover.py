"""Hands the state of a run over from one strategy to the next.

First, `consolidate_state` averages drifted buffers and optimizer state over the ranks that trained. Then `spread_state`
moves the state to its placement under the next strategy. A rank that only served has only parameters.

The state is a dict by name. Optimizer state has names such as "exp_avg/NAME". It leaves out frozen parameters, which
are equal on all ranks, and each rank's own memory, such as residuals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from workbench.experiment.mesh_rules import list_shard_groups, make_mesh
from workbench.host.core.dropped_state import find_rule
from workbench.host.core.rank_view import RankView
from workbench.host.placement.canonical_state import (
    RankDisagreement,
    check_same,
    create_optimizer_state,
    flatten_tensors,
    scatter_back,
)
from workbench.host.placement.checksum import SUM_MASK, compute_checksum
from workbench.host.placement.move_state import State, move_state
from workbench.host.placement.optimizer_slots import make_slot_likes, put_slots, read_slots
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.placement import Held, Placement
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.optimizers import Optimizer as OptimizerSetting
from workbench.rank import Rank, can_average

if TYPE_CHECKING:
    from workbench.strategies import Strategy


def list_parameters(layout: ParameterLayout) -> State:
    """Returns views of the model."""
    return {place.name: place.param.data for place in layout.order}


def list_trainer_state(run: RankView) -> State:
    """Returns buffers and optimizer state by name. Those of ranks that did not train do not count."""
    return {**{name: b.data for name, b in run.model.named_buffers()}, **read_slots(run.layout, run.optimizer)}


def pick_replicas(run: RankView, numbers: list[int]) -> list[int]:
    """Picks from a list by rank the ranks with the same part of the model."""
    who = run.rank.replicas.within
    return numbers if who is None else [numbers[rank] for rank in who.ranks]


def list_replicas(run: RankView) -> list[int]:
    """Returns the numbers in the run of ranks with the same part."""
    return pick_replicas(run, [run.rank.number(place) for place in range(run.rank.size)])


def list_owners(run: RankView, strategy: Strategy) -> dict[str, int]:
    """Returns each table's owner, if `strategy` has owners."""
    names = run.rank.tables if strategy.tables else ()
    return {table: strategy.owner(k, run.rank.size) for k, table in enumerate(names)}


async def consolidate_state(run: RankView, strategy: Strategy) -> None:
    """Averages buffers and optimizer state over the ranks that trained.

    Diverged momenta would pull replicas apart again. Integers (counters, quantised moments) come from the first rank.
    Raises RankDisagreement if optimizer states differ in size.
    """
    rank, who = run.rank, make_mesh(strategy, run.rank.size)
    if rank.size == 1 or not (strategy.periodic or len(who.ranks) < rank.size):
        return
    own, apart = _count_elements(list_trainer_state(run)), list_owners(run, strategy)
    most = max(pick_replicas(run, await run.gather(own)))
    if own < most or (apart and most):  # no optimizer state yet, or missing tables
        create_optimizer_state(run.layout, run.optimizer)
    check_same(
        pick_replicas(run, await run.gather(_count_elements(list_trainer_state(run)))),
        "sizes of the optimizer state",
        list_replicas(run),
    )
    if not strategy.periodic or rank.id not in who.ranks or len(who.ranks) == 1:
        return
    group = rank.replicas if len(who.ranks) == rank.size else rank.group(*(name for name, _ in who.dims))
    drifted = prepare_drifting(run, run.experiment.optimizer, apart)
    await average_tensors(group, drifted, "optimizer state")


def prepare_drifting(run: RankView, optimizer: OptimizerSetting, apart: Collection[str] = ()) -> list[torch.Tensor]:
    """Leaves out tables `apart`. Zeroes slots with the rule "drop", which have no mean."""
    found = []
    for name, x in list_trainer_state(run).items():
        slot, _, of = name.rpartition("/")
        if x.numel() and of not in apart:
            found.append(x.zero_() if slot and find_rule(optimizer.own, slot) == "drop" else x)
    return found


async def average_tensors(group: Rank, drifted: list[torch.Tensor], name: str, among: Collection[int] = ()) -> None:
    """Averages tensors in place on all ranks of a group, over ranks `among` (none: all).

    Integers have no mean: every rank takes the first rank's.
    """
    first, count = min(among, default=0), len(among) or group.size
    floats = [x for x in drifted if can_average(x.dtype)]
    if floats:
        flat = flatten_tensors(floats).div_(count)
        if among and group.index not in among:
            flat.zero_()
        await group.all_reduce(flat, "sum", name)
        scatter_back(flat, floats)
    for x in drifted:
        if not can_average(x.dtype):
            whole = x.detach().reshape(-1).clone().view(torch.uint8)
            await group.broadcast(whole, first, "counters")
            scatter_back(whole.view(x.dtype), [x])


async def spread_state(run: RankView, strategy: Strategy) -> None:
    """Sends state to ranks that did not train, after `consolidate_state`."""
    trained = make_mesh(strategy, run.rank.size).ranks
    if len(trained) < run.rank.size:
        await send_missing(
            run, trained, len(_drop_empty(list_parameters(run.layout))), tuple(list_owners(run, strategy).items())
        )


async def send_missing(run: RankView, holders: tuple[int, ...], everywhere: int = 0,
                apart: tuple[tuple[str, int], ...] = ()) -> None:  # fmt: skip
    """Completes all ranks' state. holders: ranks that have it, `trained` in `_place_state`"""
    rank, state = run.rank, _drop_empty(list_parameters(run.layout)) | _drop_empty(list_trainer_state(run))
    sizes, everyone = tuple((name, x.numel()) for name, x in state.items()), tuple(range(rank.size))
    was = _place_state(sizes, everywhere, holders, rank.size, apart)
    to = _place_state(sizes, everywhere, everyone, rank.size)
    given = await move_state(
        rank, {name: state[name] for name in was.slices_of_rank(rank.id)}, was, to, everyone, state
    )
    with torch.no_grad():
        for name, x in state.items():
            if not x.is_meta and given[name] is not x:
                x.copy_(given[name].view(x.shape))


def _drop_empty(state: State) -> State:
    return {name: x for name, x in state.items() if x.numel()}


async def require_agreement(run: RankView) -> None:
    """Raises RankDisagreement unless all ranks hold the same parameters and optimizer state.

    Skips optimizer state in shards.
    """
    own = compute_checksum(list_parameters(run.layout))
    check_same(pick_replicas(run, await run.gather(own)), "after the switch the parameters", list_replicas(run))
    if find_shards(run, run.experiment.strategy) is None:
        own = compute_checksum(read_slots(run.layout, run.optimizer))
        check_same(
            pick_replicas(run, await run.gather(own)), "after the switch the optimizer's slots", list_replicas(run)
        )


@lru_cache(maxsize=8)  # for simulated ranks
def _place_state(sizes: tuple[tuple[str, int], ...], everywhere: int, trained: tuple[int, ...], size: int,
            apart: tuple[tuple[str, int], ...] = ()) -> Placement:  # fmt: skip
    """Places the first `everywhere` tensors on every rank, the other ones on the ranks that `trained`.

    apart: each table's owner; only it holds the table and its optimizer state
    """
    owner, held = dict(apart), {rank: dict[str, tuple[StridedSlice, ...]]() for rank in range(size)}
    for number, (name, n) in enumerate(sizes):
        of = name if number < everywhere else name.partition("/")[2]
        for rank in (owner[of],) if of in owner else range(size) if number < everywhere else trained:
            held[rank][name] = (StridedSlice(0, n),)
    return Placement(dict(sizes), held)


def _count_bytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for x in state.values())


def _count_elements(state: State) -> int:
    return sum(x.numel() for x in state.values())


# -- optimizer state in shards --


def find_shards(run: RankView, strategy: Strategy) -> ShardLayout | None:
    """Returns the shards of optimizer state. None: it is whole on every rank, or torch keeps it."""
    if strategy.opaque or "optimizer state" not in strategy.shards:
        return None
    if len((groups := list_shard_groups(strategy, run.rank.size))[0]) == 1:
        return None
    return ShardLayout(tuple(bucket.parts for bucket in run.layout.buckets), groups)


async def reshard_slots(run: ChangeView, was: ShardLayout | None, to: ShardLayout | None) -> None:
    """Moves optimizer state between shards. None: whole on every rank.

    From whole to shards it sends nothing. Raises RankDisagreement if the hash of the state has changed.
    """
    if was == to:
        return
    rank, layout = run.rank, run.layout
    some = {place.name for place in layout.order if place.numel}
    both = make_slot_likes(layout.order, run.optimizer), read_slots(layout, run.optimizer)
    like, here = ({name: x for name, x in each.items() if name.partition("/")[2] in some} for each in both)
    kept = await list_slots(run, like, here)
    sizes = tuple((place.name, place.numel) for place in layout.order)
    slots_of = tuple((name, bool(like[name].numel())) for name in kept)
    if was is None and layout.has_sizes_only:  # without values
        if run.memory_account.has_optimizer_state:
            run.memory_account.note_surge(
                sum(n * like[name].element_size() for name, n in _count_slot_elements(dict(sizes), slots_of).items())
            )
        return run.sharded(to)
    lies, comes = (place_slots(sizes, slots_of, one, rank.size) for one in (was, to))
    if layout.has_sizes_only:  # one optimizer stands for all ranks
        here = {name: like[name].new_empty(lies.count_elements(rank.id, name)) for name in lies.slices_of_rank(rank.id)}
    before = await sum_hashes(run, here, lies)
    given = await move_state(
        rank, {name: here[name] for name in lies.slices_of_rank(rank.id)}, lies, comes, range(rank.size), like
    )
    if run.memory_account.has_optimizer_state:
        run.memory_account.note_surge(_count_bytes(here))  # held in addition to `given`
    if await sum_hashes(run, given, comes) != before:
        raise RankDisagreement("the optimizer's state changed while ranks resharded it")
    if not layout.has_sizes_only:
        put_slots(layout, run.optimizer, given, like)
    run.sharded(to)


async def sum_hashes(run: RankView, state: State, lies: Placement) -> int:
    """Returns the hash of the state over all ranks. Each replica counts once, on the first rank that has it."""
    return sum(await run.gather(hash_state(run, state, lies))) & SUM_MASK


def hash_state(run: RankView, state: State, lies: Placement) -> int:
    """Returns this rank's part of `sum_hashes`."""
    me = run.rank.id
    if run.layout.has_sizes_only:
        return 0
    mine = {name: slices for name, slices in lies.slices_of_rank(me).items()
            if not any(lies.slices_of_rank(r).get(name) == slices for r in range(me))}  # fmt: skip
    return compute_checksum({name: state[name] for name in mine}, mine)


def count_slot_bytes(layout: ParameterLayout, optimizer: Optimizer, cut: ShardLayout, rank: int) -> int:
    """Returns the bytes of one rank's shard of optimizer state, after the first step."""
    like, numel = make_slot_likes(layout.order, optimizer), {place.name: place.numel for place in layout.order}
    mine = _find_shard(numel, tuple((name, bool(x.numel())) for name, x in like.items()), cut, rank)
    return sum(s.element_count * like[name].element_size() for name, slices in mine.items() for s in slices)


async def list_slots(run: RankView, like: State, here: State) -> list[str]:
    """Returns the names of slots that any rank has."""
    if not like:
        return []
    has = [name in here for name in like]
    known = run.layout.weights[0].new_zeros(len(has), dtype=torch.int32).copy_(torch.tensor(has))
    told = await run.rank.all_reduce(known, "max", "slots")
    if told.is_meta:
        return [name for name, there in zip(like, has, strict=True) if there]
    names = list(like)
    return [names[i] for i in told.nonzero().view(-1).tolist()]


@lru_cache(maxsize=8)  # for simulated ranks
def place_slots(sizes: tuple[tuple[str, int], ...], kept: tuple[tuple[str, bool], ...], cut: ShardLayout | None,
               size: int) -> Placement:  # fmt: skip
    """Places slots whole on every rank if `cut` is None, else in shards of buckets.

    A slot of one element, such as a counter, is on every rank with a piece of its parameter.
    """
    numel = dict(sizes)
    counts = _count_slot_elements(numel, kept)
    if cut is None:
        return Placement.place_whole(counts, range(size))
    return Placement(counts, {rank: _find_shard(numel, kept, cut, rank) for group in cut.groups for rank in group})


def _count_slot_elements(numel: Mapping[str, int], kept: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """kept: (slot, whether it has one element)"""
    return {name: 1 if whole else numel[name.partition("/")[2]] for name, whole in kept}


def _find_shard(numel: Mapping[str, int], kept: Iterable[tuple[str, bool]], cut: ShardLayout, rank: int) -> Held:
    group = next(group for group in cut.groups if rank in group)
    place, mine = group.index(rank), {}
    for parts in cut.buckets:
        names = [part.name for part in parts if part.stop > part.start]
        total, at = sum(numel[name] for name in names), 0
        chunk = -(-total // len(group))
        begin, end = min(chunk * place, total), min(chunk * (place + 1), total)
        for name in names:
            low, high = max(begin - at, 0), min(end - at, numel[name])
            if low < high:
                mine[name] = (StridedSlice(low, high - low),)
            at += numel[name]
    of = {name: name.partition("/")[2] for name, _ in kept}
    return {name: (StridedSlice(0, 1),) if whole else mine[of[name]] for name, whole in kept if of[name] in mine}
