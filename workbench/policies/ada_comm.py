"""AdaComm: ranks train alone for long periods at first and for shorter ones as the loss falls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.policies._base import Decision, Policy, Seen
from workbench.settings import KnobError, knob, resolve

PATH = "strategy.every"


class _State:
    """The loss and the period at the first look with a loss."""

    loss = 0.0
    every = 0


@dataclass(frozen=True, kw_only=True)
class AdaComm(Policy):
    """Sets how many steps ranks train alone between averagings. They become fewer as the loss falls.

        tau <- ceil(sqrt(F / F_0) tau_0)      if that is less than tau
        tau <- ceil(g tau)                    else, with g = `decay`: the loss no longer falls, or tau has not moved yet

    tau is the strategy's `every`; tau_0 is its value when the policy begins. F is the mean training loss of all ranks
    since the last look, F_0 that of the first look. So the period falls with every look, down to 1. At first the error
    is far above its floor, and long periods save waiting. Later, shorter periods lower the floor.

    The paper looks every 60 seconds. Here the interval is `look_every` steps, so the same loss gives the same periods
    on either clock. The paper's variants for a falling learning rate are missing. Losses must be positive.

    When to use it: with LocalSGD, DiLoCo and similar strategies over a slow link. Begin with the longest period that
    the model tolerates.

    Reference: Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in
    Local-Update SGD", MLSys 2019, https://arxiv.org/abs/1810.08313
    """

    decay: float = knob(0.5, 0.1, 1.0, doc="g: factor on the period if the loss does not lower it")

    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def init(self) -> _State:
        return _State()

    def needs(self, experiment: Any) -> str | None:
        try:
            resolve(experiment, PATH)
        except KnobError:
            name = type(experiment.strategy).__name__
            return f"strategy={name} has no period to set; AdaComm waits for a strategy with `every`, such as LocalSGD"
        return None

    def decide(self, seen: Seen, state: _State) -> Iterator[Decision]:
        loss, (path, period) = seen.mean("loss"), resolve(seen.experiment, PATH)
        if not math.isfinite(loss):
            return
        if loss <= 0:
            raise ValueError(f"the mean loss is {loss:g}, but must be above 0 because the rule takes its root")
        now: int = period.default
        if not state.loss:
            state.loss, state.every = loss, now
            return
        wanted = math.ceil(math.sqrt(loss / state.loss) * state.every)
        if wanted < now:
            why = f"the loss is {loss:.4g}, {loss / state.loss:.3g} of the {state.loss:.4g} at first"
        else:
            wanted, why = math.ceil(self.decay * now), f"the loss, {loss:.4g}, requires at least {now}"
        yield Decision(f"{why}: averaging every {wanted} steps", {path: max(1, wanted)})
