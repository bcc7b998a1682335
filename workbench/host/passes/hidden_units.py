"""Finds hidden units that a sub-model can leave out, by the task's plan or in a Sequential."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from workbench.host.placement.sliced_parameter import whole_shape
from workbench.host.placement.tensor_split import ELEMENTWISE, list_leaves, match_plan
from workbench.rank import Cut, Units
from workbench.settings import KnobError
from workbench.tasks import Colwise, Learner, Rowwise, TaskError, Way

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_BY_CHANNEL = (  # channel by channel
    nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d, nn.Dropout1d, nn.Dropout2d, nn.Upsample,
)  # fmt: skip


def find_units(model: nn.Module, learner: Learner) -> list[Units]:
    """Raises KnobError if there are no hidden units."""
    if learner.split is not None:
        try:
            plan = dict(match_plan(model, learner.split(model), "the task's split"))
        except TaskError as error:
            raise KnobError(str(error)) from error
        found = list(_find_planned(model, plan))
        lacks = (
            "the task's `split` has no Colwise() Linear followed by a Rowwise() Linear with one input for each output"
        )
    elif isinstance(model, nn.Sequential):
        found = list(_find_sequential(model))
        lacks = "the Sequential has no two Linears or convolutions with only activations and pooling between them"
    else:
        found, lacks = [], f"the task does not declare which features of a {type(model).__name__} a sub-model can omit"
    if not found:
        raise KnobError(
            f'{lacks}; give the task `split`: model -> {{"blocks.*.up": Colwise(), "blocks.*.down": Rowwise()}}, with '
            f"Colwise(together=...) if outputs form heads, or take AsyncServer or TEASQFed, which train the whole model"
        )
    return found


def _find_planned(model: nn.Module, plan: Mapping[str, Way]) -> Iterator[Units]:
    own, names = _list_unshared(model), {id(p): name for name, p in model.named_parameters()}
    firsts: list[tuple[str, nn.Linear, Colwise]] = []
    for name, module in model.named_modules():
        way = plan.get(name)
        if isinstance(way, Colwise) and not way.gather and type(module) is nn.Linear:
            firsts.append((name, module, way))
        elif isinstance(way, Rowwise) and type(module) is nn.Linear:
            if firsts and (found := _make_units(firsts, module, own, names)) is not None:
                yield found
            firsts = []


def _make_units(firsts: list[tuple[str, nn.Linear, Colwise]], last: nn.Linear, own: set[int],
             names: dict[int, str]) -> Units | None:  # fmt: skip
    """Returns None if shapes or plans do not match."""
    out, into = whole_shape(last.weight)
    together = firsts[0][2].together
    count = into // together
    cuts: list[tuple[Tensor, tuple[int, ...], int]] = [(last.weight, (out, count, together), 1)]
    for _, module, way in firsts:
        rows, width = whole_shape(module.weight)
        if way.together != together or rows != way.packed * into or into % together:
            return None
        cuts.append((module.weight, (way.packed, count, together, width), 1))
        if module.bias is not None:
            cuts.append((module.bias, (way.packed, count, together), 1))
    if count < 2 or any(id(p) not in own for p, _, _ in cuts):
        return None
    found = tuple(Cut(names[id(p)], view, dim) for p, view, dim in cuts)
    return Units(firsts[0][0], count, found, names[id(last.weight)])


def _find_sequential(model: nn.Sequential) -> Iterator[Units]:
    own, names = _list_unshared(model), {id(p): name for name, p in model.named_parameters()}
    made: tuple[str, Any, int] | None = None  # layer before, units
    flat = False  # a Flatten follows
    views: dict[str, tuple[int, ...]] = {}
    found: list[tuple[str, int, list[tuple[str, int]]]] = []
    layers: Iterator[tuple[str, Any]] = list_leaves(model)
    for name, module in layers:
        if isinstance(module, ELEMENTWISE) or (isinstance(module, _BY_CHANNEL) and made and isinstance(made[1], _CONV)):
            continue
        if isinstance(module, nn.Flatten) and made and isinstance(made[1], _CONV):
            if (module.start_dim, module.end_dim) == (1, -1):
                flat = True
                continue
        if not _is_plain_layer(module, own):
            made = None
            continue
        weight = names[id(module.weight)]
        out, into, *kernel = whole_shape(module.weight)
        views[weight] = (out, into, *kernel)
        if made is not None and type(made[1]) is not type(module) and flat and not kernel and into % made[2] == 0:
            views[weight] = (out, made[2], into // made[2])  # a channel's places
        if made is not None and views[weight][1] == made[2] and (flat or type(made[1]) is type(module)):
            first = [(names[id(p)], 0) for p in (made[1].weight, made[1].bias) if p is not None]
            found.append((made[0], made[2], [*first, (weight, 1)]))
        if module.bias is not None:
            views[names[id(module.bias)]] = (out,)
        made, flat = (name, module, out), False
    for name, count, cuts in found:
        if count > 1:
            yield Units(name, count, tuple(Cut(param, views[param], dim) for param, dim in cuts), cuts[-1][0])


def _is_plain_layer(module: Any, own: set[int]) -> bool:
    if type(module) is nn.Linear or (type(module) in _CONV and module.groups == 1):
        return all(id(p) in own for p in (module.weight, module.bias) if p is not None)
    return False


def _list_unshared(model: nn.Module) -> set[int]:
    has = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {id(p) for p in model.parameters() if p.requires_grad and has[id(p)] == 1}
