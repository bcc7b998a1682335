"""How the trained state is placed on ranks: whole on each, in stages and slices, or in shards of buckets."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.experiment.mesh_rules import list_shard_groups
from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace, group_parameters, place_in_order
from workbench.host.placement.placement import Placement
from workbench.host.placement.replica_spread import ReplicaSpread, find_spread, place_replica
from workbench.host.placement.sliced_parameter import whole_shape
from workbench.host.transfer.boundary import list_held_slices
from workbench.host.transfer.change_view import ChangeView
from workbench.host.transfer.handover import find_shards
from workbench.host.transfer.shard_layout import ShardLayout

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class StateLayout(NamedTuple):
    """A placement of state.

    spread:  the stages and slices of a replica; None: each rank has a whole replica
    shards:  the buckets that shard optimizer state; None: it is not sharded
    sharded: whether parameters are sharded in these buckets, too
    order:   the parameters' order for buckets, if it is not the reverse of registration
    """

    spread: ReplicaSpread | None = None
    shards: ShardLayout | None = None
    sharded: bool = False
    order: tuple[str, ...] = ()


WHOLE = StateLayout()


def find_layout(run: ChangeView, strategy: Strategy) -> StateLayout:
    """Returns the current placement."""
    shards = find_shards(run, strategy)
    return StateLayout(run.spread, shards, run.unsharder.sharded and shards is not None)


@lru_cache(maxsize=8)  # simulated ranks share it
def place_tensors(
    named: tuple[tuple[str, int], ...], slots: tuple[tuple[str, bool], ...], lies: StateLayout, size: int
) -> Placement:
    """Returns the placement of all tensors on `size` ranks. See `place_replica` and `list_held_slices`.

    named: (name, elements) of all tensors
    slots: (name, whether it has one element for any size of its parameter) of optimizer state, "exp_avg/NAME"
    """
    if lies.shards is None:
        return place_replica(named, lies.spread, size)
    sizes, kept = dict(named), dict(slots)
    return Placement(sizes, {rank: list_held_slices(rank, size, sizes, kept, None, lies.shards, lies.sharded)
                             for rank in range(size)})  # fmt: skip


async def plan_layout(run: ChangeView, wanted: Experiment) -> StateLayout:
    """Returns the placement under `wanted` of a model in stages or slices. All ranks call it together.

    Buckets of shards follow the order of the gradients, if all ranks can foresee it. If a rank cannot foresee a step's
    reads, parameters stay whole until a step has shown them.
    """
    spread, strategy, rank = find_spread(wanted, run.model, run.learner), wanted.strategy, run.rank
    if spread is not None or strategy.opaque or "optimizer state" not in strategy.shards:
        return StateLayout(spread)
    if len((groups := list_shard_groups(strategy, rank.size))[0]) == 1:
        return WHOLE
    shared = "parameters" in strategy.shards
    trial = await run.unsharder.foresee_trace(cheaply=not shared)
    params = {name: p for name, p in reversed(list(run.model.named_parameters())) if p.requires_grad}
    order = dict.fromkeys([*(name for name in (trial.gradient_order if trial else ()) if name in params), *params])
    digest = hashlib.blake2b(";".join(order).encode(), digest_size=8).digest()
    known = trial is not None and len(set(await run.gather(int.from_bytes(digest, "big") >> 1))) == 1
    places = [ParameterPlace(name, _make_outline(params[name])) for name in (order if known else params)]
    buckets = tuple(tuple(place_in_order(group)) for group in group_parameters(places, run.layout.bucket_mb * 1e6))
    return StateLayout(None, ShardLayout(buckets, groups), shared and trial is not None, tuple(order) if known else ())


def _make_outline(param: nn.Parameter) -> nn.Parameter:
    made = torch.empty(whole_shape(param), dtype=unmaterialized.read_data(param).dtype, device="meta")
    return nn.Parameter(made, requires_grad=False)
