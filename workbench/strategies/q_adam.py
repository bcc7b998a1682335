"""QAdam: after a warm-up Adam's momentum crosses the wire, where it can be compressed."""

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

    Adam is not linear in the gradient, so errors of a compressed gradient do not average out. With v frozen a step
    is linear in m, and C is whatever compressor the experiment has: ByteGrad is Bagua's choice; under Dense it is
    momentum SGD with a fixed scale for each element. hat divides by the weight of the gradients inside, 1 - b^t, and
    that of v is frozen with it (Bagua's goes on, so its steps grow). The gradient of each warm-up step is in both
    moments, of the last one, too. An element without any gradient in the warm-up stays where it is while v is frozen.
    With `scaled`, C acts on m / (sqrt(v_hat) + eps), which serves elements with small v better where C is coarse.

    Each rank sends 2 (p-1)/p times the model's bytes per step in the warm-up, then what the compressor sends. It
    waits as DDP does; the exchange overlaps with backward. Ranks are equal at every step, so nothing is averaged on
    leaving. The task's optimizer rests with its state and is not asked; only the learning rate is the same. Weight
    decay is this strategy's own knob, decoupled as in AdamW. A warm-up begins at every entry, with empty moments;
    `warmup` set above the steps done thaws v, set below freezes it.

    When to use it: the task wants Adam and the wire is slow. About a fifth of the run is usual for the warm-up; a v
    that is frozen too early scales some elements wrongly for good.

    Reference: Gan et al., "BAGUA: Scaling up Distributed Learning with System Relaxations", VLDB 2021,
    https://arxiv.org/abs/2107.01499; Tang et al., "1-bit Adam", ICML 2021, https://arxiv.org/abs/2102.02888
    """

    warmup: int = knob(100, 1, 10**6, unit="steps", log=True, doc="steps of Adam before v is frozen")

    @property
    def warm_steps(self) -> int:
        return self.warmup
