"""A copy of one rank's state between 2 steps: its pieces by name, with their placement.

Ranks can assemble such copies even if the model's placement has changed since.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

from workbench.compressors import Compressor, inside
from workbench.host.placement import sliced_parameter as sliced
from workbench.host.placement.move_state import State, view_slice
from workbench.host.placement.optimizer_slots import read_slots
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.placement import Held
from workbench.host.placement.replica_spread import ReplicaSpread, place_replica
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.handover import find_shards, place_slots
from workbench.host.transfer.shard_layout import ShardLayout

Bound = tuple[int, int]  # the next step, and earlier changes


class Boundary(NamedTuple):
    """A rank's state at a boundary.

    spread:  how the model is placed; cut: how optimizer state is and, if `sharded`, the parameters
    state:   flat, by name: parameters and buffers, and optimizer state ("exp_avg/NAME")
    memory:  the compressor's memory by buffer and parameter
    apart:   steps since all ranks last had the same parameters; -1: unknown
    """

    bound: Bound
    place: int
    size: int
    spread: ReplicaSpread | None
    cut: ShardLayout | None
    sharded: bool
    state: State
    memory: dict[str, State]
    apart: int = 0

    def widen_memory(self, model: nn.Module, compressor: Compressor) -> dict[str, State]:
        """Returns the memory for whole parameters: 0 for elements of another rank.

        If the model is in stages or slices, it returns only buffers with the rule "sum".
        """
        if self.spread is None:
            return self.memory
        sums = {name for one in inside(compressor) for name, rule in one.own.items() if rule == "sum"}
        shapes, found = {name: sliced.whole_shape(p) for name, p in model.named_parameters()}, dict[str, State]()
        for kind in self.memory.keys() & sums:
            found[kind] = {name: widen_slices(name, x, prod(shapes[name]), self.spread, self.place, self.size)
                           for name, x in self.memory[kind].items()}  # fmt: skip
        return found


def widen_slices(name: str, x: Tensor, n: int, spread: ReplicaSpread | None, place: int, size: int) -> Tensor:
    """Returns (n,): the elements `x` of the rank at `place`, else 0."""
    made, slices = x.new_zeros(n), place_replica(((name, n),), spread, size).slices_of_rank(place)[name]
    at = 0
    for s in slices:
        view_slice(made, (StridedSlice(0, n),), s).copy_(x[at : at + s.element_count].view(s.times, s.length))
        at += s.element_count
    return made


def make_boundary(run: ChangeView, bound: Bound, spare: Boundary | None = None, copied: bool = True) -> Boundary:
    """Copies a rank's state.

    spare:  an old boundary with reusable memory
    copied: if False, copies only buffers; for a rank that changes nothing any more
    """
    layout, state = run.layout, dict[str, Tensor]()
    lies = find_shards(run, run.experiment.strategy)
    state |= list_own_elements(layout, lies if run.unsharder.sharded else None, run.rank.id)
    state |= {name: x.clone().reshape(-1) for name, x in run.model.named_buffers() if x.numel()}
    state |= {name: x.reshape(-1) for name, x in read_slots(layout, run.optimizer).items()}
    memory: dict[str, State] = run.rank.memory.buffers
    if copied:
        state = _copy_tensors(state, spare.state if spare else {})
        old = spare.memory if spare else {}
        memory = {kind: _copy_tensors(of, old.get(kind, {})) for kind, of in memory.items()}
    return Boundary(bound, run.rank.id, run.rank.size, run.spread, lies, run.unsharder.sharded, state, memory,
                    count_steps_apart(run))  # fmt: skip


def count_steps_apart(run: ChangeView) -> int:
    """Since all ranks last had the same parameters; -1: unknown."""
    strategy = run.experiment.strategy
    since = strategy.steps_apart(run.state) if strategy.periodic else 0
    return -1 if since is None else since


def copy_boundary(b: Boundary) -> Boundary:
    """Copies all tensors."""
    return b._replace(
        state=_copy_tensors(b.state, {}), memory={kind: _copy_tensors(of, {}) for kind, of in b.memory.items()}
    )


def list_own_elements(layout: ParameterLayout, lies: ShardLayout | None, place: int) -> State:
    """Returns this rank's flat elements. lies: how parameters are sharded"""
    found = dict[str, Tensor]()
    for bucket, own, begin in zip(layout.list_params(), layout.weights, layout.begins, strict=True):
        first, last = begin, begin + own.numel()
        if lies is not None:  # an interrupted pass may have gathered invalid elements
            first, last = _find_range(bucket.data.numel(), lies, place)
        for part in bucket.parts:
            low, high = max(part.start, first), min(part.stop, last)
            if low < high:
                found[part.name] = own[low - begin : high - begin]
    return found


def _find_range(total: int, lies: ShardLayout, place: int) -> tuple[int, int]:
    group = next(group for group in lies.groups if place in group)
    chunk = -(-total // len(group))
    begin = chunk * group.index(place)
    return min(begin, total), min(begin + chunk, total)


def _copy_tensors(state: Mapping[str, Tensor], spare: Mapping[str, Tensor]) -> State:
    made = {}
    with torch.no_grad():
        for name, x in state.items():
            old = spare.get(name)
            if old is not None and old.shape == x.shape and old.dtype == x.dtype:
                made[name] = old.copy_(x)
            else:
                made[name] = x.detach().clone()
    return made


def list_held_slices(
    place: int,
    size: int,
    sizes: Mapping[str, int],
    kept: Mapping[str, bool],
    spread: ReplicaSpread | None,
    cut: ShardLayout | None,
    sharded: bool,
) -> Held:
    """Returns the slices that the rank at `place` of `size` holds.

    sizes: elements of parameters, buffers and optimizer state
    kept:  by name of optimizer state, whether it is one number for any size of its parameter
    """
    if spread is not None:
        return place_replica(tuple(sizes.items()), spread, size).slices_of_rank(place)
    whole = {name: (StridedSlice(0, n),) for name, n in sizes.items()}
    if cut is None:
        return whole
    params = {part.name: sizes[part.name] for parts in cut.buckets for part in parts}
    lying = [*((f"/{name}", False) for name in (params if sharded else ())), *kept.items()]
    mine = place_slots(tuple(params.items()), tuple(lying), cut, size).slices_of_rank(place)
    apart = {name.removeprefix("/") for name, _ in lying}
    here = {name.removeprefix("/"): slices for name, slices in mine.items()}
    return {name: slices for name, slices in whole.items() if name not in apart} | here
