"""A layer's curvature as a Kronecker product: running factors and their damped inverses.

This file knows ranks only by number. The strategy decides what they send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.rank import Bucket, Memory, outlined
from workbench.strategies.second_order.factors import Factors

INPUTS, OUTPUTS = (
    "inputs",
    "outputs",
)  # buffers of a Memory, by weight: the factors; with INVERSE_SUFFIX, their inverses
INVERSE_SUFFIX = " inverse"


class Layer(NamedTuple):
    """One layer: its parameters, and the sizes of its two factors."""

    weight: str
    bias: str
    inputs: int
    outputs: int

    @property
    def packed(self) -> int:
        """Elements sent for both factors or their inverses. Each is symmetric, so half is enough."""
        return _triangle(self.inputs) + _triangle(self.outputs)

    @property
    def products(self) -> int:
        """Floating-point operations to multiply a gradient by both inverses."""
        return 2 * self.inputs * self.outputs * (self.inputs + self.outputs)


def seen(factors: Iterable[Factors]) -> list[Layer]:
    """Returns the layers of these factors."""
    return [Layer(f.weight, f.bias, len(f.inputs), len(f.outputs)) for f in factors]


def assign_layers(layers: Sequence[Layer], size: int) -> dict[str, int]:
    """Returns, by weight, which of `size` ranks inverts its factors.

    The costliest layer comes first, and each goes to the least loaded rank. A matrix of n rows costs n^3.
    """
    return _assign_layers(tuple(layers), size)


@lru_cache(maxsize=16)  # every rank calls it in every step
def _assign_layers(layers: tuple[Layer, ...], size: int) -> dict[str, int]:
    load, owner = [0] * size, {}
    for layer in sorted(layers, key=_cost, reverse=True):
        owner[layer.weight] = lightest = load.index(min(load))
        load[lightest] += _cost(layer)
    return owner


def cubes(layers: Iterable[Layer]) -> int:
    """Returns about the floating-point operations to invert the factors of these layers."""
    return sum(map(_cost, layers))


def packed(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the upper triangles of symmetric matrices, concatenated: (n,)."""
    return torch.cat([_upper(matrix) for pair in pairs for matrix in pair])


def unpacked(flat: Tensor, layers: Sequence[Layer]) -> list[tuple[Tensor, Tensor]]:
    """Returns each layer's two matrices from the result of `packed`; they are exactly symmetric."""
    sizes = [n for layer in layers for n in (layer.inputs, layer.outputs)]
    whole = [_whole(x, n) for x, n in zip(flat.split([_triangle(n) for n in sizes]), sizes, strict=True)]
    return list(zip(whole[::2], whole[1::2], strict=True))


def fold(memory: Memory, layers: Sequence[Layer], new: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
    """Updates the running averages: the new factors have weight `share`."""
    for layer, pair in zip(layers, new, strict=True):
        for name, matrix in zip((INPUTS, OUTPUTS), pair, strict=True):
            known = memory.parts.setdefault(name, {})
            if layer.weight in known:
                known[layer.weight].lerp_(matrix, share)
            else:
                known[layer.weight] = matrix


def invert(memory: Memory, layer: Layer, damping: float) -> tuple[Tensor, Tensor]:
    """Returns (A + pi sqrt(damping) I)^-1 and (G + sqrt(damping) / pi I)^-1.

    pi^2 is the ratio of their mean eigenvalues. Both inverses are the identity if the layer has seen no row or no
    gradient.
    """
    return _inverses(memory.parts[INPUTS][layer.weight], memory.parts[OUTPUTS][layer.weight], damping)


def keep(memory: Memory, layer: Layer, pair: tuple[Tensor, Tensor]) -> None:
    """Stores a layer's inverses."""
    for name, matrix in zip((INPUTS, OUTPUTS), pair, strict=True):
        memory.parts.setdefault(name + INVERSE_SUFFIX, {})[layer.weight] = matrix


def preconditioned(memory: Memory, layer: Layer, gradient: Tensor) -> Tensor:
    """Returns G^-1 gradient A^-1, (o, i)."""
    left, right = (
        memory.parts[OUTPUTS + INVERSE_SUFFIX][layer.weight],
        memory.parts[INPUTS + INVERSE_SUFFIX][layer.weight],
    )
    return left @ gradient.to(left.dtype) @ right


class Gradients:
    """The gradients of a model by layer: (o, i), with the bias's gradient as the last column."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._of = {p.name: b.data[p.start : p.stop].view(p.shape) for b in buckets for p in b.parts}

    def of(self, layer: Layer) -> Tensor:
        weight = self._of[layer.weight].flatten(1)
        return torch.cat([weight, self._of[layer.bias][:, None]], 1) if layer.bias else weight

    def put(self, layer: Layer, gradient: Tensor) -> None:
        weight = self._of[layer.weight].flatten(1)  # a convolution has one row per channel
        weight.copy_(gradient[:, : weight.shape[1]])
        if layer.bias:
            self._of[layer.bias].copy_(gradient[:, -1])


def _cost(layer: Layer) -> int:
    return layer.inputs**3 + layer.outputs**3


def _triangle(n: int) -> int:
    return n * (n + 1) // 2


@outlined(lambda matrix: matrix.new_empty(_triangle(len(matrix))))
def _upper(matrix: Tensor) -> Tensor:
    i, j = torch.triu_indices(*matrix.shape, device=matrix.device)
    return matrix[i, j]


@outlined(lambda flat, n: flat.new_empty(n, n))
def _whole(flat: Tensor, n: int) -> Tensor:
    i, j = torch.triu_indices(n, n, device=flat.device)
    whole = flat.new_empty(n, n)
    whole[i, j] = flat
    whole[j, i] = flat
    return whole


@outlined(lambda inputs, outputs, damping: (torch.empty_like(inputs), torch.empty_like(outputs)))
def _inverses(inputs: Tensor, outputs: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    mean_a, mean_g = (float(m.diagonal().double().mean()) for m in (inputs, outputs))
    if mean_a == 0 or mean_g == 0:
        return tuple(torch.eye(len(m), dtype=m.dtype, device=m.device) for m in (inputs, outputs))  # type: ignore[return-value]
    pi = (mean_a / mean_g) ** 0.5
    return _inverse(inputs, pi * damping**0.5), _inverse(outputs, damping**0.5 / pi)


def _inverse(matrix: Tensor, damping: float) -> Tensor:
    """Returns the inverse, computed in double precision; nan if the matrix is not positive, as after divergence."""
    damped = matrix.to(torch.float64, copy=True)
    damped.diagonal().add_(damping)
    root, wrong = torch.linalg.cholesky_ex(damped)
    return torch.where(wrong == 0, torch.cholesky_inverse(root), torch.nan).to(matrix.dtype)
