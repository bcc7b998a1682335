"""Reads a whole model, after a loss, from a checkpoint of ranks with parts.

Each remaining rank reads everything. Drifted replicas become their mean. Heirs inherit compression residuals by their
owner's rule. An outer momentum and another optimizer's state are reset.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from workbench.compressors import inside
from workbench.experiment import Experiment
from workbench.experiment.mesh_rules import list_shard_groups, make_mesh
from workbench.host.checkpoint.restore import RestoredState, open_image
from workbench.host.checkpoint.whole_image import Shares, find_heir, inherit_shares
from workbench.host.core.dropped_state import find_rule
from workbench.host.core.rank_view import RankView
from workbench.host.placement.bucket_groups import ParameterPlace, group_parameters, place_in_order
from workbench.host.placement.move_state import view_slice
from workbench.host.placement.optimizer_slots import make_slot_likes, put_slots
from workbench.host.placement.replica_spread import find_spread
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.reconfigure.changes import has_foreign_residuals
from workbench.host.transfer.boundary import list_held_slices, widen_slices
from workbench.host.transfer.rank_state import MOVED_RULES
from workbench.host.transfer.shard_layout import ShardLayout
from workbench.rank import Memory, can_average

if TYPE_CHECKING:
    from workbench.record.checkpoints import Checkpoint, CheckpointFiles


class _SourceRank(NamedTuple):
    """One rank's image, with numbers of tensors and their slices by name."""

    image: RestoredState
    numbers: dict[str, int]
    held: Mapping[str, tuple[StridedSlice, ...]]


class RecoveryCheckpoint(NamedTuple):
    """Settings and all ranks' images."""

    settings: Mapping[str, Any]
    images: Sequence[RestoredState]

    @property
    def used(self) -> int:
        """Examples used up."""
        return max(image.used for image in self.images)


def open_images(checkpoint: Checkpoint, files: CheckpointFiles) -> RecoveryCheckpoint:
    """Raises RunError if it cannot read an image."""
    images = [open_image(checkpoint, files, place, alone=True) for place in range(checkpoint.ranks)]
    return RecoveryCheckpoint(checkpoint.settings, images)


def load_whole_state(run: RankView, former: RecoveryCheckpoint) -> None:
    """Fills a rank that has memory for the whole model.

    Raises RunError if the checkpoint cannot be read, and KnobError if it is of another model.
    """
    try:
        with former.images[0].refuse_misfits():
            was = Experiment.read(dict(former.settings), run.experiment.task).checked()
            _load_whole_state(run, was, former.images)
    finally:
        former.images[0].close()


def _load_whole_state(run: RankView, was: Experiment, images: Sequence[RestoredState]) -> None:
    params = {place.name: place.param for place in run.layout.order}
    like = (
        make_slot_likes(run.layout.order, run.optimizer)
        if type(was.optimizer) is type(run.experiment.optimizer)
        else {}
    )
    sources = list(_list_sources(run, was, images, like))
    given = {}
    with torch.no_grad():
        for name, p in params.items():
            p.data.copy_(_assemble_tensor(sources, name, p.data.numel(), p.data.dtype, was).view(p.shape))
        for name, x in _list_untrained(run):
            x.copy_(_assemble_tensor(sources, name, x.numel(), x.dtype, was).view(x.shape))
        for name, x in like.items():
            if any(name in source.numbers for source in sources):
                n = x.numel() or params[name.partition("/")[2]].numel()
                found = _assemble_tensor(sources, name, n, x.dtype, was)
                dropped = (
                    was.strategy.periodic and find_rule(run.experiment.optimizer.own, name.partition("/")[0]) == "drop"
                )
                given[name] = (found.zero_() if dropped else found).to(x.device)
        put_slots(run.layout, run.optimizer, given, like)
        _inherit_residuals(run, was, images)


def _inherit_residuals(run: RankView, was: Experiment, images: Sequence[RestoredState]) -> None:
    e, kept = run.experiment, {c.residual for c in inside(run.experiment.compressor) if c.residual}
    rules = {name: rule for one in inside(was.compressor) for name, rule in one.own.items()
             if rule in MOVED_RULES and name in kept}  # fmt: skip
    if not rules or has_foreign_residuals(was, e):
        return
    spread, params = find_spread(was, run.model, run.learner), {place.name: place.param for place in run.layout.order}
    replicas = make_mesh(was.strategy, was.ranks, 0, was.partition).ranks
    ways, me, size = was.partition.size, run.rank.id, run.rank.size
    shares: list[Shares] = []
    for number in range(count := len(replicas) // ways):
        if "mean" not in rules.values() and find_heir(number, count, size) != me:
            shares.append({})  # another rank's
            continue
        share: Shares = {}
        for place in replicas[number * ways : (number + 1) * ways]:
            for name, pieces in _decode_residuals(run, images[place]).items():
                if name in rules:
                    known = share.setdefault(name, {})
                    for of, x in pieces.items():
                        whole = widen_slices(of, x, params[of].numel(), spread, place, was.ranks)
                        known[of] = known[of] + whole if of in known else whole
        shares.append(share)
    for name, found in inherit_shares(me, size, rules, shares).items():
        run.rank.memory.buffers[name] = {of: x.to(params[of].device) for of, x in found.items()}


def _decode_residuals(run: RankView, image: RestoredState) -> Shares:
    return image.make_decoder(run).load_memory(Memory(), image.entries["memory"]).buffers


def _list_untrained(run: RankView) -> Iterator[tuple[str, Tensor]]:
    yield from run.model.named_buffers()
    yield from ((name, p.data) for name, p in run.model.named_parameters() if not p.requires_grad)


def _list_sources(run: RankView, was: Experiment, images: Sequence[RestoredState],
             like: Mapping[str, Tensor]) -> Iterator[_SourceRank]:  # fmt: skip
    """Yields only ranks that trained or owned a table."""
    numel = {place.name: place.numel for place in run.layout.order}
    sizes = numel | {name: x.numel() for name, x in _list_untrained(run)}
    for name, x in like.items():
        sizes[name] = x.numel() or numel[name.partition("/")[2]]
    kept = {name: bool(x.numel()) for name, x in like.items()}
    spread, lies = find_spread(was, run.model, run.learner), _find_former_shards(run, was, images[0])
    who = make_mesh(was.strategy, was.ranks).ranks if was.partition.size == 1 else range(was.ranks)
    tables = {name: was.strategy.owner(k, was.ranks) for k, name in enumerate(run.rank.tables)}
    for place in range(was.ranks):
        if place not in who and place not in tables.values():
            continue
        image = images[place]
        numbers = dict(image.entries["parameters"]) | dict(image.entries["beside"])
        numbers |= {name: said[0] for name, said in image.entries["slots"].items()}
        sharded = bool(lies) and sum(
            image.read_tensor(n).numel() for n in dict(image.entries["parameters"]).values()
        ) < sum(numel.values())
        held = list_held_slices(place, was.ranks, sizes, kept, spread, lies, sharded)
        here = {name: number for name, number in numbers.items()
                if tables.get(name.partition("/")[2] or name, place) == place
                and (place in who or (name.partition("/")[2] or name) in tables)}  # fmt: skip
        yield _SourceRank(image, here, held)


def _find_former_shards(run: RankView, was: Experiment, first: RestoredState) -> ShardLayout | None:
    strategy = was.strategy
    if strategy.opaque or "optimizer state" not in strategy.shards:
        return None
    if len((groups := list_shard_groups(strategy, was.ranks))[0]) == 1:
        return None
    places = {place.name: place for place in run.layout.order}
    order = [ParameterPlace(name, places[name].param) for name in map(str, first.entries["order"])]
    return ShardLayout(
        tuple(tuple(place_in_order(group)) for group in group_parameters(order, was.bucket_mb * 1e6)), groups
    )


def _assemble_tensor(sources: Sequence[_SourceRank], name: str, n: int, dtype: torch.dtype, was: Experiment) -> Tensor:
    """Returns (n,). Drifted replicas become their mean if `dtype` has one."""
    mean = was.strategy.periodic and can_average(dtype)
    total, times = torch.zeros(n, dtype=dtype), torch.zeros(n, dtype=torch.int32)
    for source in sources:
        if name not in source.numbers or name not in source.held:
            continue
        values, slices = source.image.read_tensor(source.numbers[name]).reshape(-1), source.held[name]
        if values.numel() != sum(s.element_count for s in slices) or values.dtype != dtype:
            raise ValueError(f"{name} has {values.numel()} elements of {values.dtype} on a rank there")
        at = 0
        for s in slices:
            here, seen_so = (view_slice(x, (StridedSlice(0, n),), s) for x in (total, times))
            came = values[at : at + s.element_count].view(s.times, s.length)
            here.copy_(here + came if mean else torch.where(seen_so > 0, here, came))
            seen_so.add_(1)
            at += s.element_count
    if n and not bool(times.all()):
        raise KeyError(f"all of {name}")
    return total.div_(times) if mean else total
