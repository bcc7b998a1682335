"""1-bit Adam: ranks exchange the momentum's signs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.settings import knob
from workbench.strategies._former import one_bit_adam
from workbench.strategies._moment import MomentExchange


@dataclass(frozen=True, kw_only=True)
class OneBitAdam(MomentExchange):
    """Adam that freezes its variance. Then it exchanges the momentum by its signs, with error feedback.

        step <= warmup:  m, v <- Adam's moments of g = (1/p) sum_i grad_i
        afterwards:      m_i <- b1 m + (1 - b1) grad_i,   m <- (1/p) sum_i C(m_i + residual_i),   v stays
        both:            params <- params - lr m_hat / (sqrt(v_hat) + eps)

    C is the experiment's compressor. Choose OneBit, because its bare name includes error feedback. Any compressor under
    ErrorFeedback works, and Dense is the exact reference. Other compressors are refused, because ranks would never send
    their losses (QAdam takes them). In the first `warmup` steps (DeepSpeed's `freeze_step`) gradients are sent whole.

    With `scaled`, the default here, C acts on m / (sqrt(v_hat) + eps). The result is multiplied back. Under Dense this
    changes nothing, but with signs it does. The paper codes m (scaled = False). An element with a small v then gets its
    block's magnitude and takes a step of many times lr. A small Digits that was frozen after 60 steps unlearned in 12
    of 12 runs. With `scaled` it did in 9 of 60, because v may be frozen too small. DeepSpeed masks elements whose
    gradient is always zero, because a sign cannot encode zero. Here an element without any gradient before the freeze
    (v = 0) does not move.

    A rank sends 2 (p-1)/p of the model's bytes per step until v is frozen. From then on OneBit sends 1/32 of that, and
    4 bytes per scale. A rank waits as under DDP, and ranks are equal at every step. As in Adam's paper, both moments'
    bias is corrected. v_hat is frozen with its correction. DeepSpeed corrects neither. So its first steps are several
    times as long. Its root frozen after n steps is sqrt(1 - beta2^n) times this root. When the strategy is entered,
    moments are empty. When it is left, it drops the momentum's residual. The task's optimizer is not used and keeps its
    state. If `warmup` is raised above the steps done, v changes again.

    When to use it: long runs of Adam on very slow networks. DeepSpeed advises to freeze after 15 to 25 % of all steps.

    Reference: Tang et al., "1-bit Adam: Communication Efficient Large-Scale Training with Adam's Convergence Speed",
    ICML 2021, https://arxiv.org/abs/2102.02888
    """

    scaled: bool = knob(True, live=False, doc="send each element of m in units of its sqrt(v_hat) + eps")
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
                f"compressor={name}: OneBitAdam needs error feedback; use "
                f"ErrorFeedback(of={name}()), OneBit under ErrorFeedback, or Dense; QAdam takes {name} as it is"
            )
        return super().refuses(compressor)
