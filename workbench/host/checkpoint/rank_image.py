"""A copy of a rank's state between two steps: tensors on the CPU, everything else as JSON.

The rank neither leaves its strategy nor gathers. So a resumed rank is bit-identical.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from workbench.host.checkpoint.boxes import Box, convert_slices
from workbench.host.checkpoint.checkpoint_view import CheckpointView
from workbench.host.checkpoint.value_encoding import encode_value
from workbench.host.core.rank_view import RankView
from workbench.host.memory.batches import BatchReader, Numbers
from workbench.host.placement import unmaterialized
from workbench.host.placement.optimizer_slots import read_settings, read_slots
from workbench.host.placement.placement import Held
from workbench.host.placement.replica_spread import place_replica
from workbench.host.placement.sliced_parameter import whole_shape
from workbench.host.placement.strided_slices import StridedSlice
from workbench.host.transfer.handover import find_shards, place_slots

TensorPlace = tuple[tuple[int, ...], tuple[StridedSlice, ...]]  # whole shape, own slices


class ImageTensor(NamedTuple):
    """A dense tensor of one rank, (n,), on the CPU.

    name:  of the whole tensor, "model.NAME" or "optimizer.exp_avg/NAME"; empty: this rank's own
    shape: of the whole tensor
    boxes: the places of the elements in it, in order
    """

    name: str
    shape: tuple[int, ...]
    boxes: list[Box]
    values: Tensor


@dataclass
class RankImage:
    """One rank's image.

    step:    the rank's next step
    entries: all other state, with a number for each tensor
    """

    step: int
    items: list[ImageTensor] = field(default_factory=list)
    entries: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(item.values.numel() * item.values.element_size() for item in self.items)

    def add_tensor(self, name: str, x: Tensor, shape: tuple[int, ...], slices: tuple[StridedSlice, ...] = ()) -> int:
        """Copies a tensor, or slices of `shape`, and returns its number."""
        flat = x.detach().reshape(-1).to("cpu", copy=True, memory_format=torch.contiguous_format)
        lies = (
            convert_slices(shape, slices or (StridedSlice(0, flat.numel()),))
            if flat.numel()
            else [Box((0,) * len(shape), shape)]
        )
        if lies is None:
            name, shape, lies = "", (flat.numel(),), [Box((0,), (flat.numel(),))]
        self.items.append(ImageTensor(name, shape, lies, flat))
        return len(self.items) - 1

    def add_own(self, x: Tensor) -> int:
        with unmaterialized.prevent_fetches():
            return self.add_tensor("", x, tuple(x.shape))


def make_rank_image(run: CheckpointView) -> RankImage:
    """Call it with nothing in flight. Raises UnsavableValue for a value that cannot be written."""
    image = RankImage(run.rank.step)
    said = image.entries
    said["step"] = image.step
    said["parameters"] = {
        name: image.add_tensor(f"model.{name}", x, *place) for name, x, place in locate_parameters(run)
    }
    said["beside"] = {name: image.add_tensor(f"model.{name}", x, tuple(x.shape)) for name, x in list_untrained(run)}
    said["slots"] = {name: [image.add_tensor(f"optimizer.{name}", x, *place), list(x.shape), x.device.type]
                     for name, x, place in _locate_slots(run)}  # fmt: skip
    said["order"] = [place.name for place in run.layout.order]
    said["frozen"] = run.layout.frozen_names
    state, optimizer = run.optimizer.state, run.optimizer
    others = {place.name: {slot: x for slot, x in state.get(place.param, {}).items() if not isinstance(x, Tensor)}
              for place in run.layout.order}  # fmt: skip
    remembered = {
        "state": run.state, "memory": run.rank.memory, "compressor": run.rank.compressor if run.flushing else None,
        "groups": read_settings(optimizer), "others": {name: x for name, x in others.items() if x},
        "rate": vars(run.rate), "measuring": vars(run.error_probe), "policy": run.policy_runner.kept(),
        "draws": encode_rng_states(run.rng_states), "crowd": run.slice_rng, "first": run.non_finite_guard.first,
    }  # fmt: skip
    for name, x in remembered.items():
        said[name] = encode_value(x, image.add_own, name)
    said["data"], said["used"] = _encode_position(run.reads, image), run.reads.used if run.reads is not None else 0
    said["lr"], said["flushing"], said["held_out"] = run.rank.lr, run.flushing, run.held_out
    return image


def locate_parameters(run: RankView) -> Iterator[tuple[str, Tensor, TensorPlace]]:
    """Yields (name, this rank's elements, (whole shape, their slices))."""
    layout = run.layout
    for bucket, own, begin in zip(layout.list_params(), layout.weights, layout.begins, strict=True):
        for place, part in zip(layout.groups[bucket.index], bucket.parts, strict=True):
            low, high = max(part.start, begin), min(part.stop, begin + own.numel())
            if low < high:
                slices = (StridedSlice(low - part.start, high - low),)
                yield part.name, own[low - begin : high - begin], _locate_slices(run, part.name, place.param, slices)


def _locate_slices(run: RankView, name: str, param: nn.Parameter, slices: tuple[StridedSlice, ...]) -> TensorPlace:
    shape, local = whole_shape(param), tuple(param.shape)
    if shape == local:
        return shape, slices
    whole = place_replica(((name, _count_elements(shape)),), run.spread, run.rank.size).slices_of_rank(run.rank.id)[
        name
    ]
    if slices == (StridedSlice(0, _count_elements(local)),):
        return shape, whole
    return local, slices  # a shard of a slice


def _count_elements(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


def list_untrained(run: RankView) -> Iterator[tuple[str, Tensor]]:
    """Yields buffers, and frozen parameters outside buckets."""
    yield from run.model.named_buffers()
    here = {id(place.param) for place in run.layout.order}
    for name, p in run.model.named_parameters():
        if (
            not p.requires_grad
            and id(p) not in here
            and not isinstance(p, unmaterialized.UnmaterializedParameter)
            and whole_shape(p) == tuple(p.shape)
        ):
            yield name, p.data


def _locate_slots(run: RankView) -> Iterator[tuple[str, Tensor, TensorPlace]]:
    here, params = read_slots(run.layout, run.optimizer), {place.name: place.param for place in run.layout.order}
    shards = find_shards(run, run.experiment.strategy)
    lies: Held = {}
    if shards is not None:
        sizes = tuple((name, p.numel()) for name, p in params.items())
        kept = tuple((name, x.dim() == 0 or x.numel() == 1) for name, x in here.items())
        lies = place_slots(sizes, kept, shards, run.rank.size).slices_of_rank(run.rank.id)
    for name, x in here.items():
        param = params[name.partition("/")[2]]
        if name in lies and sum(s.element_count for s in lies[name]) == x.numel() > 1:
            yield name, x, _locate_slices(run, name.partition("/")[2], param, lies[name])
        elif tuple(x.shape) == tuple(param.shape):
            yield name, x, _locate_slices(run, name.partition("/")[2], param, (StridedSlice(0, x.numel()),))
        else:
            yield name, x, (tuple(x.shape), ())


def _encode_position(reads: BatchReader | None, image: RankImage) -> Any:
    if reads is None:
        return None
    chance = reads.own_randomness.numbers if reads.own_randomness is not None else None
    stands = [[list(client), tuple(stand)] for client, stand in reads.list_positions().items()]
    found = {
        "began": reads.restart_arguments,
        "taken": reads.taken,
        "chance": encode_rng_states(chance),
        "stands": [
            [client, [encode_rng_states(x) if isinstance(x, tuple) else x for x in stand]] for client, stand in stands
        ],
    }
    return encode_value(found, image.add_own, "data")


def encode_rng_states(states: Numbers | None) -> Any:
    """Encodes random states as JSON and tensors."""
    if states is None:
        return None
    torchs, numpys, pythons = states
    name, keys, *rest = numpys
    return [torchs, [name, torch.from_numpy(keys.astype("int64")), *map(float, rest)],
            [pythons[0], torch.tensor(pythons[1], dtype=torch.int64), pythons[2]]]  # fmt: skip
