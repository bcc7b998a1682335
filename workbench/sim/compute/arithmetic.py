"""The compute of one virtual rank outside the passes of its model.

It covers curvature, a strategy's own arithmetic, and codecs in the middle of a pass. Each takes the measured time, or
none if unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES, lasts
from workbench.rank import Op
from workbench.sim.clock.fiber import PARK, Fiber
from workbench.sim.compute.pipeline import PipelinePerformer
from workbench.sim.costs.costs import Costs


class ArithmeticPerformer(PipelinePerformer):
    """The part of a Host that computes outside the model's passes."""

    clock: Any
    index: int
    member: int  # the rank's number in the run
    rollback: Any = None  # of its session; None if no rank can be lost
    note: Callable[[str, float], None]
    span: Callable[..., None]
    _answer_after: Callable[..., Any]
    _occupy_device: Callable[..., float]
    _listens = False  # whether layers record inputs, until the strategy requests their factors

    def _other_work_seconds(self, costs: Costs, phase: str, chunk: int) -> float:
        """Returns the seconds of other work within a pass: collecting factors, and codecs."""
        seconds = costs.asked.get("collect", 0.0) if self._listens and phase == "backward" else 0.0
        if self.body.split is not None and costs.coder and phase != "update":
            layers = self.experiment.partition.layers
            by = {"activation": layers.activations, "gradient": layers.gradients}  # type: ignore[attr-defined]
            done = [each for each in self._pass_plans[chunk].coded if each.phase == phase]
            seconds += sum(costs.price_coding(by[what], how, nbytes) for _, how, what, nbytes in done)
        return seconds

    def _run_codec(self, fiber: Fiber, op: Op) -> Any:
        """Performs a codec's work on a tensor that crosses between stages."""
        name, work, nbytes = op.args
        value, costs = work(), self.world.costs
        if costs is None or not costs.coder:
            return value
        how, what, *_ = name.split(" ")
        way: Any = self.experiment.partition
        seconds = costs.price_coding(way.activations if what == "activation" else way.gradients, how, nbytes)
        began = self._occupy_device(fiber, seconds)
        self.span("codec", name, began, began, began + seconds, nbytes)
        self.clock.resume_at(began + seconds, fiber, value)
        return PARK

    def _run_work(self, fiber: Fiber, op: Op) -> Any:
        """Performs a strategy's own arithmetic: on the device in a step, in parallel to it in a child."""
        of, flops, name = op.args
        value, costs = of(), self.world.costs
        self.note(f"flops {name}", flops)
        seconds = flops * costs.flop.get(name, 0.0) if costs is not None else 0.0
        if not seconds:
            return value
        if fiber.lane is None:
            return self._answer_after(fiber, name, seconds, value)
        now = self.clock.now
        self.span("codec", name, now, now, now + seconds, 0, fiber.step)
        self.clock.resume_at(now + seconds, fiber, value)
        return PARK

    def _collect_factors(self, fiber: Fiber, op: Op) -> Any:
        self._listens = True
        return self.body.collect_factors()

    def _compute_factors(self, fiber: Fiber, op: Op) -> Any:
        self._listens = False
        return self._answer_after(fiber, "factors", self._request_seconds("factors"), self.body.compute_factors())

    def _compute_curvature(self, fiber: Fiber, op: Op) -> Any:
        product = self.body.compute_curvature(*op.args, self.rank.step)
        return self._answer_after(fiber, "curve", self._request_seconds("curve", "forward", "backward"), product)

    def _compute_value(self, fiber: Fiber, op: Op) -> Any:
        return self._answer_after(
            fiber, "value", self._request_seconds("value", "forward"), self.body.compute_value(self.rank.step)
        )

    def _request_seconds(self, name: str, *phases: str) -> float:
        """Returns the measured seconds, or those of `phases`; at least as long as the pace demands."""
        e, costs = self.experiment, self.world.costs
        known = costs.asked.get(name) if costs is not None else None
        if known is None:
            return sum(self.phase_seconds(phase) for phase in phases)
        asked = e.pace * 1e-3 * sum(SHARES[phase] for phase in phases) * self.body.share
        return lasts(asked, known, stretch(e.fabric.faults, self.index, self.rank.step, "forward"))
