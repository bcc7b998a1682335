"""Reference implementations of strategies with an outer optimizer: all ranks in one process, without the workbench."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from tests.ranks import batch, mse, net

SGD = partial(torch.optim.SGD, lr=0.02)
MOMENTUM = partial(torch.optim.SGD, lr=0.02, momentum=0.9)


class Plain:
    """`ranks` models that train on the same data as the ranks of an experiment."""

    def __init__(self, ranks: int, optimizer: Any) -> None:
        self.models = [net() for _ in range(ranks)]
        self.optimizers = [optimizer(model.parameters()) for model in self.models]
        self.steps = 0

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            for rank, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
                optimizer.zero_grad()
                mse(model, batch(rank, self.steps, 0)).backward()
                optimizer.step()
            self.steps += 1

    def at_rate(self, lr: float) -> None:
        for optimizer in self.optimizers:
            optimizer.param_groups[0]["lr"] = lr

    def get(self, layer: str = "") -> torch.Tensor:
        """Returns (ranks, n) float64: each rank's parameters by name. layer: only parameters of this layer"""
        return torch.stack([torch.cat([p.detach().reshape(-1).double() for p in its]) for its in self._params(layer)])

    def put(self, rows: torch.Tensor, layer: str = "") -> None:
        """Sets the parameters. rows: (ranks, n), or (n,) for all ranks"""
        for row, its in zip(rows.expand(len(self.models), rows.shape[-1]), self._params(layer), strict=True):
            for p, piece in zip(its, row.split([p.numel() for p in its]), strict=True):
                p.data.copy_(piece.view(p.shape))

    def _params(self, layer: str) -> list[list[torch.Tensor]]:
        return [[p for n, p in sorted(m.named_parameters()) if n.startswith(layer)] for m in self.models]


def outer_sgd(start: torch.Tensor, **settings: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Returns a function from the outer gradient to the new outer parameters, by torch's SGD."""
    theta = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([theta], **settings)

    def step(grad: torch.Tensor) -> torch.Tensor:
        theta.grad = grad.clone()
        optimizer.step()
        return theta.detach().clone()

    return step
