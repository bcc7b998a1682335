"""The compute of one virtual rank and its duration: whole phases, and passes that a strategy gets bucket by bucket.

A pass stops at every bucket: in backward when its gradients are complete, in forward before its parameters are read.
  The device computes a piece when the strategy requests it, and is idle while the strategy waits.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES, Kept, lasts
from workbench.host.passes.meetings import Planned
from workbench.host.placement.canonical import optimizer_tensors
from workbench.host.placement.slots import require_steppable
from workbench.host.sharding.usage import Usage
from workbench.rank import Op, Rank
from workbench.settings import KnobError
from workbench.sim.clock.fiber import END, PARK, Fiber
from workbench.sim.compute.arithmetic import Arithmetic
from workbench.sim.compute.passing import Pass

if TYPE_CHECKING:
    from workbench.sim.clock.world import World


class Compute(Arithmetic):
    """The part of a Host that computes. Its verbs return an answer or PARK."""

    world: World
    clock: Any
    rank: Rank
    index: int
    experiment: Experiment
    body: Any
    ledger: Any = None  # of its session
    reading: Any = None  # of its session
    span: Callable[..., None]
    note: Callable[[str, float], None]
    inner: Callable[..., Any]
    narrowing: Any
    usage: Usage
    _step_narrow: Callable[..., float | None]
    _update_on_host: Callable[..., Any]

    def __init__(self) -> None:
        self.free: dict[str, float] = {}  # when each worker's device is free again
        self._held: tuple[Any, dict[int, int]] = None, {}  # a layout in buckets, bytes of parameters held by bucket
        self._kept = Kept()
        self.computes_until = 0.0  # when the present pass ends, if nothing delays it
        self._hindered = 0.0  # extra seconds of the next compute, because a codec used part of the core
        self._asked = self._took = 0.0  # seconds of this step's compute: by the pace, and without faults

    def seconds(self, phase: str, share: float = 1.0, chunk: int = 0) -> float:
        """Returns the seconds of a phase, or a share of it, on this rank in this step. chunk: a piece of its stage"""
        e, costs, step, body = self.experiment, self.world.costs, self.rank.step, self.body
        share *= body.share * self.narrowing.share(phase)
        again = body.again[chunk] if phase == "backward" else 0.0
        asked = e.pace * 1e-3 * (SHARES[phase] + again * SHARES["forward"]) * share
        if costs is not None and costs.parts and phase != "update":
            share *= self._dear(costs.parts, phase, chunk)
        computed = costs.seconds(phase, self.member, step, e.seed) * share if costs is not None else 0.0
        if costs is not None:
            if again:
                computed += costs.seconds("forward", self.member, step, e.seed) * share * again
            computed += self._beside_pass(costs, phase, chunk)
        factor = stretch(e.fabric.faults, self.index, step, phase) if e.fabric.faults else 1.0
        healthy = lasts(asked, computed)
        self._asked, self._took = self._asked + asked, self._took + healthy
        return healthy * factor

    def _dear(self, parts: tuple[tuple[float, float], ...], phase: str, chunk: int) -> float:
        """Returns how many times longer a piece takes than its number of parameters suggests."""
        stages = self.body.spread.stages if self.body.spread else None
        if stages is None:
            return 1.0
        if len(parts) != (every := sum(map(len, stages.pieces))):
            raise KnobError(f"costs: {len(parts)} parts have times, and the model has {every}; measure it with balance")
        times = [backward if phase == "backward" else forward for forward, backward in parts]
        return float(stages.dear(times, chunk * len(stages) + self.body.piece.stage))

    def pace_said(self) -> dict[str, Any] | None:
        """Returns news about the pace at the end of a step, or None."""
        asked, took, self._asked, self._took = self._asked, self._took, 0.0, 0.0
        return self._kept.step(self.experiment.pace * 1e-3, asked, took)

    def hinder(self, seconds: float) -> None:
        """Delays this rank's compute by a codec that works for `seconds` at the same time."""
        if seconds and (costs := self.world.costs) is not None:
            self._hindered += costs.slows * seconds

    def _occupy(self, fiber: Fiber, seconds: float) -> float:
        """Occupies the device for `seconds`. Returns the begin."""
        began = max(self.clock.now, self.free.get(fiber.origin, 0.0))
        self.free[fiber.origin] = self.computes_until = began + seconds
        return began

    def _compute(self, fiber: Fiber, phase: str, value: Any, share: float = 1.0, name: str = "",
                 chunk: int = 0) -> Any:  # fmt: skip
        return self._lasting(fiber, name or phase, self.seconds(phase, share, chunk), value)

    def _lasting(self, fiber: Fiber, name: str, seconds: float, value: Any) -> Any:
        """Occupies the device for `seconds`, then answers with `value`."""
        seconds, self._hindered = seconds + self._hindered, 0.0
        began = self._occupy(fiber, seconds)
        self.span("compute", name, self.clock.now, began, began + seconds, 0)
        self.clock.at(began + seconds, fiber, value)
        return PARK

    def _forward(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        if self.body.piece is not None:  # backward takes the batch through the stages, in both directions
            return self.body.open(*op.args)
        if self.body.split is not None:
            return self.inner(fiber, self._joint_forward(fiber, *op.args))
        if self.reading.sharded:
            return self.inner(fiber, self._through(fiber, "forward", lambda: self.body.forward(*op.args)))
        return self._compute(fiber, "forward", self.body.forward(*op.args))

    def _backward(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        if self.body.piece is not None:
            return self.inner(fiber, self._through_stages(*op.args))
        if self.body.split is not None:
            grad, micro = op.args
            return self.inner(fiber, self._joint_backward(fiber, grad, micro, False))
        value = self.body.backward(*op.args, False)
        if self.reading.sharded:
            return self.inner(fiber, self._through(fiber, "backward", lambda: value))
        return self._compute(fiber, "backward", value)

    def _update(self, fiber: Fiber, op: Op) -> Any:
        bucket, by, on = op.args
        if self.usage.step is not None:
            return self.inner(fiber, self._agreed_update(op))
        self.stale = True
        self.flow.versions.keep()
        if on == "host":
            return self._update_on_host(fiber, bucket)
        share = 1.0 if bucket is None else bucket.data.numel() / self.body.layout.numel
        self.body.turn(fiber.origin)
        if self.world.real:
            self._drop_gradients()
        if bucket is not None:
            require_steppable(self.body.layout, self.body.optimizer, bucket, self.experiment)
        if bucket is None and self.rollback is not None:
            self.rollback.updates()
        clip, squares, self._squares = self.experiment.clip, self._squares, None
        if clip and self.rank.mesh.inside and squares is None:
            return self.inner(fiber, self._clipped_update(op))
        norm = self._step_narrow(clip, by) if self.narrowing.narrow else self.body.update(bucket, clip, by, squares)
        if norm is not None:
            self.note("grad_norm", norm)
        return self._compute(fiber, "update", None, share)

    async def _agreed_update(self, op: Op) -> Any:
        """An update before which the ranks agree on what the backward has used."""
        await self.usage.agree(self)
        return await Op("update", *op.args)

    def _drop_gradients(self) -> None:
        """Parameters that no rank used, or that this rank alone updates and has frozen, keep no gradient."""
        layout = self.body.layout
        layout.drop_unused()
        if self.experiment.strategy.periodic and not self.usage.settled:
            layout.drop_frozen()

    def _backward_buckets(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        grad, micro = op.args
        self.usage.listening = self.world.real
        if self.body.piece is not None:
            return self.inner(fiber, self._through_stages(grad, micro, fiber))
        self.narrowing.require_awaited(True)
        if self.body.split is not None:
            return self.inner(fiber, self._joint_backward(fiber, grad, micro, True))
        self.body.backward(*op.args, True)
        fiber.passing = self._passing(fiber, "backward", self.body.cut.ready)
        if self.reading.sharded:
            fiber.passing.events = deque(self.reading.events("backward"))
        return self._next_bucket(fiber, op)

    def _next_bucket(self, fiber: Fiber, op: Op) -> Any:
        """Answers with the next full bucket, at the time when it is full."""
        passing: Pass = fiber.passing
        if passing.events is not None:
            turn = passing.then is not None  # one micro-batch's pass; another fiber waits for its end
            return self.next_in_turn(fiber, passing) if turn else self.inner(fiber, self._next_full(passing))
        index = passing.next
        if index == len(passing.shares):
            return self._over(fiber, passing)
        passing.next = index + 1
        self.clock.at(self._reach(fiber, passing, passing.shares[index]), fiber, self.body.full(index))
        return PARK

    def _forward_buckets(self, fiber: Fiber, op: Op) -> Any:
        (forward,) = op.args
        forward._state = self._passing(fiber, "forward", self.body.cut.needed)
        return self._next_params(fiber, op)

    def _next_params(self, fiber: Fiber, op: Op) -> Any:
        """Answers with the next bucket of parameters, just before its layers are computed."""
        (forward,) = op.args
        passing: Pass | None = forward._state
        if passing is None:
            return END
        index = passing.next
        if index == len(passing.shares):
            forward.loss, forward._state = self.body.forward(forward.x, forward.micro), None
            return self._over(fiber, passing)
        passing.next = index + 1
        params = self.body.params()
        self.clock.at(self._reach(fiber, passing, passing.shares[index]), fiber, params[len(params) - 1 - index])
        return PARK

    async def _through(self, fiber: Fiber, phase: str, computed: Callable[[], Any]) -> Any:
        """Runs a whole forward or backward of sharded parameters."""
        passing = self._passing(fiber, phase, [])
        passing.events = deque(self.reading.events(phase))
        while await self._next_full(passing) is not END:
            pass
        if phase == "backward" or not self.world.real:
            return computed()
        more = await self.reading.gather_unforeseen(phase)
        value = computed()
        await self.reading.release(more)
        return value

    async def _next_full(self, passing: Pass) -> Any:
        """Returns the next full bucket in a pass of sharded or sliced parameters, or END."""
        reading, events = self.reading, passing.events
        assert events is not None
        reading.phase = self.rank.phase = passing.phase
        while events:
            event = events.popleft()
            await Op("reach", passing, event.share)
            if isinstance(event, Planned):
                await self._meet(event)
                continue
            if event.kind == "full":
                await reading.filled(event.buckets[0])
                return self.body.full(event.buckets[0])
            if not reading.whole.issuperset(event.buckets):
                await reading.need(event.buckets)
        await Op("reach", passing, 1.0)
        self._stretch(passing)
        if passing.phase == "backward":
            await reading.close()
        reading.phase = self.rank.phase = ""
        return END

    def _until(self, fiber: Fiber, op: Op) -> Any:
        """Waits until a share of a pass is computed."""
        self.clock.at(self._reach(fiber, *op.args), fiber)
        return PARK

    def _passing(self, fiber: Fiber, phase: str, shares: list[float], part: float = 1.0, name: str = "",
                 chunk: int = 0) -> Pass:  # fmt: skip
        began, lasts_ = max(self.clock.now, self.free.get(fiber.origin, 0.0)), self.seconds(phase, part, chunk)
        self.computes_until = began + lasts_
        return Pass(name or phase, began, lasts_, shares)

    def _reach(self, fiber: Fiber, passing: Pass, share: float) -> float:
        """Returns when a share of a pass is computed. It pauses while the strategy waits or computes otherwise."""
        origin, free = fiber.origin, self.clock.now
        if (until := self.free.get(origin, 0.0)) > free:
            free = until
        if free > passing.last:
            self._stretch(passing)
            passing.began += free - passing.last
            passing.since = free
        passing.began, self._hindered = passing.began + self._hindered, 0.0
        last = passing.last = self.free[origin] = passing.began + passing.seconds * share
        self.computes_until = passing.began + passing.seconds
        return last

    def _stretch(self, passing: Pass) -> None:
        """Records the stretch of a pass that ran without a break."""
        if passing.last > passing.since:
            self.span("compute", passing.phase, passing.since, passing.since, passing.last, 0)

    def _over(self, fiber: Fiber, passing: Pass) -> Any:
        """Ends a pass after its last bucket: its loop ends when the pass's time is over."""
        end = self._reach(fiber, passing, 1.0)
        self._stretch(passing)
        if passing.then is not None:
            self.clock.at(end, *passing.then)  # this fiber answers the loop when the batch is over
            return PARK
        if end <= self.clock.now:
            return END
        self.clock.at(end, fiber, END)
        return PARK

    def _params(self, fiber: Fiber, op: Op) -> Any:
        self.stale = True
        self.flow.versions.keep()
        return self.body.params()

    def _grads(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        self.narrowing.require_awaited(True)
        return self.body.grads()

    def _slots(self, fiber: Fiber, op: Op) -> Any:
        return optimizer_tensors(self.body.layout, self.body.optimizer)

    def _hold(self, fiber: Fiber, op: Op) -> Any:
        (bucket,) = op.args
        self.reading.require_sharded()
        layout = self.body.layout
        if self.world.real:
            bucket = layout.hold(bucket)
            self.ledger.hold(layout.held)
        else:  # one layout stands for the layouts of all ranks
            if self._held[0] is not layout.buckets:
                here = self.reading.whole
                self._held = layout.buckets, {b.index: b.nbytes for b in self.body.params() if b.index in here}
            self._held[1][bucket.index] = bucket.nbytes
            self.ledger.hold(sum(self._held[1].values()))
        return bucket
