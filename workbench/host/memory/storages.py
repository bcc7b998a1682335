"""The bytes of a rank's storages, each counted once.

Saved tensors come from the loss's graph. No forward hook runs, so a measured step computes the same as any other.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from types import FunctionType, ModuleType

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Handle, Memory

Storages = dict[int, UntypedStorage]  # by address
Alive = list[tuple[weakref.ref[UntypedStorage], int]]  # (storage, bytes)
MAX_LOOKS = 8  # recounts per backward
_BARE = str | bytes | int | float | type | FunctionType | ModuleType | None  # without content
_NUMBERS = {int, float, bool, str, type(None)}  # the most frequent ones
_SAVED = "_raw_saved_"
_slots: dict[type, list[str]] = {}  # saved tensors' attributes, by type


def pack_tensor(x: Tensor) -> Tensor:
    """Returns what a saved-tensor hook gives autograd to keep `x` unchanged.

    An operation that saves its own result would keep itself alive until the backward. Without hooks, torch detaches
    the result.
    """
    return x if x.grad_fn is None else x.detach()


def find_tensors(thing: object) -> Iterator[Tensor]:
    """Looks into lists, tuples, sets, dicts and plain objects at any depth."""
    return (x for x in _walk_objects(thing) if isinstance(x, Tensor))


def find_memories(thing: object) -> list[Memory]:
    """Also finds empty ones."""
    return [x for x in _walk_objects(thing) if isinstance(x, Memory)]


def _walk_objects(thing: object) -> Iterator[object]:
    todo, seen = deque([thing]), set()
    while todo:
        x = todo.popleft()
        is_tensor = isinstance(x, Tensor)
        if id(x) in seen or (not is_tensor and isinstance(x, _BARE)):
            continue
        seen.add(id(x))
        yield x
        if not is_tensor:
            todo += [y for y in _list_members(x) if type(y) not in _NUMBERS]  # maybe thousands


def _list_members(x: object) -> Iterable[object]:
    if isinstance(x, dict):
        return x.values()
    if isinstance(x, list | tuple | set | frozenset | deque):
        return x
    if isinstance(x, Handle):  # its tensors are buffers in flight
        return ()
    if isinstance(x, nn.Module):
        return [*x.parameters(), *x.buffers()]
    slots = [getattr(x, name, None) for kind in type(x).__mro__ for name in getattr(kind, "__slots__", ())]
    return [*slots, *getattr(x, "__dict__", {}).values()]


def find_storages(thing: object) -> Storages:
    """Finds tensors' storages."""
    every = map(get_storage, find_tensors(thing))
    return {storage._cdata: storage for storage in every if storage is not None}


def get_storage(x: Tensor) -> UntypedStorage | None:
    """Returns None for a sparse tensor."""
    x = getattr(x, "_local_tensor", x)  # of torch's DTensor
    return x.untyped_storage() if x.layout == torch.strided else None


def count_bytes(found: Storages) -> int:
    """Counts bytes."""
    return sum(storage.nbytes() for storage in found.values())


def watch_storages(found: Storages) -> Alive:
    """Returns weak references, with bytes."""
    return [(weakref.ref(storage), storage.nbytes()) for storage in found.values()]


def find_parameters(model: nn.Module, layout: ParameterLayout, followed: Iterable[Tensor] | None = None) -> Storages:
    """Returns a model's parameters, also frozen ones, and its running statistics.

    followed: present parameters that another rank trains; None: every present parameter
    """
    mine = {id(place.param) for place in layout.order}
    others: list[Tensor] = [
        p for p in model.parameters() if id(p) not in mine and not isinstance(p, unmaterialized.UnmaterializedParameter)
    ]
    if followed is not None:
        others = [*followed, *(p for p in others if not p.requires_grad)]
    return find_storages([layout.weights, others, list(model.buffers())])


def find_gradients(layout: ParameterLayout) -> Storages:
    """Includes their buckets' memory."""
    kept = [bucket.kept for bucket in layout.buckets]
    return find_storages([[place.param.grad for place in layout.order], list_bucket_vectors(layout), kept])


def list_bucket_vectors(layout: ParameterLayout) -> list[Tensor]:
    """A lone parameter needs no vector."""
    return [bucket.data for bucket in layout.buckets if len(bucket.parts) > 1] if layout.roomy else []


def find_optimizer_state(optimizer: Optimizer) -> Storages:
    """Includes step counters."""
    return find_storages(dict(optimizer.state))


def walk_nodes(losses: Iterable[Tensor]) -> Iterator[Node]:
    """Yields each once."""
    todo, seen = [loss.grad_fn for loss in losses], set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        todo += [before for before, _ in node.next_functions]
        yield node


def find_saved(losses: Iterable[Tensor]) -> Storages:
    """Returns what autograd keeps for the backward."""
    found: Storages = {}
    for node in walk_nodes(losses):
        for kept in _list_kept(node):
            if isinstance(kept, Tensor | list | tuple | dict):
                found |= find_storages(kept)
    return found


def _list_kept(node: Node) -> Iterator[object]:
    kind = type(node)
    if kind not in _slots:
        _slots[kind] = [name for name in dir(kind) if name.startswith(_SAVED)]
    for name in _slots[kind]:
        try:
            held = getattr(node, name)
            for one in held if isinstance(held, list | tuple) else (held,):
                yield one.data
        except RuntimeError:  # after its backward
            continue


def count_look_interval(layout: ParameterLayout) -> int:
    """Counts gradients between looks."""
    return -(-len(layout.order) // MAX_LOOKS)


def count_alive_bytes(kept: Alive) -> int:
    """Counts existing storages."""
    return sum(nbytes for storage, nbytes in kept if storage() is not None)


def make_gradient_counter(layout: ParameterLayout, exchanged: bool) -> Callable[[ParameterPlace], int]:
    """Returns a function for a gradient's additional bytes, 0 if it exists."""
    there = {place.name for place in layout.order if place.param.grad is not None}
    return lambda place: 0 if place.name in there else count_gradient_bytes(place, exchanged)


def count_gradient_bytes(place: ParameterPlace, exchanged: bool) -> int:
    """Counts bytes beyond the bucket's memory. Autograd frees its own copy."""
    return 0 if exchanged and not place.alone else place.numel * place.param.element_size()
