"""Optimizer state by name, and the optimizer's step of a single shard.

A slot of a parameter is called "exp_avg/NAME". An elementwise optimizer's slots may be cut like their parameter (see
`workbench.optimizers.elementwise`). Step counters are whole on every rank with part of the parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.placement import unmaterialized
from workbench.host.placement.bucket_groups import ParameterPlace
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.optimizers import elementwise
from workbench.rank import Bucket, StrategyError

Settings = list[dict[str, Any]]  # without parameters
Remembered = dict[tuple[str, str], Any]  # by (parameter, slot)


def read_slots(layout: ParameterLayout, optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns the optimizer state by name. Writes change the optimizer."""
    return {f"{slot}/{place.name}": x for place in layout.order
            for slot, x in sorted(optimizer.state.get(place.param, {}).items()) if isinstance(x, Tensor)}  # fmt: skip


def make_slot_likes(places: Iterable[ParameterPlace], optimizer: Optimizer) -> dict[str, Tensor]:
    """Returns tensors like those of `read_slots` after a step, empty if they are cut like the parameter.

    The optimizer steps a parameter of 2 elements to find the dtypes that a receiving rank needs.
    """
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    known: dict[tuple[int, torch.dtype], dict[str, Tensor]] = {}
    found: dict[str, Tensor] = {}
    for place in places:
        if id(place.param) not in group_of:
            continue
        key = group_of[id(place.param)], place.param.dtype
        if key not in known:
            known[key] = _try_step(optimizer, key[0], place)
        found |= {f"{slot}/{place.name}": x for slot, x in known[key].items()}
    return found


def _try_step(optimizer: Optimizer, number: int, place: ParameterPlace) -> dict[str, Tensor]:
    small = nn.Parameter(torch.zeros(2, dtype=place.param.dtype, device=place.param.device))
    small.grad = torch.zeros_like(small)
    other = copy_optimizer(optimizer, [{**optimizer.param_groups[number], "params": [small]}])
    other.step()
    tensors = {slot: x for slot, x in sorted(other.state[small].items()) if isinstance(x, Tensor)}
    return {slot: x[:0] if x.shape == small.shape else x for slot, x in tensors.items()}


def put_slots(layout: ParameterLayout, optimizer: Optimizer, given: dict[str, Tensor], like: dict[str, Tensor],
        places: Iterable[ParameterPlace] | None = None) -> None:  # fmt: skip
    """Replaces optimizer state, of all parameters or of `places`. A shard's slots are flat."""
    mine: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, x in given.items():
        slot, _, parameter = name.partition("/")
        mine[parameter][slot] = x.view(like[name].shape) if like[name].numel() else x
    for place in layout.order if places is None else places:
        if place.name not in mine:
            optimizer.state.pop(place.param, None)
            continue
        shape = place.param.shape
        for slot, x in mine[place.name].items():
            optimizer.state[place.param][slot] = x.view(shape) if x.dim() and x.numel() == place.numel else x


def require_steppable(layout: ParameterLayout, optimizer: Optimizer, shard: Bucket, e: Experiment) -> None:
    """Raises StrategyError if the optimizer or `clip` forbids an update of one bucket or shard."""
    if e.clip and not e.strategy.shards:  # strategies with shards clip the summed gradients
        raise StrategyError("one bucket's gradients have no global norm: take clip=0, or `rank.update()` whole")
    if shard.data.numel() < layout.buckets[shard.index].data.numel() and not elementwise(optimizer):
        raise StrategyError(
            f"update of part of a tensor: {type(optimizer).__name__} is not known to step each element by itself; use "
            f"SGD, Adam or AdamW, give your own class `elementwise = True`, or update whole buckets"
        )


def step_shard(layout: ParameterLayout, optimizer: Optimizer, shard: Bucket) -> None:
    """Steps these elements, and uses up the gradients of their whole bucket."""
    with _expose_shard(layout, optimizer, shard):
        optimizer.step()
    layout.release_gradients(shard.index)


@contextmanager
def _expose_shard(layout: ParameterLayout, optimizer: Optimizer, shard: Bucket) -> Iterator[None]:
    """Inside, the optimizer has only the parameters of `shard`, cut to its elements."""
    whole, bucket = layout.weight_bucket(shard.index), layout.buckets[shard.index]
    held, begin = layout.weights[shard.index], layout.begins[shard.index]  # the shard alone, or the whole bucket
    start, stop = shard.offset - whole.offset, shard.offset - whole.offset + shard.data.numel()
    grads = bucket.data[start:stop] if bucket.kept is None else bucket.kept
    cut = []
    with unmaterialized.prevent_fetches():
        for place, part in zip(layout.groups[shard.index], whole.parts, strict=True):
            place.param.grad = None
            low, high = max(part.start, start), min(part.stop, stop)
            if high > low and place.name not in layout.unused:
                own, ask = place.param.data, getattr(place.param, "ask", None)
                shape = part.shape if high - low == place.numel else (high - low,)
                cut.append((place.param, own, ask))
                unmaterialized.make_present(place.param)
                place.param.data = held[low - begin : high - begin].view(shape)
                place.param.grad = grads[low - start : high - start].view(shape)
    all_of_it, mine = [group["params"] for group in optimizer.param_groups], {id(param) for param, _, _ in cut}
    try:
        for group, params in zip(optimizer.param_groups, all_of_it, strict=True):
            group["params"] = [p for p in params if id(p) in mine]
        yield
    finally:
        for group, params in zip(optimizer.param_groups, all_of_it, strict=True):
            group["params"] = params
        with unmaterialized.prevent_fetches():
            for param, own, ask in cut:
                param.grad = None
                param.data = own
                if ask is not None:
                    unmaterialized.make_absent(param, ask)


def swap_bucket_slots(
    layout: ParameterLayout, optimizer: Optimizer, index: int, given: Remembered | None = None
) -> Remembered:
    """Takes a bucket's state out of the optimizer, or puts `given` back."""
    named = {place.name: place.param for place in (layout.groups[index] if given is None else layout.order)}
    if given is not None:
        for (name, slot), x in given.items():
            optimizer.state[named[name]][slot] = x
        return given
    found = {name: optimizer.state.pop(param, {}) for name, param in named.items()}
    return {(name, slot): x for name, state in found.items() for slot, x in state.items()}


def read_settings(optimizer: Optimizer) -> Settings:
    """Returns the groups' settings."""
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def step_apart(
    layout: ParameterLayout,
    optimizer: Optimizer,
    shard: Bucket,
    values: Tensor,
    grads: Tensor,
    state: Remembered,
    by: Settings,
    unused: Collection[str] = (),
) -> Remembered:
    """Makes one step of `values` (n,), the parameters of `shard` outside the model.

    Another thread may use the model and the optimizer at the same time.

    state:  their optimizer state; returned as it is after the step
    unused: parameters that no rank used, which are not stepped
    """
    places = {place.name: place for place in layout.groups[shard.index]}
    group_of = {id(p): number for number, group in enumerate(optimizer.param_groups) for p in group["params"]}
    groups: list[list[nn.Parameter]] = [[] for _ in by]
    made: dict[str, nn.Parameter] = {}
    for part in shard.parts:
        place = places[part.name]
        if id(place.param) not in group_of or part.name in unused:
            continue
        shape = place.param.shape if part.stop - part.start == place.numel else (part.stop - part.start,)
        made[part.name] = own = nn.Parameter(values[part.start : part.stop].view(shape))
        own.grad = grads[part.start : part.stop].view(shape)
        groups[group_of[id(place.param)]].append(own)
    other = copy_optimizer(optimizer, [{**said, "params": params} for said, params in zip(by, groups, strict=True)])
    for (name, slot), x in state.items():
        if name in made:
            other.state[made[name]][slot] = x
    other.step()
    stepped = {(name, slot): x for name, param in made.items() for slot, x in other.state[param].items()}
    return {**state, **stepped}


def copy_optimizer(optimizer: Optimizer, groups: Settings) -> Optimizer:
    """Returns an optimizer without state. groups: with parameters. torch's copy loses a user class's attributes."""
    other = object.__new__(type(optimizer))
    other.__dict__.update({name: x for name, x in optimizer.__dict__.items() if name != "step"})  # schedulers patch it
    other.state, other.param_groups = defaultdict(dict), groups
    return other
