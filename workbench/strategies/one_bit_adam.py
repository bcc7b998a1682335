"""1-bit Adam: after a warm-up only the signs of the momentum cross the wire, and errors are fed back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.settings import knob
from workbench.strategies._former import one_bit_adam
from workbench.strategies._moment import MomentExchange


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(MomentExchange):
    """Adam that freezes its variance, then exchanges the momentum by its signs, with error feedback.

        step <= warmup:  m, v <- Adam's moments of g = (1/p) sum_i grad_i
        afterwards:      m_i <- b1 m + (1 - b1) grad_i,   m <- (1/p) sum_i C(m_i + residual_i),   v stays
        both:            params <- params - lr m_hat / (sqrt(v_hat) + eps)

    C is the experiment's compressor, to be seen and set there: choose OneBit, whose bare name brings error feedback.
    Any other under ErrorFeedback will do; Dense is the exact thing to compare with; one without error feedback is
    refused, for what it loses is lost (QAdam takes it). In the first `warmup` steps
    (DeepSpeed's `freeze_step`) gradients cross whole.

    With `scaled`, the usual choice here, C acts on m / (sqrt(v_hat) + eps), and what comes out is multiplied again:
    under Dense the same, with signs not. The paper codes m itself (scaled = False), so an element whose v is small is
    given its block's magnitude and takes a step of many times lr: a small Digits, frozen after 60 steps, unlearns
    what it knew (in 12 of 12 runs; scaled, in 9 of 60, for v may be frozen too small). DeepSpeed has a momentum mask
    for elements whose gradient is always zero, as a sign cannot say zero; here an element without any gradient before
    the freeze (v = 0) stays where it is.

    A rank sends 2 (p-1)/p of the model's bytes per step until v is frozen, with OneBit 1/32 of that and 4 bytes per
    scale from then on. It waits as DDP does. Both moments' bias is corrected, as in Adam's paper, and v_hat is frozen
    with its correction; DeepSpeed corrects none, so its first steps are several times as long, and its root frozen
    after n steps is sqrt(1 - beta2^n) of this one. Moments begin empty at every
    entry, and the residual of the momentum is dropped on leaving; ranks are equal at every step. The task's optimizer
    rests with its state and is not asked; weight decay is this strategy's own knob, decoupled as in AdamW.
    `warmup` set above the steps done thaws v.

    When to use it: long runs of Adam on very slow wires. DeepSpeed advises to freeze after 15 to 25 % of all steps.

    Reference: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    ICML 2021, https://arxiv.org/abs/2102.02888
    """

    scaled: bool = knob(True, live=False, doc="each element of m crosses the wire in units of its sqrt(v_hat) + eps")
    warmup: int = knob(100, 1, 10**6, unit="steps", log=True, doc="steps of Adam before v is frozen")

    old: ClassVar[tuple[str, ...]] = ("freeze_step",)

    @classmethod
    def formerly(cls, settings: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        return one_bit_adam(cls.__name__, settings)

    @property
    def warm_steps(self) -> int:
        return self.warmup

    def refuses(self, compressor: Any) -> str | None:
        if not (compressor.lossless or compressor.residual):
            name = type(compressor).__name__
            return (
                f"compressor={name}: OneBitAdam needs what a compressor loses to be fed back; use "
                f"ErrorFeedback(of={name}()), OneBit under ErrorFeedback, or Dense; QAdam takes {name} as it is"
            )
        return super().refuses(compressor)
