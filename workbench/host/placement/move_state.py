"""`move_state`: takes state from one placement to another, for every hand-over.

One exchange carries all tensors as bytes, so the result is bit-identical. A tensor is anything with a name: a
parameter, an optimizer slot ("exp_avg/blocks.3.qkv.weight"), a buffer, a counter, a generator's state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from workbench.host.placement.placement import Held, Placement
from workbench.host.placement.strided_slices import StridedSlice, refine_slices
from workbench.host.placement.transfer_plan import Transfer, plan_transfers
from workbench.rank import Rank

State = dict[str, Tensor]  # a rank's tensors by name, flat
MAX_ELEMENT_BYTES = 16  # of complex128, the widest dtype


async def move_state(rank: Rank, state: Mapping[str, Tensor], was: Placement, to: Placement, alive: Collection[int],
               like: Mapping[str, Tensor], members: Sequence[int] = ()) -> State:  # fmt: skip
    """Takes this rank's state under `was` and returns its state under `to`. All ranks of the group call it together.

    state:   for each name that `was` has on this rank, a dense tensor of its elements in that order, of any shape
    alive:   the ranks that still have their part of `was`; any other rank in `to` receives its whole part
    like:    for each name in `to` a tensor of its dtype on this rank's device, of any size; needed on every rank
    members: the ranks of the group, by index in the placements; empty: the group's own numbers

    Returns name -> (n,) in new memory, or the tensor itself if its slices stay. Meta tensors count as sizes. Without
    missing elements, ranks exchange nothing. Extra memory: twice the sent bytes and once the received.

    Raises LookupError and ValueError as `plan_transfers` and `list_lengths` do, on all ranks before they send.
    One rank alone raises ValueError if its `state` does not match `was`.
    """
    group = tuple(members) or tuple(range(rank.size))
    me = group[rank.index]
    has, wants = (was.slices_of_rank(me) if me in alive else {}), to.slices_of_rank(me)
    _require_match(rank.number(me), {name: was.count_elements(me, name) for name in has}, state, to, like)
    todo = plan_transfers(was, to, alive, {name: like[name].element_size() for name in to.sizes})
    held = {name: state[name].detach().reshape(-1) for name in has}
    given = {name: state[name] if has.get(name) == slices else _start_tensor(held, has, name, slices, like[name])
             for name, slices in wants.items()}  # fmt: skip
    if todo.between:
        lengths = todo.list_lengths(group)
        empty = torch.empty(0, dtype=torch.uint8, device=_find_device(like))
        rows = [_pack_transfers(todo.between.get((me, other), ()), held, has, empty, n)
                for other, n in zip(group, lengths[rank.index], strict=True)]  # fmt: skip
        for other, row in zip(group, await rank.all_to_allv(rows, lengths, "move"), strict=True):
            _unpack_transfers(row, todo.between.get((other, me), ()), given, wants)
    return given


def _start_tensor(held: State, has: Held, name: str, slices: tuple[StridedSlice, ...], like: Tensor) -> Tensor:
    """Returns (n,): new memory, with the elements that this rank has."""
    new = like.new_empty(sum(s.element_count for s in slices))
    if name in held and not new.is_meta:
        for piece, members in refine_slices([has[name], slices]):
            if members == 3:
                view_slice(new, slices, piece).copy_(view_slice(held[name], has[name], piece))
    return new


def _pack_transfers(transfers: Iterable[Transfer], held: State, has: Held, empty: Tensor, nbytes: int) -> Tensor:
    """Returns (nbytes,) uint8. The widest elements come first, so all are aligned."""
    if not nbytes:
        return empty
    row, at = empty.new_empty(nbytes), 0
    for t in () if row.is_meta else transfers:
        source = held[t.name]
        end = at + t.slice.element_count * source.element_size()
        row[at:end].view(source.dtype).view(t.slice.times, t.slice.length).copy_(
            view_slice(source, has[t.name], t.slice)
        )
        at = end
    return row


def _unpack_transfers(row: Tensor, transfers: Iterable[Transfer], given: State, wants: Held) -> None:
    if row.is_meta:
        return
    at = 0
    row = row.clone() if row.storage_offset() % MAX_ELEMENT_BYTES else row
    for t in transfers:
        new = given[t.name]
        end = at + t.slice.element_count * new.element_size()
        view_slice(new, wants[t.name], t.slice).copy_(row[at:end].view(new.dtype).view(t.slice.times, t.slice.length))
        at = end


def view_slice(flat: Tensor, slices: tuple[StridedSlice, ...], piece: StridedSlice) -> Tensor:
    """Returns (times, length): a view of `piece` in the flat tensor that holds `slices`."""
    at = flat.storage_offset()
    for whole in slices:
        if whole.has_element(piece.start):
            own = piece.locate_inside(whole)
            return flat.as_strided((own.times, own.length), (own.stride, 1), at + own.start)
        at += whole.element_count
    raise AssertionError(f"{piece} is not in {slices}")


def _find_device(like: Mapping[str, Tensor]) -> torch.device:
    return next((t.device for t in like.values() if t.device.type != "cpu"), torch.device("cpu"))


def _require_match(rank: int, has: Mapping[str, int], state: Mapping[str, Tensor], to: Placement,
           like: Mapping[str, Tensor]) -> None:  # fmt: skip
    """has: the number of elements by name"""
    if unlike := [name for name in to.sizes if name not in like]:
        raise ValueError(f"move: {unlike[0]} has no dtype; add it to `like`")
    for name, n in has.items():
        if name not in state or state[name].numel() != n:
            there = f"{state[name].numel()} of them are" if name in state else "it is not"
            raise ValueError(f"move: by the placement rank {rank} has {n} elements of {name}, and {there} in its state")
        if name in to.sizes and state[name].dtype != like[name].dtype:
            raise ValueError(f"move: {name} is {state[name].dtype} on rank {rank} and {like[name].dtype} in `like`")
