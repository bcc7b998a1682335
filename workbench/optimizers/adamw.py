"""AdamW, torch's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workbench.optimizers._base import Optimizer, Own, chosen
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class AdamW(Optimizer):
    """Adam with decoupled weight decay, which shrinks the parameters and is not in the gradient.

        w <- w - lr weight_decay w - lr m_hat / (sqrt(v_hat) + eps)          m, v and hat as in Adam

    Adam adds its decay to the gradient and divides by the root mean square. So parameters with large gradients decay
    little. Here every parameter shrinks alike. Its state is Adam's and has the same meaning.

    When to use it: for transformers, and whenever you want Adam with weight decay.

    Reference: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
    https://arxiv.org/abs/1711.05101. See torch.optim.AdamW
    """

    beta1: float = knob(0.9, 0.0, 0.9999, doc="decay of the first moment, the mean gradient")
    beta2: float = knob(0.999, 0.0, 0.999999, doc="decay of the second moment, the mean squared gradient")
    eps: float = knob(1e-8, 1e-12, 1.0, log=True, doc="added to the root of the second moment")
    weight_decay: float = knob(0.01, 0.0, 10.0, log=True, doc="decoupled weight decay: a step shrinks by lr times this")

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.AdamW(params, chosen(lr, own), betas, self.eps, self.weight_decay)
