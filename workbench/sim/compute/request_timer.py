"""A virtual rank's compute outside the passes of its model, for the measured time, or none if unknown."""

from __future__ import annotations

from typing import Any

from workbench.rank import Op
from workbench.sim.clock.fiber import PARKED, Fiber
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.pass_timer import PassTimer


class RequestTimer:
    """The times of a strategy's requests to compute, and of codecs."""

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

    @property
    def step(self) -> int:
        return self._parts.rank.step

    @property
    def curvature(self) -> Any:
        return self._body.curvature

    def note_collecting(self, collects: bool) -> None:
        self._timing.note_collecting(collects)

    def sample(self, name: str, value: float) -> None:
        self._parts.note(name, value)

    def answer_request(self, fiber: Fiber, name: str, phases: tuple[str, ...], value: Any) -> Any:
        """Answers with `value` after the measured time of `name`, or after the time of `phases`."""
        return self._timing.answer_after(fiber, name, self._timing.request_seconds(name, *phases), value)

    def answer_work(self, fiber: Fiber, name: str, flops: float, value: Any) -> Any:
        """Answers after a strategy's arithmetic: on the device in a step, in parallel to it in a child."""
        costs = self._parts.world.costs
        seconds = flops * costs.flop.get(name, 0.0) if costs is not None else 0.0
        if not seconds:
            return value
        if fiber.lane is None:
            return self._timing.answer_after(fiber, name, seconds, value)
        now = self._clock.now
        self._parts.span("codec", name, now, now, now + seconds, 0, fiber.step)
        self._clock.resume_at(now + seconds, fiber, value)
        return PARKED
