"""LAMB: Adam with a trust ratio for every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from workbench.optimizers._base import Optimizer, Own, by_layers, chosen
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class LAMB(Optimizer):
    """Adam with a trust ratio: each layer's step is scaled to the norm of its weights.

        u <- m_hat / (sqrt(v_hat) + eps) + weight_decay w                     m, v and hat as in Adam
        w <- w - lr (|w| / |u|) u                                             for each weight tensor w

    |w| / |u| is the trust ratio. Adam makes all elements' steps about equally long. With the ratio a layer's step has
    the norm lr |w|. So `lr` is relative to its weights. If |w| = |u|, it is AdamW. Biases and normalisations
    (parameters of one dimension) take Adam's steps and do not decay. A tensor that is zero or does not move has ratio
    1. The paper allows a function of |w|; here it is the identity. Norms are of whole tensors on one rank. So ranks
    send nothing more. Its state is Adam's and has the same meaning.

    When to use it: for transformers with batches of many thousands, with a warm-up (`lr_warmup`). In the paper BERT
    keeps its quality up to batches of 32,868 and trains in 76 minutes.

    Reference: You et al., "Large Batch Optimization for Deep Learning: Training BERT in 76 minutes", ICLR 2020,
    https://arxiv.org/abs/1904.00962
    """

    beta1: float = knob(0.9, 0.0, 0.9999, doc="decay of the first moment, the mean gradient")
    beta2: float = knob(0.999, 0.0, 0.999999, doc="decay of the second moment, the mean squared gradient")
    eps: float = knob(1e-6, 1e-12, 1.0, log=True, doc="added to the root of the second moment")
    weight_decay: float = knob(0.01, 0.0, 10.0, log=True, doc="weight decay, part of the step that the ratio scales")

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        groups = by_layers(params, self.weight_decay)
        return Lamb(groups, chosen(lr, own), (self.beta1, self.beta2), self.eps)


class Lamb(torch.optim.Optimizer):
    """LAMB as a torch Optimizer; groups with `adapt` = False are Adam. State: `exp_avg`, `exp_avg_sq`, `step`."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, *,
                 weight_decay: float = 0.0, adapt: bool = True) -> None:  # fmt: skip
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for w in group["params"]:
                if w.grad is not None:
                    move = self._moved(w, group).add_(w, alpha=group["weight_decay"])
                    if group["adapt"]:
                        move.mul_(_ratio(w.norm(), move.norm()))
                    w.add_(move, alpha=-group["lr"])

    def _moved(self, w: Tensor, group: dict[str, Any]) -> Tensor:
        """Updates the moments with the gradient, and returns Adam's step at rate 1."""
        kept, (b1, b2) = self.state[w], group["betas"]
        if not kept:
            kept["step"] = torch.zeros(())
            kept["exp_avg"], kept["exp_avg_sq"] = torch.zeros_like(w), torch.zeros_like(w)
        kept["step"] += 1
        m = kept["exp_avg"].lerp_(w.grad, 1 - b1)
        v = kept["exp_avg_sq"].mul_(b2).addcmul_(w.grad, w.grad, value=1 - b2)
        steps = float(kept["step"])
        root = (v / (1 - b2**steps)).sqrt_().add_(group["eps"])
        return (m / (1 - b1**steps)).div_(root)


def _ratio(length: Tensor, move: Tensor) -> Tensor:
    return torch.where((length > 0) & (move > 0), length / move, torch.ones_like(length))
