"""Evaluates a model's held-out numbers, and compares parameters with other values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from workbench.rank import as_real

if TYPE_CHECKING:
    from workbench.strategies import Strategy

CHUNK_ELEMENTS = 65_536
Evaluated = tuple[dict[str, float], float | None]  # numbers by name; RMS distance, None with sizes only


def compute_numbers(
    evaluate: Callable[[nn.Module], float | dict[str, float]] | None, model: nn.Module
) -> dict[str, float]:
    """Runs `evaluate` without gradients. Returns numbers by name."""
    if evaluate is None:
        return {}
    was = model.training
    model.eval()
    try:
        with torch.no_grad():
            answer = evaluate(model)
    finally:
        model.train(was)
    return {k: float(v) for k, v in (answer if isinstance(answer, dict) else {"loss": answer}).items()}


def compute_distance(own: Iterable[Tensor], others: Iterable[Tensor], numel: int) -> float:
    """Returns the RMS difference."""
    return compute_rms(sum(sum_squares(x, y) for x, y in zip(own, others, strict=True)), numel)


def sum_squares(own: Tensor, other: Tensor) -> float:
    """Works in pieces to save memory."""
    own, other = as_real(own), as_real(other)
    pairs = zip(own.reshape(-1).split(CHUNK_ELEMENTS), other.reshape(-1).split(CHUNK_ELEMENTS), strict=True)
    return sum(float((x - y).float().square().sum()) for x, y in pairs)


def compute_rms(squares: float, numel: int) -> float:
    """Returns the root mean square."""
    return float((squares / max(1, numel)) ** 0.5)


def count_kept_bytes(strategy: Strategy, ranks: int, held: int, others: int) -> int:
    """Returns the bytes that a rank keeps aside while it evaluates the mean of `ranks` models.

    A mean of 2 or 4 equal numbers is exact, so equal parameters need no copy.

    held:   bytes of its parameters
    others: bytes of running statistics, which differ between ranks
    """
    if ranks == 1:
        return 0
    return others + (held if strategy.periodic or ranks not in (2, 4) else 0)


@contextmanager
def hold_values(tensors: list[Tensor], values: list[Tensor], kept: list[Tensor] | None = None) -> Iterator[None]:
    """Inside, the tensors have these values. kept: their own values, if already copied"""
    kept = [x.detach().clone() for x in tensors] if kept is None else kept
    for x, value in zip(tensors, values, strict=True):
        x.data.copy_(value)
    try:
        yield
    finally:
        for x, own in zip(tensors, kept, strict=True):
            x.data.copy_(own)
