"""Held-out loss of the consolidated model, outside step time."""

from __future__ import annotations

import math
from typing import Any

import torch

from workbench.engine.canonical import mean_model
from workbench.engine.collectives import Wire
from workbench.engine.layout import Layout


def held_out(
    evaluate: Any, model: torch.nn.Module, layout: Layout, wire: Wire | None
) -> tuple[dict[str, float], float]:
    """(numbers of the mean model, this rank's drift from it). Rank 0 evaluates; the others wait for it."""
    numbers: dict[str, float] = {}
    with torch.no_grad(), mean_model(wire, layout, model) as drift:
        if evaluate is not None and (wire is None or wire.rank == 0):
            was = model.training
            model.eval()
            try:
                answer = evaluate(model)
            finally:
                model.train(was)
            numbers = dict(answer) if isinstance(answer, dict) else {"loss": answer}
            numbers = {k: float(v) for k, v in numbers.items()}
        if wire is not None:
            done = torch.tensor([numbers.get("loss", math.nan)], dtype=torch.float64)
            wire.wait(wire.broadcast(done, 0))
    return numbers, drift
