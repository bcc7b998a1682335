"""The held-out loss of a model, and how far a rank's own parameters are from those it is told of. No clock, no wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workbench.rank import as_real

AT_ONCE = 65_536  # elements that are compared at once
Evaluated = tuple[dict[str, float], float | None]  # numbers by name; this rank's RMS distance, None for sizes only


def numbers(evaluate: Any, model: nn.Module) -> dict[str, float]:
    """What a task's `evaluate` says of a model, by name; nothing where there is no `evaluate`."""
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


def distance(own: Iterable[Tensor], others: Iterable[Tensor], numel: int) -> float:
    """Root of the mean over `numel` elements of the squared difference."""
    return rms(sum(squares(x, y) for x, y in zip(own, others, strict=True)), numel)


def squares(own: Tensor, other: Tensor) -> float:
    """The sum of the squared differences, in pieces, so that it takes little memory whatever the tensors' size."""
    own, other = as_real(own), as_real(other)
    pairs = zip(own.reshape(-1).split(AT_ONCE), other.reshape(-1).split(AT_ONCE), strict=True)
    return sum(float((x - y).float().square().sum()) for x, y in pairs)


def rms(squares: float, numel: int) -> float:
    """Root of the mean over `numel` elements whose squares make that sum."""
    return float((squares / max(1, numel)) ** 0.5)


def kept_beside(strategy: Any, ranks: int, held: int, others: int) -> int:
    """Bytes that a rank keeps aside while the mean of `ranks` models is evaluated in the place of its own.

    held: of its parameters; others: of running statistics, which ranks have each of its own batches

    Sums of two or four numbers that are the same, divided by as many, are these numbers to the bit; of others it may
    not be so, and what differs is put into its place.
    """
    if ranks == 1:
        return 0
    return others + (held if strategy.periodic or ranks not in (2, 4) else 0)


@contextmanager
def holding(tensors: list[Tensor], values: list[Tensor], kept: list[Tensor] | None = None) -> Iterator[None]:
    """Inside, the tensors have these values; afterwards their own again, which are in `kept` if somebody has them."""
    kept = [x.detach().clone() for x in tensors] if kept is None else kept
    for x, value in zip(tensors, values, strict=True):
        x.data.copy_(value)
    try:
        yield
    finally:
        for x, own in zip(tensors, kept, strict=True):
            x.data.copy_(own)
