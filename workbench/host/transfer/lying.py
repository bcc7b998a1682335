"""How the trained state is placed on ranks: whole on each, in stages and slices, or in shards of buckets."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from workbench.experiment import Experiment
from workbench.experiment.arranged import sharers
from workbench.host.placement import absent
from workbench.host.placement.layout import Place, grouped, in_a_row
from workbench.host.placement.placement import Placement
from workbench.host.placement.sliced import shape_of
from workbench.host.placement.spread import Spread, placed, spread_of
from workbench.host.transfer.boundary import pieces_at
from workbench.host.transfer.handover import cut
from workbench.host.transfer.shards import Cut
from workbench.host.transfer.views import Changing

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class Lying(NamedTuple):
    """One way to place the trained state.

    spread:  the stages and slices of a replica; None: each rank has a whole replica
    shards:  the buckets that shard optimizer state, if replicas are whole; None: it is not sharded
    sharded: whether parameters are sharded in these buckets, too
    order:   the parameters' order for buckets, if it is not the reverse of registration
    """

    spread: Spread | None = None
    shards: Cut | None = None
    sharded: bool = False
    order: tuple[str, ...] = ()


WHOLE = Lying()


def lying(run: Changing, strategy: Strategy) -> Lying:
    """Returns the current placement, under `strategy`."""
    shards = cut(run, strategy)
    return Lying(run.spread, shards, run.reading.sharded and shards is not None)


@lru_cache(maxsize=8)  # all ranks of a simulation need the same one
def where(named: tuple[tuple[str, int], ...], slots: tuple[tuple[str, bool], ...], lies: Lying, size: int) -> Placement:
    """Returns the placement of all tensors on `size` ranks. See `placed` and `pieces_at`.

    named: (name, elements) of all tensors
    slots: (name, whether it has one element for any size of its parameter) of optimizer state, "exp_avg/NAME"
    """
    if lies.shards is None:
        return placed(named, lies.spread, size)
    sizes, kept = dict(named), dict(slots)
    return Placement(sizes, {rank: pieces_at(rank, size, sizes, kept, None, lies.shards, lies.sharded)
                             for rank in range(size)})  # fmt: skip


async def lying_then(run: Changing, wanted: Experiment) -> Lying:
    """Returns the placement under `wanted` of a model that is in stages or slices now. All ranks call it together.

    Buckets of shards follow the order of the gradients, if all ranks can foresee it. If a rank cannot foresee what a
    step reads, parameters stay whole until a step has shown it.
    """
    spread, strategy, rank = spread_of(wanted, run.model, run.learner), wanted.strategy, run.rank
    if spread is not None or strategy.opaque or "optimizer state" not in strategy.shards:
        return Lying(spread)
    if len((groups := sharers(strategy, rank.size))[0]) == 1:
        return WHOLE
    shared = "parameters" in strategy.shards
    trial = await run.reading.foresee(cheaply=not shared)
    params = {name: p for name, p in reversed(list(run.model.named_parameters())) if p.requires_grad}
    order = dict.fromkeys([*(name for name in (trial.arrival if trial else ()) if name in params), *params])
    digest = hashlib.blake2b(";".join(order).encode(), digest_size=8).digest()
    known = trial is not None and len(set(await run.gather(int.from_bytes(digest, "big") >> 1))) == 1
    places = [Place(name, _outline(params[name])) for name in (order if known else params)]
    buckets = tuple(tuple(in_a_row(group)) for group in grouped(places, run.layout.bucket_mb * 1e6))
    return Lying(None, Cut(buckets, groups), shared and trial is not None, tuple(order) if known else ())


def _outline(param: nn.Parameter) -> nn.Parameter:
    """Returns a whole parameter on meta, even if its values are on another rank."""
    made = torch.empty(shape_of(param), dtype=absent.data_of(param).dtype, device="meta")
    return nn.Parameter(made, requires_grad=False)
