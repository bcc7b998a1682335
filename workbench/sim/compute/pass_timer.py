"""Times when a virtual rank's device computes: phases, shares of passes, and delays by codecs."""

from __future__ import annotations

from typing import Any

from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES, Kept, lasts
from workbench.rank import Op
from workbench.settings import KnobError
from workbench.sim.clock.fiber import PARKED, PASS_OVER, Fiber
from workbench.sim.compute.bucket_pass import BucketPass
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.costs.costs import Costs


class PassTimer:
    """Prices compute on the device of one virtual rank.

    free:           by origin of a worker's fibers, when its device is free again
    computes_until: end of the present pass, if nothing delays it
    collects:       whether layers record inputs, until the strategy requests their factors
    """

    def __init__(self, parts: ComputeParts) -> None:
        self._parts, self._body, self._rank = parts, parts.body, parts.rank
        self._world, self._clock = parts.world, parts.clock
        self._member = parts.world.members[parts.rank.id]
        self.free: dict[str, float] = {}
        self.computes_until = 0.0
        self.collects = False
        self._kept = Kept()
        self._hindered = 0.0  # of the next compute, because a codec shared the core
        self._asked = self._took = 0.0  # of this step's compute: by the pace, and without faults

    def phase_seconds(self, phase: str, share: float = 1.0, chunk: int = 0) -> float:
        """Returns the seconds of a share of a phase in this step. chunk: a piece of its stage"""
        parts = self._parts
        e, costs, step, body = parts.experiment, self._world.costs, self._rank.step, parts.body
        share *= body.share * parts.submodel.compute_share(phase)
        again = body.again[chunk] if phase == "backward" else 0.0
        asked = e.pace * 1e-3 * (SHARES[phase] + again * SHARES["forward"]) * share
        if costs is not None and costs.parts and phase != "update":
            share *= self._find_cost_factor(costs.parts, phase, chunk)
        computed = costs.draw_seconds(phase, self._member, step, e.seed) * share if costs is not None else 0.0
        if costs is not None:
            if again:
                computed += costs.draw_seconds("forward", self._member, step, e.seed) * share * again
            computed += self._other_work_seconds(costs, phase, chunk)
        factor = stretch(e.fabric.faults, self._rank.id, step, phase) if e.fabric.faults else 1.0
        healthy = lasts(asked, computed)
        self._asked, self._took = self._asked + asked, self._took + healthy
        return healthy * factor

    def _find_cost_factor(self, parts: tuple[tuple[float, float], ...], phase: str, chunk: int) -> float:
        """Returns a piece's time, divided by the time that its number of parameters suggests."""
        body = self._body
        stages = body.spread.stages if body.spread else None
        if stages is None:
            return 1.0
        if len(parts) != (every := sum(map(len, stages.pieces))):
            raise KnobError(
                f"costs: has times of {len(parts)} parts, but the model has {every}; measure them with balance"
            )
        times = [backward if phase == "backward" else forward for forward, backward in parts]
        return float(stages.compute_cost(times, chunk * len(stages) + body.piece.stage))

    def _other_work_seconds(self, costs: Costs, phase: str, chunk: int) -> float:
        """Returns a pass's seconds for factors and codecs."""
        seconds = costs.asked.get("collect", 0.0) if self.collects and phase == "backward" else 0.0
        if self._body.split is not None and costs.coder and phase != "update":
            layers = self._parts.experiment.partition.layers
            by = {"activation": layers.activations, "gradient": layers.gradients}  # type: ignore[attr-defined]
            done = [each for each in self._parts.pass_plans[chunk].coded if each.phase == phase]
            seconds += sum(costs.price_coding(by[what], how, nbytes) for _, how, what, nbytes in done)
        return seconds

    def request_seconds(self, name: str, *phases: str) -> float:
        """Returns measured seconds, or the seconds of `phases`; at least the pace's time."""
        e, costs = self._parts.experiment, self._world.costs
        known = costs.asked.get(name) if costs is not None else None
        if known is None:
            return sum(self.phase_seconds(phase) for phase in phases)
        asked = e.pace * 1e-3 * sum(SHARES[phase] for phase in phases) * self._body.share
        return lasts(asked, known, stretch(e.fabric.faults, self._rank.id, self._rank.step, "forward"))

    def take_pace_news(self) -> dict[str, Any] | None:
        asked, took, self._asked, self._took = self._asked, self._took, 0.0, 0.0
        return self._kept.step(self._parts.experiment.pace * 1e-3, asked, took)

    def delay_compute(self, seconds: float) -> None:
        """A codec works for `seconds` at the same time."""
        if seconds and (costs := self._world.costs) is not None:
            self._hindered += costs.slows * seconds

    def occupy_device(self, fiber: Fiber, seconds: float) -> float:
        """Returns when the device is free for `seconds`, which it then takes."""
        began = max(self._clock.now, self.free.get(fiber.origin, 0.0))
        self.free[fiber.origin] = self.computes_until = began + seconds
        return began

    def run_phase(self, fiber: Fiber, phase: str, value: Any, share: float = 1.0, name: str = "",
                  chunk: int = 0) -> Any:  # fmt: skip
        return self.answer_after(fiber, name or phase, self.phase_seconds(phase, share, chunk), value)

    def answer_after(self, fiber: Fiber, name: str, seconds: float, value: Any) -> Any:
        """Occupies the device for `seconds`, then answers with `value`."""
        seconds, self._hindered = seconds + self._hindered, 0.0
        began = self.occupy_device(fiber, seconds)
        self._parts.span("compute", name, self._clock.now, began, began + seconds, 0)
        self._clock.resume_at(began + seconds, fiber, value)
        return PARKED

    def begin_pass(self, fiber: Fiber, phase: str, shares: list[float], part: float = 1.0, name: str = "",
                   chunk: int = 0) -> BucketPass:  # fmt: skip
        """The pass stops at buckets. part: its share of the phase"""
        began, seconds = max(self._clock.now, self.free.get(fiber.origin, 0.0)), self.phase_seconds(phase, part, chunk)
        self.computes_until = began + seconds
        return BucketPass(name or phase, began, seconds, shares)

    def reach_fraction(self, fiber: Fiber, passing: BucketPass, share: float) -> float:
        """Returns when `share` is computed. The pass pauses while the strategy waits or computes."""
        origin, free = fiber.origin, self._clock.now
        if (until := self.free.get(origin, 0.0)) > free:
            free = until
        if free > passing.last:
            self.record_stretch(passing)
            passing.pause_until(free)
        delay, self._hindered = self._hindered, 0.0
        last = self.free[origin] = passing.compute_until(share, delay)
        self.computes_until = passing.began + passing.seconds
        return last

    def await_fraction(self, fiber: Fiber, op: Op) -> Any:
        self._clock.resume_at(self.reach_fraction(fiber, *op.args), fiber)
        return PARKED

    def record_stretch(self, passing: BucketPass) -> None:
        if passing.last > passing.since:
            self._parts.span("compute", passing.phase, passing.since, passing.since, passing.last, 0)

    def end_pass(self, fiber: Fiber, passing: BucketPass) -> Any:
        """Ends a pass after its last bucket. Its loop ends when its time is over."""
        end = self.reach_fraction(fiber, passing, 1.0)
        self.record_stretch(passing)
        if passing.then is not None:
            self._clock.resume_at(end, *passing.then)  # this fiber answers the loop after the batch
            return PARKED
        if end <= self._clock.now:
            return PASS_OVER
        self._clock.resume_at(end, fiber, PASS_OVER)
        return PARKED

    def note_collecting(self, collects: bool) -> None:
        self.collects = collects
