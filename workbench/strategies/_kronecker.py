"""A layer's curvature as a Kronecker product: its running factors, their damped inverses, and a gradient between them.

Nothing here knows ranks but by number; what is sent to whom is the strategy's text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from workbench.rank import Bucket, Factors, Memory, outlined

INPUTS, OUTPUTS = "inputs", "outputs"  # buffers of a Memory: the factors by weight, and their inverses
INVERSE = " inverse"


class Layer(NamedTuple):
    """One layer: its parameters, and the sizes of its two factors."""

    weight: str
    bias: str
    inputs: int
    outputs: int

    @property
    def packed(self) -> int:
        """Elements of both factors, or of their inverses, as they are sent: each is symmetric, so half is enough."""
        return _triangle(self.inputs) + _triangle(self.outputs)

    @property
    def products(self) -> int:
        """Floating-point operations of putting a gradient between the two inverses."""
        return 2 * self.inputs * self.outputs * (self.inputs + self.outputs)


def seen(factors: Iterable[Factors]) -> list[Layer]:
    """The layers that these factors are of."""
    return [Layer(f.weight, f.bias, len(f.inputs), len(f.outputs)) for f in factors]


def dealt(layers: Sequence[Layer], size: int) -> dict[str, int]:
    """By weight, which of `size` ranks inverts its factors: the dearest layer first, each to whom has least to do.

    A matrix of n rows costs n^3.
    """
    return _dealt(tuple(layers), size)


@lru_cache(maxsize=16)  # every rank asks it, in every step
def _dealt(layers: tuple[Layer, ...], size: int) -> dict[str, int]:
    load, owner = [0] * size, {}
    for layer in sorted(layers, key=_cost, reverse=True):
        owner[layer.weight] = lightest = load.index(min(load))
        load[lightest] += _cost(layer)
    return owner


def cubes(layers: Iterable[Layer]) -> int:
    """Floating-point operations of inverting the factors of these, about."""
    return sum(map(_cost, layers))


def packed(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """(n,): the upper triangles of symmetric matrices, one after the other."""
    return torch.cat([_upper(matrix) for pair in pairs for matrix in pair])


def unpacked(flat: Tensor, layers: Sequence[Layer]) -> list[tuple[Tensor, Tensor]]:
    """By layer its two matrices, of what `packed` made; symmetric to the bit."""
    sizes = [n for layer in layers for n in (layer.inputs, layer.outputs)]
    whole = [_whole(x, n) for x, n in zip(flat.split([_triangle(n) for n in sizes]), sizes, strict=True)]
    return list(zip(whole[::2], whole[1::2], strict=True))


def fold(memory: Memory, layers: Sequence[Layer], new: Sequence[tuple[Tensor, Tensor]], share: float) -> None:
    """Running averages: the new factors count for `share`."""
    for layer, pair in zip(layers, new, strict=True):
        for name, matrix in zip((INPUTS, OUTPUTS), pair, strict=True):
            known = memory.parts.setdefault(name, {})
            if layer.weight in known:
                known[layer.weight].lerp_(matrix, share)
            else:
                known[layer.weight] = matrix


def invert(memory: Memory, layer: Layer, damping: float) -> tuple[Tensor, Tensor]:
    """(A + pi sqrt(damping) I)^-1 and (G + sqrt(damping) / pi I)^-1, pi^2 the ratio of their mean eigenvalues.

    Both are the identity where no row has been seen, or no gradient.
    """
    return _inverses(memory.parts[INPUTS][layer.weight], memory.parts[OUTPUTS][layer.weight], damping)


def keep(memory: Memory, layer: Layer, pair: tuple[Tensor, Tensor]) -> None:
    """These are the layer's inverses now."""
    for name, matrix in zip((INPUTS, OUTPUTS), pair, strict=True):
        memory.parts.setdefault(name + INVERSE, {})[layer.weight] = matrix


def preconditioned(memory: Memory, layer: Layer, gradient: Tensor) -> Tensor:
    """(o, i): G^-1 gradient A^-1."""
    left, right = memory.parts[OUTPUTS + INVERSE][layer.weight], memory.parts[INPUTS + INVERSE][layer.weight]
    return left @ gradient.to(left.dtype) @ right


class Gradients:
    """The gradients of a model, by layer: (o, i), with the bias's as the last column."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._of = {p.name: b.data[p.start : p.stop].view(p.shape) for b in buckets for p in b.parts}

    def of(self, layer: Layer) -> Tensor:
        weight = self._of[layer.weight].flatten(1)
        return torch.cat([weight, self._of[layer.bias][:, None]], 1) if layer.bias else weight

    def put(self, layer: Layer, gradient: Tensor) -> None:
        weight = self._of[layer.weight].flatten(1)  # of a convolution: a row for each channel
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
    """In double precision; no number at all where the matrix is not positive, as when training has diverged."""
    damped = matrix.to(torch.float64, copy=True)
    damped.diagonal().add_(damping)
    root, wrong = torch.linalg.cholesky_ex(damped)
    return torch.where(wrong == 0, torch.cholesky_inverse(root), torch.nan).to(matrix.dtype)
