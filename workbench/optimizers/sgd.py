"""Stochastic gradient descent with momentum, torch's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workbench.optimizers._base import Optimizer, Own, chosen
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class SGD(Optimizer):
    """Stochastic gradient descent with momentum.

        v <- momentum v + grad + weight_decay w;   w <- w - lr v          Nesterov: w <- w - lr (grad + momentum v)

    Its state is v, `momentum_buffer`: the model's bytes once more. The learning rate is outside v, so a change of it
    also acts on old gradients and needs no correction.

    When to use it: to check theory. With SGD, LocalSGD with `every` = 1 equals DDP, and a batch k times as large needs
    a rate k times as large.

    Reference: torch.optim.SGD. Sutskever et al., "On the importance of initialization and momentum in deep learning",
    ICML 2013, https://proceedings.mlr.press/v28/sutskever13.html
    """

    momentum: float = knob(0.9, 0.0, 0.999, doc="momentum: decay rate of the running sum of gradients")
    nesterov: bool = knob(False, doc="Nesterov momentum instead of classical")
    weight_decay: float = knob(0.0, 0.0, 1.0, log=True, doc="L2 penalty: times each parameter, added to its gradient")

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        decay, nesterov = self.weight_decay, self.nesterov
        return torch.optim.SGD(params, chosen(lr, own), self.momentum, weight_decay=decay, nesterov=nesterov)

    def refuses(self) -> str | None:
        if not self.nesterov or self.momentum:
            return None
        return "nesterov=True: needs a momentum, and momentum=0 is none; set momentum above 0, or nesterov=false"
