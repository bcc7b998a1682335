"""Cuts new buckets. State in shards of the old ones stays sharded: no rank gathers the whole model.

If parameters are sharded, each new bucket takes one `move_state`. A rank frees an old bucket's shard when all of it has
moved, so it holds its own shards plus those of a few buckets. With offload a rank fetches an old shard when its first
parameter moves. It offloads a new shard at once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from workbench.experiment.mesh_rules import list_shard_groups
from workbench.host.placement.canonical_state import RankDisagreement
from workbench.host.placement.checksum import SUM_MASK
from workbench.host.placement.move_state import State, move_state
from workbench.host.placement.optimizer_slots import make_slot_likes, put_slots, read_slots
from workbench.host.placement.placement import Placement
from workbench.host.sharding.unsharder import build_shard
from workbench.host.transfer.boundary import list_own_elements
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.handover import find_shards, hash_state, list_slots, place_slots, reshard_slots
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.rank import Bucket, Op

if TYPE_CHECKING:
    from workbench.strategies import Strategy

Sizes = tuple[tuple[str, int], ...]  # elements by parameter
KeptSlots = tuple[tuple[str, bool], ...]  # "exp_avg/NAME", and "/NAME" for a parameter; whether it has one element


async def recut_buckets(run: ChangeView, strategy: Strategy, anew: Callable[[], Awaitable[None]]) -> None:
    """Calls `anew`, which cuts buckets, and moves sharded state."""
    if run.unsharder.sharded:
        if not (away := strategy.aside(run.state)):
            await strategy.recall(run.rank.replicas, run.state)
        return await _move_buckets(run, strategy, away, anew)
    await strategy.recall(run.rank.replicas, run.state)
    before = find_shards(run, strategy)
    await run.unsharder.unshard_all()
    await anew()
    await reshard_slots(run, before, find_shards(run, strategy))
    await run.unsharder.shard_parameters()


class _OldShards(NamedTuple):
    """State in old shards.

    sizes, kept: the sizes on all ranks
    state: this rank's part, by name
    like:  a tensor of each one's dtype
    lies:  the placement of all state
    away:  offloaded shards that have not moved yet, by an index that no new bucket has
    """

    sizes: Sizes
    kept: KeptSlots
    state: State
    like: State
    lies: Placement
    away: dict[int, Bucket]


async def _move_buckets(run: ChangeView, strategy: Strategy, away: list[Bucket],
                      anew: Callable[[], Awaitable[None]]) -> None:  # fmt: skip
    run.memory_account.note_model_cut()  # some buckets were whole in the last step
    was = _find_parameter_shards(run, strategy)
    old = await _collect_state(run, was, away)
    room, sums, given = _MoveMemory(was), [0, 0], dict[str, Tensor]()
    room.add_state(old.state)
    await anew()
    to = _find_parameter_shards(run, strategy)
    run.unsharder.note_new_buckets()
    for bucket in run.layout.list_params():
        room.add_state(await _fetch_shards(run, old, bucket))
        mine = await _move_bucket(run, old, (was, to), bucket, sums)
        pieces = {name[1:]: x for name, x in mine.items() if name.startswith("/")}
        shard = build_shard(run, strategy, bucket, pieces)
        room.count_move(
            mine, {name: old.state.pop(name) for name in _list_names(old.kept, bucket) if name in old.state}, shard
        )
        own = {name: x for name, x in mine.items() if not name.startswith("/")}
        await run.rank.hold(shard)
        if not away:
            given |= own
            assert run.unsharder.by is not None
            await run.unsharder.by.reshard(run.rank, run.state, run.layout.weight_bucket(bucket.index))
            continue
        if not run.layout.has_sizes_only:
            put_slots(run.layout, run.optimizer, own, old.like, run.layout.groups[bucket.index])
        await strategy.stow(run.rank, run.state, run.layout.weight_bucket(bucket.index))
        room.subtract_bytes(
            shard.nbytes + (_count_bytes(own.values()) if run.memory_account.away.has_kind("optimizer state") else 0)
        )
    run.memory_account.away.drop_old_items()
    run.memory_account.note_surge(room.surge_bytes)
    before, after = [await run.gather(own & SUM_MASK) for own in sums]
    if (sum(before) - sum(after)) & SUM_MASK:
        raise RankDisagreement("parameters or the optimizer's state changed while buckets were rebuilt")
    if not (away or run.layout.has_sizes_only):
        put_slots(run.layout, run.optimizer, given, old.like)
    run.sharded(find_shards(run, strategy))


def _find_parameter_shards(run: ChangeView, strategy: Strategy) -> ShardLayout:
    """Even a single rank may offload."""
    return ShardLayout(tuple(bucket.parts for bucket in run.layout.buckets), list_shard_groups(strategy, run.rank.size))


async def _collect_state(run: ChangeView, was: ShardLayout, away: list[Bucket]) -> _OldShards:
    """Takes the optimizer's state, so that the result alone keeps the memory."""
    layout, rank = run.layout, run.rank
    some = {place.name for place in layout.order if place.numel}
    both = make_slot_likes(layout.order, run.optimizer), read_slots(layout, run.optimizer)
    like, here = ({name: x for name, x in each.items() if name.partition("/")[2] in some} for each in both)
    gone: set[str] = run.memory_account.away.list_slots() if away else set()
    if layout.has_sizes_only and not (
        run.memory_account.has_optimizer_state or run.memory_account.away.has_kind("optimizer state")
    ):
        here = {}  # as if the one optimizer had stepped
    known = [n for n in await list_slots(run, like, here | {n: x for n, x in like.items() if n in gone}) if n in like]
    sizes = tuple((place.name, place.numel) for place in layout.order)
    kept = (*((f"/{name}", False) for name, n in sizes if n), *((name, bool(like[name].numel())) for name in known))
    like |= {f"/{part.name}": layout.weights[b.index][:0] for b in layout.list_params() for part in b.parts}
    lies = place_slots(sizes, kept, was, rank.size)
    if layout.has_sizes_only:
        there = (n for n in lies.slices_of_rank(rank.id) if not (n in gone or (away and n.startswith("/"))))
        state = {n: like[n].new_empty(lies.count_elements(rank.id, n)) for n in there}
    else:
        pieces = {f"/{name}": x for name, x in list_own_elements(layout, None, rank.id).items()}
        state = pieces | {name: here[name] for name in known if name in here}
        for place in layout.order:
            run.optimizer.state.pop(place.param, None)
    if away:
        run.memory_account.away.renumber_items()
    others = {~b.index: Bucket(~b.index, b.data, b.parts, b.offset) for b in away}
    return _OldShards(sizes, kept, state, like, lies, others)


async def _fetch_shards(run: ChangeView, old: _OldShards, bucket: Bucket) -> State:
    names, found = {part.name for part in bucket.parts}, State()
    for shard in [one for one in old.away.values() if any(part.name in names for part in one.parts)]:
        del old.away[shard.index]
        values = await Op("fetch", shard, "parameters", "device", False)
        found |= {f"/{part.name}": values[part.start : part.stop] for part in shard.parts}
        found |= await _fetch_slots(run, old, shard)
    old.state.update(found)
    return found


async def _fetch_slots(run: ChangeView, old: _OldShards, shard: Bucket) -> State:
    here = {part.name for part in shard.parts}
    mine = [
        n
        for n in old.lies.slices_of_rank(run.rank.id)
        if n.partition("/")[2] in here and n not in old.state and n[0] != "/"
    ]
    if not mine:
        return {}
    await Op("fetch", shard, "optimizer state", "device", False)
    if run.layout.has_sizes_only:
        return {name: old.like[name].new_empty(old.lies.count_elements(run.rank.id, name)) for name in mine}
    found = read_slots(run.layout, run.optimizer)
    for place in run.layout.order:
        if place.name in here:
            run.optimizer.state.pop(place.param, None)
    return {name: found[name] for name in mine}


async def _move_bucket(
    run: ChangeView, old: _OldShards, cuts: tuple[ShardLayout, ShardLayout], bucket: Bucket, sums: list[int]
) -> State:
    rank, names = run.rank, _list_names(old.kept, bucket)
    lies, comes = (_place_bucket(old.sizes, old.kept, each, rank.size, names) for each in cuts)
    here = {name: old.state[name] for name in lies.slices_of_rank(rank.id)}
    given = await move_state(rank, here, lies, comes, range(rank.size), {name: old.like[name] for name in names})
    sums[0] += hash_state(run, here, lies)
    sums[1] += hash_state(run, given, comes)
    return given


def _list_names(kept: KeptSlots, bucket: Bucket) -> tuple[str, ...]:
    here = {part.name for part in bucket.parts}
    return tuple(name for name, _ in kept if name.partition("/")[2] in here)


@lru_cache(maxsize=8)  # for simulated ranks
def _place_bucket(sizes: Sizes, kept: KeptSlots, cut: ShardLayout, size: int, names: tuple[str, ...]) -> Placement:
    return place_slots(sizes, kept, cut, size).select_names(set(names))


class _MoveMemory:
    """Counts a rank's bytes while buckets move. surge_bytes: the peak above the end"""

    def __init__(self, was: ShardLayout) -> None:
        self._bucket = {f"/{part.name}": index for index, parts in enumerate(was.buckets) for part in parts}
        self._left = Counter[int]()  # parameters in an old bucket
        self._nbytes = Counter[int]()
        self.now = self.most = 0

    def add_state(self, state: State) -> None:
        for name, x in state.items():
            if name in self._bucket:
                self._left[self._bucket[name]] += 1
                self._nbytes[self._bucket[name]] += _count_bytes([x])
        self.subtract_bytes(-_count_bytes(state.values()))

    def subtract_bytes(self, nbytes: int) -> None:
        self.now -= nbytes
        self.most = max(self.most, self.now)

    @property
    def surge_bytes(self) -> int:
        return self.most - self.now

    def count_move(self, given: State, gone: State, shard: Bucket) -> None:
        """Old state (`gone`) is freed when its bucket is empty."""
        new = [x for name, x in given.items() if gone.get(name) is not x]
        self.most = max(self.most, self.now + _count_bytes(new) + shard.nbytes)
        self.now += shard.nbytes + _count_bytes(x for name, x in given.items() if name not in self._bucket)
        for name, x in gone.items():
            if name not in self._bucket:
                self.now -= _count_bytes([x])
            else:
                self._left[self._bucket[name]] -= 1
                if not self._left[self._bucket[name]]:
                    self.now -= self._nbytes[self._bucket[name]]


def _count_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)
