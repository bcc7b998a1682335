"""Hands the state of a run over from one strategy to the next.

First, `consolidate` averages buffers and optimizer state over the ranks that trained, if these have drifted apart. Then
`spread` moves the state from its placement under one strategy to its placement under the next, by one `move`. A rank
that only served has the parameters, but no buffers and no optimizer state.

The state is a dict by name. Parameters and buffers keep their names. Optimizer state has names such as "exp_avg/NAME"
and "step/NAME". Frozen parameters are not in it because they are equal on all ranks. Neither is each rank's own memory,
such as residuals.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch.optim import Optimizer

from workbench.experiment.arranged import mesh, sharers
from workbench.host.core.remembered import rule
from workbench.host.core.views import RankView
from workbench.host.placement.canonical import Disagreement, check_same, flattened, prime, scatter_back
from workbench.host.placement.checksum import MASK, checksum
from workbench.host.placement.layout import Layout
from workbench.host.placement.move import State, move
from workbench.host.placement.placement import Held, Placement
from workbench.host.placement.slices import Slice
from workbench.host.placement.slots import likes, put, slots
from workbench.host.transfer.shards import Cut
from workbench.host.transfer.views import Changing
from workbench.optimizers import Optimizer as OptimizerSetting
from workbench.rank import Rank, can_average

if TYPE_CHECKING:
    from workbench.strategies import Strategy


def parameters(layout: Layout) -> State:
    """Returns the trained parameters by name, as views: writing into them changes the model."""
    return {place.name: place.param.data for place in layout.order}


def beside(run: RankView) -> State:
    """Returns the state that only ranks that train have: buffers and optimizer state."""
    return {**{name: b.data for name, b in run.model.named_buffers()}, **slots(run.layout, run.optimizer)}


def alike(run: RankView, numbers: list[int]) -> list[int]:
    """Picks from a list by rank the numbers of the ranks that hold the same part of the model as this rank."""
    who = run.rank.replicas.within
    return numbers if who is None else [numbers[rank] for rank in who.ranks]


def names(run: RankView) -> list[int]:
    """The numbers in the run of the ranks that `alike` picks."""
    return alike(run, [run.rank.number(place) for place in range(run.rank.size)])


def owners(run: RankView, strategy: Strategy) -> dict[str, int]:
    """Returns the owner of each embedding table, if `strategy` keeps each table on one rank."""
    names = run.rank.tables if strategy.tables else ()
    return {table: strategy.owner(k, run.rank.size) for k, table in enumerate(names)}


async def consolidate(run: RankView, strategy: Strategy) -> None:
    """Averages buffers and optimizer state over the ranks that trained under `strategy`.

    Otherwise diverged momenta would pull replicas apart again. Integers (counters, quantised moments) are taken from
    the first rank. Raises Disagreement if optimizer states differ in size.
    """
    rank, who = run.rank, mesh(strategy, run.rank.size)
    if rank.size == 1 or not (strategy.periodic or len(who.ranks) < rank.size):
        return
    own, apart = _numel(beside(run)), owners(run, strategy)
    most = max(alike(run, await run.gather(own)))
    if own < most or (apart and most):  # it has no optimizer state yet, or lacks other ranks' tables
        prime(run.layout, run.optimizer)
    check_same(alike(run, await run.gather(_numel(beside(run)))), "sizes of the optimizer state", names(run))
    if not strategy.periodic or rank.id not in who.ranks or len(who.ranks) == 1:
        return
    group = rank.replicas if len(who.ranks) == rank.size else rank.group(*(name for name, _ in who.dims))
    drifted = drifting(run, run.experiment.optimizer, apart)
    await averaged(group, drifted, "optimizer state")


def drifting(run: RankView, optimizer: OptimizerSetting, apart: Collection[str] = ()) -> list[torch.Tensor]:
    """Returns the tensors of `beside` without tables `apart`. Zeroes slots with the rule "drop", which have no mean."""
    found = []
    for name, x in beside(run).items():
        slot, _, of = name.rpartition("/")
        if x.numel() and of not in apart:
            found.append(x.zero_() if slot and rule(optimizer.own, slot) == "drop" else x)
    return found


async def averaged(group: Rank, drifted: list[torch.Tensor], name: str, among: Collection[int] = ()) -> None:
    """Replaces tensors on all ranks of a group by the mean over ranks `among` (none: all). Works in place.

    Integers have no mean: every rank takes those of the first rank.
    """
    first, count = min(among, default=0), len(among) or group.size
    floats = [x for x in drifted if can_average(x.dtype)]
    if floats:
        flat = flattened(floats).div_(count)
        if among and group.index not in among:
            flat.zero_()
        await group.all_reduce(flat, "sum", name)
        scatter_back(flat, floats)
    for x in drifted:
        if not can_average(x.dtype):
            whole = x.detach().reshape(-1).clone().view(torch.uint8)
            await group.broadcast(whole, first, "counters")
            scatter_back(whole.view(x.dtype), [x])


async def spread(run: RankView, strategy: Strategy) -> None:
    """Gives every rank the state that it lacks. Sends nothing if no rank lacks any. Runs after `consolidate`."""
    trained = mesh(strategy, run.rank.size).ranks
    if len(trained) < run.rank.size:
        await bring(run, trained, len(_present(parameters(run.layout))), tuple(owners(run, strategy).items()))


async def bring(run: RankView, holders: tuple[int, ...], everywhere: int = 0,
                apart: tuple[tuple[str, int], ...] = ()) -> None:  # fmt: skip
    """Gives every rank the state of `holders` that it lacks. See `_placed` for the other arguments."""
    rank, state = run.rank, _present(parameters(run.layout)) | _present(beside(run))
    sizes, everyone = tuple((name, x.numel()) for name, x in state.items()), tuple(range(rank.size))
    was = _placed(sizes, everywhere, holders, rank.size, apart)
    to = _placed(sizes, everywhere, everyone, rank.size)
    given = await move(rank, {name: state[name] for name in was.at(rank.id)}, was, to, everyone, state)
    with torch.no_grad():
        for name, x in state.items():
            if not x.is_meta and given[name] is not x:
                x.copy_(given[name].view(x.shape))


def _present(state: State) -> State:
    return {name: x for name, x in state.items() if x.numel()}


async def check(run: RankView) -> None:
    """Raises Disagreement unless all ranks hold the same parameters and the same optimizer state.

    It skips optimizer state in shards.
    """
    own = checksum(parameters(run.layout))
    check_same(alike(run, await run.gather(own)), "after the switch the parameters", names(run))
    if cut(run, run.experiment.strategy) is None:
        own = checksum(slots(run.layout, run.optimizer))
        check_same(alike(run, await run.gather(own)), "after the switch the optimizer's slots", names(run))


@lru_cache(maxsize=8)  # all ranks of a simulation need the same one
def _placed(sizes: tuple[tuple[str, int], ...], everywhere: int, trained: tuple[int, ...], size: int,
            apart: tuple[tuple[str, int], ...] = ()) -> Placement:  # fmt: skip
    """Places the first `everywhere` tensors on every rank, and the other tensors on the ranks that `trained`.

    apart: the owner of each table. Only the owner holds the table and its optimizer state.
    """
    owner, held = dict(apart), {rank: dict[str, tuple[Slice, ...]]() for rank in range(size)}
    for number, (name, n) in enumerate(sizes):
        of = name if number < everywhere else name.partition("/")[2]
        for rank in (owner[of],) if of in owner else range(size) if number < everywhere else trained:
            held[rank][name] = (Slice(0, n),)
    return Placement(dict(sizes), held)


def _nbytes(state: State) -> int:
    return sum(x.numel() * x.element_size() for x in state.values())


def _numel(state: State) -> int:
    return sum(x.numel() for x in state.values())


# -- optimizer state in shards --


def cut(run: RankView, strategy: Strategy) -> Cut | None:
    """Returns how `strategy` shards optimizer state. None: it is whole on every rank, or torch keeps it."""
    if strategy.opaque or "optimizer state" not in strategy.shards:
        return None
    if len((groups := sharers(strategy, run.rank.size))[0]) == 1:
        return None
    return Cut(tuple(bucket.parts for bucket in run.layout.buckets), groups)


async def reshard(run: Changing, was: Cut | None, to: Cut | None) -> None:
    """Moves optimizer state from the shards `was` to the shards `to` by one `move`. None: whole on every rank.

    From whole to shards it sends nothing. Raises Disagreement if the hash of the state has changed.
    """
    if was == to:
        return
    rank, layout = run.rank, run.layout
    some = {place.name for place in layout.order if place.numel}
    both = likes(layout.order, run.optimizer), slots(layout, run.optimizer)
    like, here = ({name: x for name, x in each.items() if name.partition("/")[2] in some} for each in both)
    kept = await kept_slots(run, like, here)
    sizes = tuple((place.name, place.numel) for place in layout.order)
    slots_of = tuple((name, bool(like[name].numel())) for name in kept)
    if was is None and layout.sizes_only:  # with sizes only there are no values to move or to hash
        if run.ledger.remembers:
            run.ledger.surge(sum(n * like[name].element_size() for name, n in _counts(dict(sizes), slots_of).items()))
        return run.sharded(to)
    lies, comes = (in_shards(sizes, slots_of, one, rank.size) for one in (was, to))
    if layout.sizes_only:  # one optimizer stands for all ranks, and keeps its state
        here = {name: like[name].new_empty(lies.numel(rank.id, name)) for name in lies.at(rank.id)}
    before = await summed(run, here, lies)
    given = await move(rank, {name: here[name] for name in lies.at(rank.id)}, lies, comes, range(rank.size), like)
    if run.ledger.remembers:
        run.ledger.surge(_nbytes(here))  # held in addition to `given`
    if await summed(run, given, comes) != before:
        raise Disagreement("the optimizer's state is not what it was before it was shared out anew")
    if not layout.sizes_only:
        put(layout, run.optimizer, given, like)
    run.sharded(to)


async def summed(run: RankView, state: State, lies: Placement) -> int:
    """Returns the hash of all ranks' state. Each replica counts once, on the first rank that has it."""
    return sum(await run.gather(hashed(run, state, lies))) & MASK


def hashed(run: RankView, state: State, lies: Placement) -> int:
    """Returns this rank's part of the hash. The hash is the sum of all parts."""
    me = run.rank.id
    if run.layout.sizes_only:
        return 0
    mine = {name: slices for name, slices in lies.at(me).items()
            if not any(lies.at(r).get(name) == slices for r in range(me))}  # fmt: skip
    return checksum({name: state[name] for name in mine}, mine)


def kept_bytes(layout: Layout, optimizer: Optimizer, cut: Cut, rank: int) -> int:
    """Returns the bytes of sharded optimizer state on a rank after the first step."""
    like, numel = likes(layout.order, optimizer), {place.name: place.numel for place in layout.order}
    mine = _shard(numel, tuple((name, bool(x.numel())) for name, x in like.items()), cut, rank)
    return sum(s.numel * like[name].element_size() for name, slices in mine.items() for s in slices)


async def kept_slots(run: RankView, like: State, here: State) -> list[str]:
    """Returns the names of the slots that at least one rank has."""
    if not like:
        return []
    has = [name in here for name in like]
    known = run.layout.weights[0].new_zeros(len(has), dtype=torch.int32).copy_(torch.tensor(has))
    told = await run.rank.all_reduce(known, "max", "slots")
    if told.is_meta:
        return [name for name, there in zip(like, has, strict=True) if there]
    names = list(like)
    return [names[i] for i in told.nonzero().view(-1).tolist()]


@lru_cache(maxsize=8)  # all ranks of a simulation need the same one
def in_shards(sizes: tuple[tuple[str, int], ...], kept: tuple[tuple[str, bool], ...], cut: Cut | None,
               size: int) -> Placement:  # fmt: skip
    """Returns the placement of slots: whole on every rank if `cut` is None, else in shards of buckets.

    A slot of one element, such as a counter, is on every rank with a piece of its parameter.
    """
    numel = dict(sizes)
    counts = _counts(numel, kept)
    if cut is None:
        return Placement.whole(counts, range(size))
    return Placement(counts, {rank: _shard(numel, kept, cut, rank) for group in cut.groups for rank in group})


def _counts(numel: Mapping[str, int], kept: Iterable[tuple[str, bool]]) -> dict[str, int]:
    """Returns the elements of each slot. kept: (slot, True if it has one element, else as many as its parameter)."""
    return {name: 1 if whole else numel[name.partition("/")[2]] for name, whole in kept}


def _shard(numel: Mapping[str, int], kept: Iterable[tuple[str, bool]], cut: Cut, rank: int) -> Held:
    """Returns the slots that one rank holds: its slice of each bucket, cut as in `Bucket.shard`."""
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
                mine[name] = (Slice(low, high - low),)
            at += numel[name]
    of = {name: name.partition("/")[2] for name, _ in kept}
    return {name: (Slice(0, 1),) if whole else mine[of[name]] for name, whole in kept if of[name] in mine}
