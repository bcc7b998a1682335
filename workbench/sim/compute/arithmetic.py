"""A virtual rank's compute outside the passes of its model, for the measured time, or none if unknown."""

from __future__ import annotations

from typing import Any

from workbench.rank import Op
from workbench.sim.clock.fiber import PARKED, Fiber
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class ArithmeticPerformer:
    """Curvature, a strategy's own arithmetic, and codecs in the middle of a pass."""

    def __init__(self, parts: ComputeParts, timing: PassTimer) -> None:
        self._parts, self._body, self._timing, self._clock = parts, parts.body, timing, parts.clock

    def run_codec(self, fiber: Fiber, op: Op) -> Any:
        name, work, nbytes = op.args
        value, costs = work(), self._parts.world.costs
        if costs is None or not costs.coder:
            return value
        how, what, *_ = name.split(" ")
        way: Any = self._parts.experiment.partition
        seconds = costs.price_coding(way.activations if what == "activation" else way.gradients, how, nbytes)
        began = self._timing.occupy_device(fiber, seconds)
        self._parts.span("codec", name, began, began, began + seconds, nbytes)
        self._clock.resume_at(began + seconds, fiber, value)
        return PARKED

    def run_work(self, fiber: Fiber, op: Op) -> Any:
        """Runs a strategy's arithmetic: on the device in a step, in parallel to it in a child."""
        of, flops, name = op.args
        value, costs = of(), self._parts.world.costs
        self._parts.note(f"flops {name}", flops)
        seconds = flops * costs.flop.get(name, 0.0) if costs is not None else 0.0
        if not seconds:
            return value
        if fiber.lane is None:
            return self._timing.answer_after(fiber, name, seconds, value)
        now = self._clock.now
        self._parts.span("codec", name, now, now, now + seconds, 0, fiber.step)
        self._clock.resume_at(now + seconds, fiber, value)
        return PARKED

    def collect_factors(self, fiber: Fiber, op: Op) -> Any:
        self._timing.note_collecting(True)
        return self._body.collect_factors()

    def compute_factors(self, fiber: Fiber, op: Op) -> Any:
        self._timing.note_collecting(False)
        return self._timing.answer_after(
            fiber, "factors", self._timing.request_seconds("factors"), self._body.compute_factors()
        )

    def compute_curvature(self, fiber: Fiber, op: Op) -> Any:
        product = self._body.compute_curvature(*op.args, self._parts.rank.step)
        return self._timing.answer_after(
            fiber, "curve", self._timing.request_seconds("curve", "forward", "backward"), product
        )

    def compute_value(self, fiber: Fiber, op: Op) -> Any:
        return self._timing.answer_after(
            fiber,
            "value",
            self._timing.request_seconds("value", "forward"),
            self._body.compute_value(self._parts.rank.step),
        )
