"""A copy of a rank's state between two steps: tensors in the host's memory, everything else as JSON.

The rank neither leaves its strategy nor gathers anything, so a resumed rank is bit-identical. An Item names the tensor
that it belongs to. So a piece that several ranks hold is written once, and a whole model can be assembled.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.host.checkpoint.boxes import Box, boxes
from workbench.host.checkpoint.tree import written
from workbench.host.checkpoint.views import CheckpointView
from workbench.host.core.views import RankView
from workbench.host.memory.batches import Batches, Numbers
from workbench.host.placement import absent
from workbench.host.placement.placement import Held
from workbench.host.placement.sliced import shape_of
from workbench.host.placement.slices import Slice
from workbench.host.placement.slots import settings, slots
from workbench.host.placement.spread import placed
from workbench.host.transfer.handover import cut, in_shards

Lies = tuple[tuple[int, ...], tuple[Slice, ...]]  # a tensor's whole shape, and this rank's slices of it


class Item(NamedTuple):
    """A dense tensor of one rank, (n,) in the host's memory.

    name:  the tensor that it belongs to, "model.NAME" or "optimizer.exp_avg/NAME"; empty: this rank's own
    shape: the shape of that whole tensor
    boxes: the places of the elements in it, in order
    """

    name: str
    shape: tuple[int, ...]
    boxes: list[Box]
    values: Tensor


@dataclass
class Image:
    """One rank's image.

    step:  the next step that the rank makes
    items: its tensors
    said:  everything else, with a number in place of each tensor
    """

    step: int
    items: list[Item] = field(default_factory=list)
    said: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.values.numel() * item.values.element_size() for item in self.items)

    def add(self, name: str, x: Tensor, shape: tuple[int, ...], slices: tuple[Slice, ...] = ()) -> int:
        """Copies a tensor, whole or in slices of that shape, and returns its number."""
        flat = x.detach().reshape(-1).to("cpu", copy=True, memory_format=torch.contiguous_format)
        lies = boxes(shape, slices or (Slice(0, flat.numel()),)) if flat.numel() else [Box((0,) * len(shape), shape)]
        if lies is None:
            name, shape, lies = "", (flat.numel(),), [Box((0,), (flat.numel(),))]
        self.items.append(Item(name, shape, lies, flat))
        return len(self.items) - 1

    def own(self, x: Tensor) -> int:
        """Copies a tensor that belongs to this rank alone."""
        with absent.unasked():
            return self.add("", x, tuple(x.shape))


def taken(run: CheckpointView) -> Image:
    """Copies the state of `run`'s rank, with nothing in flight. Raises Unkept for other values."""
    image = Image(run.rank.step)
    said = image.said
    said["step"] = image.step
    said["parameters"] = {name: image.add(f"model.{name}", x, *place) for name, x, place in parameters(run)}
    said["beside"] = {name: image.add(f"model.{name}", x, tuple(x.shape)) for name, x in beside(run)}
    said["slots"] = {name: [image.add(f"optimizer.{name}", x, *place), list(x.shape), x.device.type]
                     for name, x, place in _slots(run)}  # fmt: skip
    said["order"] = [place.name for place in run.layout.order]
    state, optimizer = run.optimizer.state, run.optimizer
    others = {place.name: {slot: x for slot, x in state.get(place.param, {}).items() if not isinstance(x, Tensor)}
              for place in run.layout.order}  # fmt: skip
    remembered = {
        "state": run.state, "memory": run.rank.memory, "compressor": run.rank.compressor if run.flushing else None,
        "groups": settings(optimizer), "others": {name: x for name, x in others.items() if x},
        "rate": vars(run.rate), "measuring": vars(run.measuring), "policy": run.steering.kept(),
        "draws": numbers(run.draws), "crowd": run.crowd, "first": run.finite.first,
    }  # fmt: skip
    for name, x in remembered.items():
        said[name] = written(x, image.own, name)
    said["data"], said["used"] = _data(run.reads, image), run.reads.used if run.reads is not None else 0
    said["lr"], said["flushing"], said["held_out"] = run.rank.lr, run.flushing, run.held_out
    return image


def parameters(run: RankView) -> Iterator[tuple[str, Tensor, Lies]]:
    """Yields (name, this rank's elements, (whole shape, their slices)) of each parameter."""
    layout = run.layout
    for bucket, own, begin in zip(layout.params(), layout.weights, layout.begins, strict=True):
        for place, part in zip(layout.groups[bucket.index], bucket.parts, strict=True):
            low, high = max(part.start, begin), min(part.stop, begin + own.numel())
            if low < high:
                slices = (Slice(low - part.start, high - low),)
                yield part.name, own[low - begin : high - begin], _lies(run, part.name, place.param, slices)


def _lies(run: RankView, name: str, param: nn.Parameter, slices: tuple[Slice, ...]) -> Lies:
    """Returns (shape, slices) of this rank's elements of a parameter."""
    shape, local = shape_of(param), tuple(param.shape)
    if shape == local:
        return shape, slices
    whole = placed(((name, _numel(shape)),), run.spread, run.rank.size).at(run.rank.id)[name]
    if slices == (Slice(0, _numel(local)),):
        return shape, whole
    return local, slices  # a shard of a slice: boxes within the slice


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def beside(run: RankView) -> Iterator[tuple[str, Tensor]]:
    """Yields buffers and frozen parameters."""
    yield from run.model.named_buffers()
    for name, p in run.model.named_parameters():
        if not p.requires_grad and not isinstance(p, absent.Absent) and shape_of(p) == tuple(p.shape):
            yield name, p.data


def _slots(run: RankView) -> Iterator[tuple[str, Tensor, Lies]]:
    """Yields the optimizer state of each parameter, as `parameters` does."""
    here, params = slots(run.layout, run.optimizer), {place.name: place.param for place in run.layout.order}
    shards = cut(run, run.experiment.strategy)
    lies: Held = {}
    if shards is not None:
        sizes = tuple((name, p.numel()) for name, p in params.items())
        kept = tuple((name, x.dim() == 0 or x.numel() == 1) for name, x in here.items())
        lies = in_shards(sizes, kept, shards, run.rank.size).at(run.rank.id)
    for name, x in here.items():
        param = params[name.partition("/")[2]]
        if name in lies and sum(s.numel for s in lies[name]) == x.numel() > 1:
            yield name, x, _lies(run, name.partition("/")[2], param, lies[name])
        elif tuple(x.shape) == tuple(param.shape):
            yield name, x, _lies(run, name.partition("/")[2], param, (Slice(0, x.numel()),))
        else:
            yield name, x, (tuple(x.shape), ())


def _data(reads: Batches | None, image: Image) -> Any:
    """Returns this rank's position in its data."""
    if reads is None:
        return None
    chance = reads.chance.numbers if reads.chance is not None else None
    stands = [[list(client), tuple(stand)] for client, stand in reads.stands().items()]
    found = {"began": reads.began, "taken": reads.taken, "chance": numbers(chance), "stands": [
        [client, [numbers(x) if isinstance(x, tuple) else x for x in stand]] for client, stand in stands]}  # fmt: skip
    return written(found, image.own, "data")


def numbers(states: Numbers | None) -> Any:
    """Converts states of random numbers into tensors and plain numbers."""
    if states is None:
        return None
    torchs, numpys, pythons = states
    name, keys, *rest = numpys
    return [torchs, [name, torch.from_numpy(keys.astype("int64")), *map(float, rest)],
            [pythons[0], torch.tensor(pythons[1], dtype=torch.int64), pythons[2]]]  # fmt: skip
