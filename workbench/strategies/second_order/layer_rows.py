"""Finds the layers that have Kronecker factors, and the rows of their inputs and slopes.

A slope is the gradient of a layer's output. A Linear layer's rows are its inputs. A convolution is a Linear layer of
patches, with one row for each place of its window and elements in the weight's order.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Layer = nn.Linear | nn.Conv1d | nn.Conv2d


class InputRows(NamedTuple):
    """A layer's inputs. Each row of a sequence counts as an example, and so do all patches of an image together.

    rows:  (n, i), with a final 1 in each row if the layer has a bias
    terms: the number of examples over which the loss is a mean
    """

    rows: Tensor
    terms: int


def find_layers(model: nn.Module, trained: set[str]) -> dict[str, Layer]:
    """Returns layers with factors by name: their parameters are trained and unshared.

    Derived classes may compute something else. Grouped convolutions have several matrices.
    """
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    found: dict[str, Layer] = {}
    for name, module in model.named_modules():
        if type(module) is nn.Linear or (type(module) in (nn.Conv1d, nn.Conv2d) and _is_plain_convolution(module)):
            own = [f"{name}.{key}".lstrip(".") for key, _ in module.named_parameters()]
            if trained.issuperset(own) and all(owners[id(p)] == 1 for p in module.parameters()):
                found[name] = module
    return found


def _is_plain_convolution(layer: nn.Module) -> bool:
    plain = layer.groups == 1 and layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return bool(plain)


def name_parameters(name: str, layer: Layer) -> tuple[str, str]:
    """Names weight and bias."""
    return f"{name}.weight".lstrip("."), f"{name}.bias".lstrip(".") if layer.bias is not None else ""


def factor_sizes(layer: Layer) -> tuple[int, int]:
    """Returns the sizes of inputs, with the bias's 1, and of outputs."""
    return layer.weight[0].numel() + (layer.bias is not None), len(layer.weight)


def make_input_rows(layer: Layer, x: Tensor, kind: torch.dtype) -> InputRows:
    """Makes rows of dtype `kind`."""
    x = x.detach().to(kind)
    if isinstance(layer, nn.Linear):
        rows = x.reshape(-1, layer.in_features)
        terms = len(rows)
    else:
        x = _add_batch_dim(layer, x)
        rows, terms = _cut_patches(layer, x), len(x)
    if layer.bias is not None:
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
    return InputRows(rows, terms)


def make_slope_rows(layer: Layer, grad: Tensor, kind: torch.dtype) -> Tensor:
    """Returns (n, o), by input row."""
    grad = grad.detach().to(kind)
    if not isinstance(layer, nn.Linear):
        grad = _add_batch_dim(layer, grad).movedim(1, -1)
    return grad.reshape(-1, len(layer.weight))


def _add_batch_dim(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution accepts one example without it."""
    return x if x.dim() == layer.weight.dim() else x[None]


def _cut_patches(layer: nn.Conv1d | nn.Conv2d, x: Tensor) -> Tensor:
    """Returns (B T, i): the window at each of T places."""
    window, dilation, padding, stride = (tuple(each) for each in (
        layer.kernel_size, layer.dilation, layer.padding, layer.stride))  # fmt: skip
    if isinstance(layer, nn.Conv1d):  # unfold takes images
        x = x[:, :, None]
        window, dilation, padding, stride = (1, *window), (1, *dilation), (0, *padding), (1, *stride)
    found = F.unfold(x, window, dilation, padding, stride)  # type: ignore[arg-type]
    return found.movedim(1, -1).flatten(0, 1)
