"""LARS: momentum SGD with a trust ratio for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.optimizers._base import Optimizer, Own, by_layers, chosen
from workbench.settings import knob

TINY = 1e-8  # for a finite ratio if gradient and parameter are almost zero


@dataclass(frozen=True, kw_only=True)
class LARS(Optimizer):
    """Momentum SGD with a trust ratio: each layer's step is scaled to the norm of its weights.

        ratio <- trust |w| / (|grad| + weight_decay |w|)                      for each weight tensor w
        v <- momentum v + ratio (grad + weight_decay w);   w <- w - lr v

    |grad| / |w| differs between layers by orders of magnitude, above all early. So a rate that suits a large batch is
    too large for some layer. The ratio removes the gradient's length from the step: without decay, a gradient c times
    as large moves a weight equally far. Biases and normalisations (parameters of one dimension) take plain steps and do
    not decay. A tensor that is zero or has no gradient has ratio 1. Norms are of whole tensors on one rank, so ranks
    send nothing more. The rate is outside v, as in torch's SGD. LARS takes over SGD's `momentum_buffer`, although
    lengths in it differ by the ratio.

    When to use it: for SGD on convolutions with batches of many thousands, with a warm-up (`lr_warmup`). It needs a far
    larger `lr` than SGD, because `trust` makes each step small: a step moves a layer by about lr trust of its length.

    Reference: You, Gitman and Ginsburg, "Large Batch Training of Convolutional Networks", 2017,
    https://arxiv.org/abs/1708.03888
    """

    momentum: float = knob(0.9, 0.0, 0.999, doc="momentum: decay rate of the running sum of gradients")
    nesterov: bool = knob(False, doc="Nesterov momentum instead of classical")
    weight_decay: float = knob(1e-4, 0.0, 1.0, log=True, doc="L2 penalty: times each weight, added to its gradient")
    trust: float = knob(1e-3, 1e-6, 1.0, log=True, doc="trust coefficient: a layer's step over its weights' norm")

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        groups = by_layers(params, self.weight_decay)
        return Lars(groups, chosen(lr, own), self.momentum, nesterov=self.nesterov, trust=self.trust)

    def refuses(self) -> str | None:
        if not self.nesterov or self.momentum:
            return None
        return "nesterov=True: needs a momentum, and momentum=0 is none; set momentum above 0, or nesterov=false"


class Lars(torch.optim.Optimizer):
    """LARS as a torch Optimizer; groups with `adapt` = False are momentum SGD. One slot, `momentum_buffer`."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, *, nesterov: bool = False, trust: float = 1e-3,
                 weight_decay: float = 0.0, adapt: bool = True) -> None:  # fmt: skip
        rest = {"momentum": momentum, "nesterov": nesterov, "trust": trust}
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "adapt": adapt, **rest})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    w.add_(self._direction(w, w.grad, group), alpha=-group["lr"])

    def _direction(self, w: Tensor, grad: Tensor, group: dict[str, Any]) -> Tensor:
        move = grad.add(w, alpha=group["weight_decay"])
        if group["adapt"]:
            move.mul_(_ratio(w.norm(), grad.norm(), group["weight_decay"], group["trust"]))
        if not group["momentum"]:
            return move
        kept = self.state[w]
        if "momentum_buffer" not in kept:
            kept["momentum_buffer"] = torch.zeros_like(w)
        v = kept["momentum_buffer"].mul_(group["momentum"]).add_(move)
        return move.add_(v, alpha=group["momentum"]) if group["nesterov"] else v


def _ratio(length: Tensor, grad: Tensor, weight_decay: float, trust: float) -> Tensor:
    ratio = trust * length / (grad + weight_decay * length + TINY)
    return torch.where((length > 0) & (grad > 0), ratio, torch.ones_like(ratio))
