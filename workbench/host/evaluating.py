"""The held-out loss of a model, and how far a rank's own parameters are from those it is told of. No clock, no wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

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
    squares = sum(float((x - y).float().square().sum()) for x, y in zip(own, others, strict=True))
    return float((squares / max(1, numel)) ** 0.5)


@contextmanager
def holding(tensors: list[Tensor], values: list[Tensor]) -> Iterator[None]:
    """Inside, the tensors have these values; afterwards their own again."""
    kept = [x.detach().clone() for x in tensors]
    for x, value in zip(tensors, values, strict=True):
        x.data.copy_(value)
    try:
        yield
    finally:
        for x, own in zip(tensors, kept, strict=True):
            x.data.copy_(own)
