"""QAdam: ranks exchange a compressed momentum."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.settings import knob
from workbench.strategies._moment import MomentExchange


@dataclass(frozen=True, kw_only=True)
class QAdam(MomentExchange):
    """Adam that freezes its variance after a warm-up, so that ranks can exchange a compressed momentum.

        warm-up:     m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2,      g = (1/p) sum_i grad_i
        afterwards:  m_i <- b1 m + (1 - b1) grad_i,   m <- (1/p) sum_i C(m_i),   v stays
        both:        params <- params - lr m_hat / (sqrt(v_hat) + eps)

    Adam is not linear in the gradient, so errors of a compressed gradient do not average out. With v frozen a step is
    linear in m. C is the experiment's compressor. ByteGrad is Bagua's choice, and Dense makes it momentum SGD with a
    fixed scale for each element. A hat divides by the weight of the gradients inside, 1 - b^t. The weight of v is
    frozen with v. Bagua's continues, so its steps grow. Both moments contain the gradients of all warm-up steps. An
    element without any gradient in the warm-up does not move while v is frozen. With `scaled` C acts on m /
    (sqrt(v_hat) + eps). If C is coarse, this is better for elements with small v.

    Each rank sends 2 (p-1)/p times the model's bytes per step in the warm-up, then the compressor's bytes. It waits as
    DDP does, and the exchange overlaps with backward. Ranks are equal at every step. The task's optimizer is not used
    and keeps its state, and the learning rate is the task's. When the strategy is entered, a warm-up begins with empty
    moments. If you raise `warmup` above the steps done, v changes again. If you lower it below them, v is frozen.

    When to use it: the task wants Adam and the network is slow. A warm-up of about 20 % of the run is usual. A v that
    is frozen too early scales some elements wrongly for the rest of the run.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021,
    https://arxiv.org/abs/2107.01499; Tang et al., "1-bit Adam", ICML 2021, https://arxiv.org/abs/2102.02888
    """

    warmup: int = knob(100, 1, 10**6, unit="steps", log=True, doc="steps of Adam before v is frozen")

    @property
    def warm_steps(self) -> int:
        return self.warmup
