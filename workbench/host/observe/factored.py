"""Which layers of a model have Kronecker factors, and what of a layer counts as a row of its inputs and of its slopes.

A Linear layer's rows are what it is fed. A convolution is a Linear layer of patches: one row for each place to which
its window goes, with the elements of the window in the order of the weight's.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


class Rows(NamedTuple):
    """What a layer was fed.

    rows:  (n, i), with a 1 behind each where it has a bias
    terms: examples over which the loss is a mean

    Of a sequence every row counts as an example, of an image not every patch: the patches of one are added up.
    """

    rows: Tensor
    terms: int


def layers(model: nn.Module, trained: set[str]) -> dict[str, Layer]:
    """The layers that have factors, by name: those whose parameters are all trained, and no other module's, too.

    Not those of a class derived from one, which may compute something else, nor a convolution in groups, whose weight
    is several matrices, or one that is padded with anything but zeros.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) in (nn.Conv1d, nn.Conv2d) and _plain(module)):
            own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters()]
            if trained.issuperset(own) and all(owners[id(p)] == 1 for p in module.parameters()):
                found[name] = module
    return found


def _plain(layer: nn.Module) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return bool(plain)


def named(name: str, layer: Layer) -> tuple[str, str]:
    """A layer's weight and bias as the model names them."""
    return f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".") if layer.bias is not None else ""


def sizes(layer: Layer) -> tuple[int, int]:
    """Rows of its two factors: of inputs, with the bias's 1, and of outputs."""
    return layer.weight[0].numel() + (layer.bias is not None), len(layer.weight)


def fed(layer: Layer, x: Tensor, kind: torch.dtype) -> Rows:
    """What `layer` was fed, in rows of that dtype."""
    x = x.detach().to(kind)
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, layer.in_features)
        terms = len(rows)
    else:
        x = _batched(layer, x)
        rows, terms = _patches(layer, x), len(x)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return Rows(rows, terms)


def slopes(layer: Layer, grad: Tensor, kind: torch.dtype) -> Tensor:
    """(n, o): the gradient of what `layer` made, a row for each row that it was fed."""
    grad = grad.detach().to(kind)
    if not isinstance(layer, nn.Linear):
        grad = _batched(layer, grad).movedim(1, -1)
    return grad.reshape(-1, len(layer.weight))


def _batched(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution may be given one example without a dimension for it."""
    return x if x.dim() == layer.weight.dim() else x[None]


def _patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """(B T, i): what the window sees at each of T places."""
    window, dilation, padding, stride = (tuple(each) for each in (
        layer.kernel_size, layer.dilation, layer.padding, layer.stride))  # fmt: skip
    if isinstance(layer, nn.Conv1d):  # torch unfolds images only: one of a single line
        x = x[:, :, None]
        window, dilation, padding, stride = (1, *window), (1, *dilation), (0, *padding), (1, *stride)
    found = F.unfold(x, window, dilation, padding, stride)  # type: ignore[arg-type]
    return found.movedim(1, -1).flatten(0, 1)
