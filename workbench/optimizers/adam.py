"""Adam, torch's implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from workbench.optimizers._base import Optimizer, Own, chosen
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Adam(Optimizer):
    """Each element's step is its running mean gradient divided by the root of its running mean square.

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,   w <- w - lr m_hat / (sqrt(v_hat) + eps)

    with g = grad + weight_decay w, and hat the division by 1 - b^t. Its state is m (`exp_avg`), v (`exp_avg_sq`) and t
    (`step`): twice the model's bytes. It is not linear in the gradient. So ranks that update alone and average after
    every step still differ from DDP.

    When to use it: for most models, at a rate that needs little search. For weight decay take AdamW.

    Reference: Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, https://arxiv.org/abs/1412.6980.
    See torch.optim.Adam
    """

    beta1: float = knob(0.9, 0.0, 0.9999, doc="decay of the first moment, the mean gradient")
    beta2: float = knob(0.999, 0.0, 0.999999, doc="decay of the second moment, the mean squared gradient")
    eps: float = knob(1e-8, 1e-12, 1.0, log=True, doc="added to the root of the second moment")
    weight_decay: float = knob(0.0, 0.0, 1.0, log=True, doc="L2 penalty: times each parameter, added to its gradient")

    def make(self, params: list[Any], lr: float, own: Own) -> torch.optim.Optimizer:
        betas = (self.beta1, self.beta2)
        return torch.optim.Adam(params, chosen(lr, own), betas, self.eps, self.weight_decay)
