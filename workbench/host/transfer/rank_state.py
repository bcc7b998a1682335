"""Moves each rank's own compression memory when the model's partition changes.

`Compressor.own` declares a rule by name; see "The hand-over" in workbench/DESIGN.md. A "sum" moves as shares, one
tensor for each replica, so the sum over ranks stays the same. A "mean" is summed first and moves as the model does. A
"keep" stays on its rank. All other memory is dropped.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor

from workbench.compressors import inside
from workbench.fabric import traffic
from workbench.host.core.dropped_state import UNDECLARED
from workbench.host.placement.canonical_state import RankDisagreement
from workbench.host.placement.move_state import State, move_state, view_slice
from workbench.host.placement.placement import Placement
from workbench.host.placement.replica_spread import ReplicaSpread, place_replica
from workbench.host.placement.sliced_parameter import whole_numel
from workbench.host.placement.strided_slices import StridedSlice, refine_slices
from workbench.host.placement.transfer_plan import plan_transfers
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.handover import sum_hashes
from workbench.rank import Rank
from workbench.settings import Json

Named = tuple[tuple[str, int], ...]  # (name, elements), of one dtype
MOVED_RULES = ("sum", "mean")  # with the parameters


async def migrate_rank_state(run: ChangeView, was: ReplicaSpread | None, to: ReplicaSpread | None) -> None:
    """All ranks call it together before the model moves. Raises RankDisagreement if a sum has changed."""
    memory, nbytes = run.rank.memory, 0
    rules = {buffer: rule for of in (run.rank.compressor, run.experiment.compressor) for one in inside(of)
             for buffer, rule in one.own.items()}  # fmt: skip
    here = {*memory.buffers, *memory.parts, *(["generator"] if memory.draws else [])}
    stays = {name for name in here if rules.get(name) == "keep"}
    kept: dict[str, dict[str, Tensor]] = {}
    for buffer, rule in sorted((buffer, rule) for buffer, rule in rules.items() if rule in MOVED_RULES):
        if not any(await run.gather(int(buffer in memory.buffers))):  # none before the first exchange
            continue
        pieces = memory.buffers.get(buffer, {})
        kept[buffer] = {}
        for kind, named in _group_by_dtype(run).items():
            like = run.layout.weights[0].new_empty(0, dtype=kind)
            if rule == "mean":
                found, sent = await _move_mean(run, pieces, named, like, (was, to))
            else:
                found, sent = await _move_sum(run, pieces, named, like, (was, to))
            kept[buffer] |= found
            nbytes += sent
    lost = sorted(here - kept.keys() - stays - {"generator"})
    for name in {*kept, *lost}:
        memory.drop(name)
    memory.buffers.update(kept)
    if run.rank.id == 0 and (kept or lost):
        run.mark("own", _describe_move({name: rules.get(name, UNDECLARED) for name in (*kept, *stays, *lost)}, nbytes))


def _describe_move(rules: dict[str, str], nbytes: int) -> dict[str, Json]:
    said = [
        f"{name} moved with the parameters ({rule} over ranks)" for name, rule in rules.items() if rule in MOVED_RULES
    ]
    stays = [name for name, rule in rules.items() if rule == "keep"]
    lost = [name for name, rule in rules.items() if rule not in (*MOVED_RULES, "keep")]
    said += [f"{', '.join(stays)} stayed"] if stays else []
    said += [f"{', '.join(lost)} started again"] if lost else []
    return {"rules": rules, "nbytes": nbytes, "text": f"state of compression: {'; '.join(said)}"}


def _group_by_dtype(run: ChangeView) -> dict[torch.dtype, Named]:
    found: dict[torch.dtype, list[tuple[str, int]]] = defaultdict(list)
    for name, p in run.model.named_parameters():
        if p.requires_grad:
            found[torch.promote_types(p.dtype, torch.float32)].append((name, whole_numel(p)))
    return {kind: tuple(named) for kind, named in found.items()}


def _join_pieces(pieces: State, lies: Placement, rank: Rank, like: Tensor) -> Tensor:
    """Returns (n,), zeros if missing."""
    parts = []
    for name in lies.slices_of_rank(rank.id):
        n = lies.count_elements(rank.id, name)
        parts.append(like.new_zeros(n) if like.is_meta or name not in pieces else pieces[name].to(like))
        if parts[-1].numel() != n:
            raise RankDisagreement(
                f"rank {rank.number()} has state of {parts[-1].numel()} elements for {name} and a part of {n}"
            )
    return torch.cat(parts) if parts else like.new_zeros(0)


def _split_pieces(line: Tensor, lies: Placement, me: int) -> State:
    names = lies.slices_of_rank(me)
    return dict(zip(names, line.split([lies.count_elements(me, name) for name in names]), strict=True))


async def _move_checked(
    run: ChangeView, state: State, was: Placement, to: Placement, like: Tensor
) -> tuple[State, int]:
    """Returns (this rank's new part, the bytes that all ranks have sent). Raises RankDisagreement for another hash."""
    likes = dict.fromkeys(to.sizes, like)
    before = await sum_hashes(run, state, was)
    given = await move_state(run.rank, state, was, to, range(run.rank.size), likes)
    if await sum_hashes(run, given, to) != before:
        raise RankDisagreement("the ranks' own state changed while they moved it")
    run.memory_account.note_surge(sum(x.numel() * x.element_size() for x in (*state.values(), *given.values())))
    todo = plan_transfers(was, to, range(run.rank.size), dict.fromkeys(to.sizes, like.element_size()))
    return given, sum(todo.nbytes.values())


# -- mean --


async def _move_mean(run: ChangeView, pieces: State, named: Named, like: Tensor,
                 ways: tuple[ReplicaSpread | None, ReplicaSpread | None]) -> tuple[State, int]:  # fmt: skip
    """Each of q new replicas gets 1/q of the sum."""
    rank = run.rank
    lies, comes = (place_replica(named, way, rank.size) for way in ways)
    line = _join_pieces(pieces, lies, rank, like)
    apart = 0
    if (size := rank.replicas.size) > 1:
        await rank.replicas.all_reduce(line, "sum", "own")
        lines = [lies.count_elements(r) * like.element_size() for r in range(rank.size)]
        apart = sum(traffic("all_reduce", nbytes, size)[0] for nbytes in lines)
    given, sent = await _move_checked(run, _split_pieces(line, lies, rank.id), lies, comes, like)
    return {name: x / (rank.size // _count_ranks(ways[1])) for name, x in given.items()}, sent + apart


# -- sum --


async def _move_sum(run: ChangeView, pieces: State, named: Named, like: Tensor,
                 ways: tuple[ReplicaSpread | None, ReplicaSpread | None]) -> tuple[State, int]:  # fmt: skip
    """A rank keeps its share of elements that it still holds. Heirs add all other shares. New elements begin at 0."""
    me = run.rank.id
    lies, comes = (place_replica(named, way, run.rank.size) for way in ways)
    was, to = _place_shares(named, *ways, run.rank.size)
    mine = {share: _join_pieces(pieces, lies, run.rank, like) for share in was.slices_of_rank(me)}
    given, sent = await _move_checked(run, mine, was, to, like)
    total = like.new_zeros(comes.count_elements(me))
    if not total.is_meta:
        starts = _find_starts(named)
        here = tuple(_shift_slice(starts[name], s) for name, slices in comes.slices_of_rank(me).items() for s in slices)
        for share in sorted(given, key=int):
            at = 0
            for s in to.slices_of_rank(me)[share]:
                view_slice(total, here, s).add_(given[share][at : at + s.element_count].view(s.times, s.length))
                at += s.element_count
    return _split_pieces(total, comes, me), sent


@lru_cache(maxsize=8)  # for simulated ranks
def _place_shares(
    named: Named, was: ReplicaSpread | None, to: ReplicaSpread | None, size: int
) -> tuple[Placement, Placement]:
    """Returns the old and the new placement of each replica's share, "0", "1", ..., of all parameters end to end.

    Of p old and q new replicas, the heirs of old replica j are the ranks of new replica j q // p.
    """
    before, after = (place_replica(named, way, size) for way in (was, to))
    old, new = _count_ranks(was), _count_ranks(to)
    starts, total = _find_starts(named), sum(n for _, n in named)
    lies: list[dict[str, list[StridedSlice]]] = [defaultdict(list) for _ in range(size)]
    comes: list[dict[str, list[StridedSlice]]] = [defaultdict(list) for _ in range(size)]
    for owner in range(size):
        share = owner // old
        first = share * (size // new) // (size // old) * new
        for name, slices in before.slices_of_rank(owner).items():
            lies[owner][str(share)] += [_shift_slice(starts[name], s) for s in slices]
            for rank, s in _find_heirs(slices, after, name, (owner, *range(first, first + new))):
                comes[rank][str(share)].append(_shift_slice(starts[name], s))
    sizes = {str(share): total for share in range(size // old)}
    return _make_placement(sizes, lies), _make_placement(sizes, comes)


def _make_placement(sizes: dict[str, int], held: list[dict[str, list[StridedSlice]]]) -> Placement:
    return Placement(sizes, {rank: {share: tuple(found) for share, found in here.items()}
                             for rank, here in enumerate(held)})  # fmt: skip


def _find_heirs(slices: tuple[StridedSlice, ...], after: Placement, name: str,
           ranks: tuple[int, ...]) -> Iterator[tuple[int, StridedSlice]]:  # fmt: skip
    """Yields (the first of `ranks` that will hold it, part of `slices`)."""
    holding = [(rank, its) for rank in ranks if (its := after.slices_of_rank(rank).get(name))]
    for s, who in _refine_slices(slices, tuple(its for _, its in holding)):
        yield holding[who][0], s


@lru_cache(maxsize=1024)  # many have the same slices
def _refine_slices(
    slices: tuple[StridedSlice, ...], others: tuple[tuple[StridedSlice, ...], ...]
) -> list[tuple[StridedSlice, int]]:
    """Returns parts of `slices`, each with the first of `others` that holds it."""
    return [(s, (members >> 1 & -(members >> 1)).bit_length() - 1) for s, members in refine_slices([slices, *others])
            if members & 1]  # fmt: skip


def _find_starts(named: Named) -> dict[str, int]:
    return dict(zip((name for name, _ in named), accumulate((n for _, n in named), initial=0), strict=False))


def _shift_slice(start: int, s: StridedSlice) -> StridedSlice:
    return s._replace(start=start + s.start)


def _count_ranks(way: ReplicaSpread | None) -> int:
    return len(way) if way else 1
