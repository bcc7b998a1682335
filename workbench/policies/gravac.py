"""GraVAC: as much compression as leaves enough of the gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from typing import Any, ClassVar

from workbench.policies._base import Decision, Policy, Seen
from workbench.settings import KnobError, knob, resolve

PATH = "compressor.density"
FEEDS = ("", "residual")  # what is left unsent: nothing is kept of it, or error feedback adds it to the next gradient


class _State:
    """What it takes to go lower again: the gain from which the last step down led below the threshold."""

    bar = 0.0  # a step down needs a gain above this
    before = 0.0  # the gain from which the last step down was made


@dataclass(frozen=True, kw_only=True)
class GraVAC(Policy):
    """Lowers the density of a sparse compressor while what it sends holds enough of the gradient.

        gain = E ||C(x)||^2 / E ||x||^2           x: the gradient and what error feedback adds to it
        density <- density / f, at least `least`  if gain >= `threshold`
        density <- density f, at most `most`      if not, with f = `factor`

    The means are over all ranks and the steps since the look before; 1 would be that nothing is left out. A step down
    that led below the threshold is tried again only from a gain above that from which it was made, so that the density
    does not go to and fro.

    It is like GraVAC, not the whole of it: that compresses twice in each step, by the ratio in force and by the next
    one to try, sends a step uncompressed where neither will do, and ends its search once throughput times gain no
    longer grows. Here one ratio is in force between two looks, `most` stands for uncompressed, and speed is not asked
    for. Its ratios are 1 / density; its released code takes norms, not their squares.

    Those that send entries larger than they are, to be right on the mean (Wangni, a scaled RandomK), have no such gain,
    nor has one that sends what its own momentum has gathered (DGC): the policy says so and waits.

    When to use it: with TopK and its like on a slow wire, where nobody knows what density the model bears. The gain is
    measured in every step: two passes over the gradient and no byte. Only where all ranks exchange gradients in the
    same steps (DDP); with sizes only, in a simulation, there is no gain and nothing is decided.

    Reference: Tyagi and Swany, "GraVAC: Adaptive Compression for Communication-Efficient Distributed DL Training",
    CLOUD 2023, https://arxiv.org/abs/2305.12201
    """

    threshold: float = knob(0.75, 0.0, 1.0, doc="share of the gradient's squares that has to be sent")
    factor: float = knob(2.0, 1.01, 100.0, log=True, doc="f: by which the density is divided, or multiplied")
    least: float = knob(0.001, 0.0001, 1.0, log=True, doc="density below which it never goes")
    most: float = knob(0.5, 0.0001, 1.0, log=True, doc="density above which it never goes")

    reads: ClassVar[tuple[str, ...]] = ("gradient_sent", "gradient_whole")

    def init(self) -> _State:
        return _State()

    def needs(self, experiment: Any) -> str | None:
        name = type(experiment.compressor).__name__
        try:
            path, _ = resolve(experiment, PATH)
        except KnobError:
            return f"compressor={name} has no density to set; GraVAC waits for one that has, such as TopK"
        by = experiment.strategy
        if not by.lockstep or by.in_flight or by.opaque or by.workers > 1:
            return (
                f"strategy={type(by).__name__} does not exchange a step's gradients within that step on all ranks, so "
                f"it cannot be told how much of them is sent; GraVAC waits for one that does, such as DDP"
            )
        chooses: Any = reduce(getattr, path.split(".")[:-1], experiment)
        if chooses.unbiased or getattr(chooses, "scaled", False):
            return (
                f"compressor={name} sends entries larger than they are, so their squares do not tell what was left "
                f"out; GraVAC waits for one that sends them as they are, such as TopK"
            )
        if chooses.residual not in FEEDS:
            return (
                f"compressor={name} sends sums of gradients that it keeps in a way of its own ({chooses.residual}), so "
                f"it cannot be told how much of a gradient is sent; GraVAC waits for one under error feedback, such as "
                f"TopK"
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
        yield Decision(f"what was sent holds {gain:.3f} of the gradient's squares, {said} {self.threshold:g}",
                       {path: wanted})
