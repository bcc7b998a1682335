"""What a rank's tensors take, found by looking at them: bytes of storages, each counted once, whoever points there.

What autograd keeps for a backward is read off the graph that a loss hangs on: no hook runs in the forward, so a step
that is measured computes what every other does.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.placement import absent
from workbench.host.placement.layout import Layout, Place
from workbench.rank import Handle, Memory

Storages = dict[int, Any]  # storages by what tells them apart while they live
Alive = list[tuple[Callable[[], Any], int]]  # weak references to storages, and their bytes
LOOKS = 8  # at most so often in a backward gradients are counted anew, where buckets give theirs back
_BARE = str | bytes | int | float | type | FunctionType | ModuleType | None  # hold nothing
_NUMBERS = {int, float, bool, str, type(None)}  # most of what holds nothing
_SAVED = "_raw_saved_"
_slots: dict[type, list[str]] = {}  # the names under which a kind of node keeps tensors


def packed(x: Tensor) -> Tensor:
    """What a hook is to give autograd back in place of `x`, to be kept as it is.

    An operation that keeps its own result would keep itself by it, for as long as no backward comes: torch takes the
    result apart from what made it only where there are no hooks.
    """
    return x if x.grad_fn is None else x.detach()


def tensors(thing: Any) -> Iterator[Tensor]:
    """The tensors in `thing`: in lists, tuples, sets, dicts and the attributes of plain objects, however deep."""
    return (x for x in _within(thing) if isinstance(x, Tensor))


def memories(thing: Any) -> list[Memory]:
    """The Memory objects in `thing`; what is in them comes when it is first asked for."""
    return [x for x in _within(thing) if isinstance(x, Memory)]


def _within(thing: Any) -> Iterator[Any]:
    """All that can be reached from `thing`, once."""
    todo, seen = deque([thing]), set()
    while todo:
        x = todo.popleft()
        is_tensor = isinstance(x, Tensor)
        if id(x) in seen or (not is_tensor and isinstance(x, _BARE)):
            continue
        seen.add(id(x))
        yield x
        if not is_tensor:
            todo += [y for y in _inside(x) if type(y) not in _NUMBERS]  # a rank may keep thousands, one per other rank


def _inside(x: Any) -> Iterable[Any]:
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, list | tuple | set | frozenset | deque):
        return x
    if isinstance(x, Handle):  # a child under way reaches all of its host; what it holds is a buffer in flight
        return ()
    if isinstance(x, nn.Module):
        return [*x.parameters(), *x.buffers()]
    slots = [getattr(x, name, None) for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(x, "__dict__", {}).values()]


def storages(thing: Any) -> Storages:
    """Every storage that a tensor in `thing` lies in."""
    every = map(storage_of, tensors(thing))
    return {storage._cdata: storage for storage in every if storage is not None}


def storage_of(x: Tensor) -> Any:
    """Where it lies; None for one that lies nowhere, as what is sparse."""
    x = getattr(x, "_local_tensor", x)  # torch's DTensor: what of it is here
    return x.untyped_storage() if x.layout == torch.strided else None


def nbytes(found: Storages) -> int:
    """Bytes of them all."""
    return sum(storage.nbytes() for storage in found.values())


def watched(found: Storages) -> Alive:
    """The same, without keeping them alive."""
    return [(weakref.ref(storage), storage.nbytes()) for storage in found.values()]


def parameters(model: nn.Module, layout: Layout, followed: Iterable[Tensor] | None = None) -> Storages:
    """A model's parameters, also those that are frozen, and its running statistics.

    followed: those that are here and another rank's to train; None: all that are not absent
    """
    mine = {id(place.param) for place in layout.order}
    others: list[Tensor] = [p for p in model.parameters() if id(p) not in mine and not isinstance(p, absent.Absent)]
    if followed is not None:
        others = [*followed, *(p for p in others if not p.requires_grad)]
    return storages([layout.weights, others, list(model.buffers())])


def gradients(layout: Layout) -> Storages:
    """All gradients that are there, and the room that buckets keep for those to come."""
    kept = [bucket.kept for bucket in layout.buckets]
    return storages([[place.param.grad for place in layout.order], rooms(layout), kept])


def rooms(layout: Layout) -> list[Tensor]:
    """The vectors of the buckets, if they have any, but those of one parameter, which take its gradient as it comes."""
    return [bucket.data for bucket in layout.buckets if len(bucket.parts) > 1] if layout.roomy else []


def optimizer_state(optimizer: Any) -> Storages:
    """What an optimizer remembers, step counters included."""
    return storages(dict(optimizer.state))


def nodes(losses: Iterable[Tensor]) -> Iterator[Any]:
    """The graph that `losses` hang on, each node once."""
    todo, seen = [loss.grad_fn for loss in losses], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        yield node


def saved(losses: Iterable[Tensor]) -> Storages:
    """What autograd keeps for the backward of `losses`."""
    found: Storages = {}
    for node in nodes(losses):
        for kept in _kept(node):
            if isinstance(kept, Tensor | list | tuple | dict):
                found |= storages(kept)
    return found


def _kept(node: Any) -> Iterator[Any]:
    """What one node of the graph keeps: a tensor, or what somebody's hook has made of it; never unpacked."""
    kind = type(node)
    if kind not in _slots:
        _slots[kind] = [name for name in dir(kind) if name.startswith(_SAVED)]
    for name in _slots[kind]:
        try:
            held = getattr(node, name)
            for one in held if isinstance(held, list | tuple) else (held,):
                yield one.data
        except RuntimeError:  # its backward has run already
            continue


def every(layout: Layout) -> int:
    """After how many gradients a backward is looked at."""
    return -(-len(layout.order) // LOOKS)


def alive(kept: Alive) -> int:
    """Bytes of the storages that are still there."""
    return sum(nbytes for storage, nbytes in kept if storage() is not None)


def coming(layout: Layout, exchanged: bool) -> Callable[[Place], int]:
    """What a Place's gradient takes when it comes: nothing where one is already, or its bucket has room for it."""
    there = {place.name for place in layout.order if place.param.grad is not None}
    return lambda place: 0 if place.name in there else came(place, exchanged)


def came(place: Place, exchanged: bool) -> int:
    """Bytes of a gradient beyond the room of its bucket; autograd's own copy is gone once that has taken it."""
    return 0 if exchanged and not place.alone else place.numel * place.param.element_size()
