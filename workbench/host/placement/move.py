"""`move`: state that lies as one placement says comes to lie as another says. The one operation of every hand-over.

A live switch between any two ways to spread a model, a rank that joins or leaves, recovery from who is left: all are a
`move`. It is a coroutine over one verb, so both hosts run it. One exchange carries every tensor, whatever its dtype, as
bytes: nothing is cast and nothing is added, so what arrives is equal to the bit.

A tensor here is anything with a name: a parameter, a moment of the optimizer ("exp_avg/blocks.3.qkv.weight"), a
buffer, a step counter, the state of a generator. What is not elementwise is placed `whole` and goes to who lacks it.

What is consolidated state, and what becomes of a rank's own, is not decided here: see "The hand-over" in
workbench/DESIGN.md.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from workbench.host.placement.placement import Held, Placement
from workbench.host.placement.plan import Transfer, plan
from workbench.host.placement.slices import Slice, refine
from workbench.rank import Rank

State = dict[str, Tensor]  # a rank's own tensors by name, flat, as its placement says
WIDEST = 16  # bytes of an element of complex128: no dtype has a wider one


async def move(rank: Rank, state: Mapping[str, Tensor], was: Placement, to: Placement, alive: Collection[int],
               like: Mapping[str, Tensor], members: Sequence[int] = ()) -> State:  # fmt: skip
    """This rank's state as `to` says, given its state as `was` says; all ranks of the group ask for it together.

    state:   for each name that `was` has on this rank a dense tensor of its elements in that order, of any shape
    alive:   who still has what `was` says; who is in `to` alone, or lost it, is given all that it is to hold
    like:    for each name in `to` a tensor of its dtype on this rank's device, of any size: on every rank, for who is
             to receive a tensor has none
    members: the ranks of the group by index, as the placements number them; none: they number as the group does

    -> name -> (n,), new memory; but a tensor whose slices stay is handed back itself. Tensors on meta take part as
    sizes, with the same bytes. Nothing is exchanged where nobody lacks anything. Beside `state` and the answer it takes
    memory for what is sent, twice, and for what comes.

    Raises, on all ranks alike and before anything is sent, LookupError and ValueError as `plan` does, and ValueError
    where a rank that is to send or receive is not in the group; on one rank alone, ValueError where `state` is not as
    `was` says.
    """
    group = tuple(members) or tuple(range(rank.size))
    me = group[rank.index]
    has, wants = (was.at(me) if me in alive else {}), to.at(me)
    _check(rank.number(me), {name: was.numel(me, name) for name in has}, state, to, like)
    todo = plan(was, to, alive, {name: like[name].element_size() for name in to.sizes})
    held = {name: state[name].detach().reshape(-1) for name in has}
    given = {name: state[name] if has.get(name) == slices else _begun(held, has, name, slices, like[name])
             for name, slices in wants.items()}  # fmt: skip
    if todo.between:
        lengths = todo.lengths(group)
        empty = torch.empty(0, dtype=torch.uint8, device=_device(like))
        rows = [_packed(todo.between.get((me, other), ()), held, has, empty, n)
                for other, n in zip(group, lengths[rank.index], strict=True)]  # fmt: skip
        for other, row in zip(group, await rank.all_to_allv(rows, lengths, "move"), strict=True):
            _unpack(row, todo.between.get((other, me), ()), given, wants)
    return given


def _begun(held: State, has: Held, name: str, slices: tuple[Slice, ...], like: Tensor) -> Tensor:
    """(n,): new memory for these slices, with what this rank holds of them; the others are yet to come."""
    new = like.new_empty(sum(s.numel for s in slices))
    if name in held and not new.is_meta:
        for piece, members in refine([has[name], slices]):
            if members == 3:
                seen(new, slices, piece).copy_(seen(held[name], has[name], piece))
    return new


def _packed(transfers: Iterable[Transfer], held: State, has: Held, empty: Tensor, nbytes: int) -> Tensor:
    """(nbytes,) uint8: the elements of these transfers one after the other; the widest first, so all lie aligned."""
    if not nbytes:
        return empty
    row, at = empty.new_empty(nbytes), 0
    for t in () if row.is_meta else transfers:
        source = held[t.name]
        end = at + t.slice.numel * source.element_size()
        row[at:end].view(source.dtype).view(t.slice.times, t.slice.length).copy_(seen(source, has[t.name], t.slice))
        at = end
    return row


def _unpack(row: Tensor, transfers: Iterable[Transfer], given: State, wants: Held) -> None:
    """Puts what `_packed` made on another rank where it belongs."""
    if row.is_meta:
        return
    at = 0
    row = row.clone() if row.storage_offset() % WIDEST else row
    for t in transfers:
        new = given[t.name]
        end = at + t.slice.numel * new.element_size()
        seen(new, wants[t.name], t.slice).copy_(row[at:end].view(new.dtype).view(t.slice.times, t.slice.length))
        at = end


def seen(flat: Tensor, slices: tuple[Slice, ...], piece: Slice) -> Tensor:
    """(times, length): the elements of `piece` in the flat tensor of what `slices` hold."""
    at = flat.storage_offset()
    for whole in slices:
        if whole.holds(piece.start):
            own = piece.inside(whole)
            return flat.as_strided((own.times, own.length), (own.stride, 1), at + own.start)
        at += whole.numel
    raise AssertionError(f"{piece} is not in {slices}")


def _device(like: Mapping[str, Tensor]) -> torch.device:
    """What the exchange happens on: the accelerator's (or meta), though some state may lie in the host's memory."""
    return next((t.device for t in like.values() if t.device.type != "cpu"), torch.device("cpu"))


def _check(rank: int, has: Mapping[str, int], state: Mapping[str, Tensor], to: Placement,
           like: Mapping[str, Tensor]) -> None:  # fmt: skip
    """Raises ValueError if the state is not as its placement says.

    rank: its number in the run; has: by name, the elements that the placement says it holds
    """
    if unlike := [name for name in to.sizes if name not in like]:
        raise ValueError(f"move: {unlike[0]} has no dtype; name it in `like`")
    for name, n in has.items():
        if name not in state or state[name].numel() != n:
            there = f"{state[name].numel()} of them are" if name in state else "it is not"
            raise ValueError(f"move: rank {rank} is said to hold {n} elements of {name}, and {there} in its state")
        if name in to.sizes and state[name].dtype != like[name].dtype:
            raise ValueError(f"move: {name} is {state[name].dtype} on rank {rank} and {like[name].dtype} in `like`")
