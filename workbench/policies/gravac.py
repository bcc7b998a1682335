"""GraVAC: the strongest compression that keeps enough of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from workbench.policies._base import Decision, Policy, Seen
from workbench.settings import KnobError, knob, resolve

PATH = "compressor.density"
FEEDS = ("", "residual")  # the unsent part: dropped, or added to the next gradient by error feedback


class _State:
    bar = 0.0  # the gain before a step that led below the threshold, which a step down must exceed
    before = 0.0  # before the last step down


@dataclass(frozen=True, kw_only=True)
class GraVAC(Policy):
    """Lowers the density of a sparse compressor while its output holds enough of the gradient.

        gain = E ||C(x)||^2 / E ||x||^2           x: the gradient and what error feedback adds to it
        density <- density / f, at least `least`  if gain >= `threshold`
        density <- density f, at most `most`      if not, with f = `factor`

    The means are over all ranks and the steps since the last look; a gain of 1 means that nothing is missing. If a step
    down led below the threshold, the next step down needs a gain above the gain before it. So the density does not
    oscillate.

    The paper's GraVAC also compresses twice in each step: by the present ratio and by the next candidate. It sends a
    step uncompressed if neither is good enough, and ends its search when throughput times gain stops growing. Here one
    ratio holds between two looks. `most` replaces uncompressed steps. Speed plays no role. The paper's ratios are 1
    / density. Its released code uses norms, not their squares.

    Compressors that send enlarged entries to be unbiased (Wangni, a scaled RandomK) have no such gain. Neither has DGC:
    it sends the sums of its own momentum. For these the policy reports this and waits.

    When to use it: with TopK and similar compressors over a slow link, if you do not know which density the model
    tolerates. Measuring the gain takes two passes over the gradient in every step and sends no byte. All ranks must
    exchange gradients in the same steps (DDP). A simulation with sizes only has no gain, so the policy decides nothing.

    Reference: Tyagi and Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training",
    CLOUD 2023, https://arxiv.org/abs/2305.12201
    """

    threshold: float = knob(0.75, 0.0, 1.0, doc="share of the gradient's squared norm that must be sent")
    factor: float = knob(2.0, 1.01, 100.0, log=True, doc="f: factor by which the density is divided or multiplied")
    least: float = knob(0.001, 0.0001, 1.0, log=True, doc="smallest density")
    most: float = knob(0.5, 0.0001, 1.0, log=True, doc="largest density")

    reads: ClassVar[tuple[str, ...]] = ("gradient_sent", "gradient_whole")

    def init(self) -> _State:
        return _State()

    def needs(self, experiment: Any) -> str | None:
        name = type(experiment.compressor).__name__
        try:
            path, _ = resolve(experiment, PATH)
        except KnobError:
            return f"compressor={name} has no density to set; GraVAC waits for a compressor that has one, such as TopK"
        by = experiment.strategy
        if not by.lockstep or by.in_flight or by.opaque or by.workers > 1:
            return (
                f"strategy={type(by).__name__} does not exchange a step's gradients within that step on all ranks, "
                f"so the sent share is not known; GraVAC waits for a strategy that does, such as DDP"
            )
        chooses: Any = reduce(getattr, path.split(".")[:-1], experiment)
        if chooses.unbiased or getattr(chooses, "scaled", False):
            return (
                f"compressor={name} scales the entries that it sends, so their squares do not show what it omits; "
                f"GraVAC waits for a compressor that does not scale them, such as TopK"
            )
        if chooses.residual not in FEEDS:
            return (
                f"compressor={name} sends sums of gradients that it keeps itself ({chooses.residual}), so the sent "
                f"share of a gradient is not known; GraVAC waits for a compressor under error feedback, such as TopK"
            )
        return None

    def decide(self, seen: Seen, state: _State) -> Iterator[Decision]:
        sent, whole = map(seen.mean, self.reads)
        if not (math.isfinite(sent) and math.isfinite(whole) and whole > 0):
            return
        gain, (path, density) = sent / whole, resolve(seen.experiment, PATH)
        now: float = density.default
        if gain < self.threshold:
            wanted, said = max(now, min(self.most, now * self.factor)), "less than"
            state.bar, state.before = max(state.bar, state.before), 0.0
        elif gain > state.bar and now > self.least:
            wanted, said = max(self.least, now / self.factor), "not below"
            state.before = gain
        else:
            return
        yield Decision(
            f"the sent entries hold {gain:.3f} of the gradient's squared norm, {said} {self.threshold:g}",
            {path: wanted},
        )
