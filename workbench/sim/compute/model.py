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
from workbench.host.passes.tensor_schedule import PlannedMeeting
from workbench.host.placement.canonical_state import list_optimizer_tensors
from workbench.host.placement.optimizer_slots import require_steppable
from workbench.host.sharding.usage import ParameterUsage
from workbench.rank import Op, Rank
from workbench.settings import KnobError
from workbench.sim.clock.fiber import END, PARK, Fiber
from workbench.sim.compute.arithmetic import ArithmeticPerformer
from workbench.sim.compute.bucket_pass import BucketPass

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


class ModelPerformer(ArithmeticPerformer):
    """The part of a Host that computes. Its verbs return an answer or PARK."""

    world: VirtualWorld
    clock: Any
    rank: Rank
    index: int
    experiment: Experiment
    body: Any
    ledger: Any = None  # of its session
    reading: Any = None  # of its session
    span: Callable[..., None]
    note: Callable[[str, float], None]
    run_inner: Callable[..., Any]
    narrowing: Any
    usage: ParameterUsage
    _step_narrow: Callable[..., float | None]
    _update_on_host: Callable[..., Any]

    def __init__(self) -> None:
        self.free: dict[str, float] = {}  # when each worker's device is free again
        self._held: tuple[Any, dict[int, int]] = None, {}  # a layout in buckets, bytes of parameters held by bucket
        self._kept = Kept()
        self.computes_until = 0.0  # when the present pass ends, if nothing delays it
        self._hindered = 0.0  # extra seconds of the next compute, because a codec used part of the core
        self._asked = self._took = 0.0  # seconds of this step's compute: by the pace, and without faults

    def phase_seconds(self, phase: str, share: float = 1.0, chunk: int = 0) -> float:
        """Returns the seconds of a phase, or a share of it, on this rank in this step. chunk: a piece of its stage"""
        e, costs, step, body = self.experiment, self.world.costs, self.rank.step, self.body
        share *= body.share * self.narrowing.compute_share(phase)
        again = body.again[chunk] if phase == "backward" else 0.0
        asked = e.pace * 1e-3 * (SHARES[phase] + again * SHARES["forward"]) * share
        if costs is not None and costs.parts and phase != "update":
            share *= self._find_cost_factor(costs.parts, phase, chunk)
        computed = costs.draw_seconds(phase, self.member, step, e.seed) * share if costs is not None else 0.0
        if costs is not None:
            if again:
                computed += costs.draw_seconds("forward", self.member, step, e.seed) * share * again
            computed += self._other_work_seconds(costs, phase, chunk)
        factor = stretch(e.fabric.faults, self.index, step, phase) if e.fabric.faults else 1.0
        healthy = lasts(asked, computed)
        self._asked, self._took = self._asked + asked, self._took + healthy
        return healthy * factor

    def _find_cost_factor(self, parts: tuple[tuple[float, float], ...], phase: str, chunk: int) -> float:
        """Returns how many times longer a piece takes than its number of parameters suggests."""
        stages = self.body.spread.stages if self.body.spread else None
        if stages is None:
            return 1.0
        if len(parts) != (every := sum(map(len, stages.pieces))):
            raise KnobError(f"costs: {len(parts)} parts have times, and the model has {every}; measure it with balance")
        times = [backward if phase == "backward" else forward for forward, backward in parts]
        return float(stages.compute_cost(times, chunk * len(stages) + self.body.piece.stage))

    def take_pace_news(self) -> dict[str, Any] | None:
        """Returns news about the pace at the end of a step, or None."""
        asked, took, self._asked, self._took = self._asked, self._took, 0.0, 0.0
        return self._kept.step(self.experiment.pace * 1e-3, asked, took)

    def delay_compute(self, seconds: float) -> None:
        """Delays this rank's compute by a codec that works for `seconds` at the same time."""
        if seconds and (costs := self.world.costs) is not None:
            self._hindered += costs.slows * seconds

    def _occupy_device(self, fiber: Fiber, seconds: float) -> float:
        """Occupies the device for `seconds`. Returns the begin."""
        began = max(self.clock.now, self.free.get(fiber.origin, 0.0))
        self.free[fiber.origin] = self.computes_until = began + seconds
        return began

    def _run_phase(self, fiber: Fiber, phase: str, value: Any, share: float = 1.0, name: str = "",
                 chunk: int = 0) -> Any:  # fmt: skip
        return self._answer_after(fiber, name or phase, self.phase_seconds(phase, share, chunk), value)

    def _answer_after(self, fiber: Fiber, name: str, seconds: float, value: Any) -> Any:
        """Occupies the device for `seconds`, then answers with `value`."""
        seconds, self._hindered = seconds + self._hindered, 0.0
        began = self._occupy_device(fiber, seconds)
        self.span("compute", name, self.clock.now, began, began + seconds, 0)
        self.clock.resume_at(began + seconds, fiber, value)
        return PARK

    def _run_forward(self, fiber: Fiber, op: Op) -> Any:
        self.body.activate_worker(fiber.origin)
        if self.body.piece is not None:  # backward takes the batch through the stages, in both directions
            return self.body.store_batch(*op.args)
        if self.body.split is not None:
            return self.run_inner(fiber, self._joint_forward(fiber, *op.args))
        if self.reading.sharded:
            return self.run_inner(fiber, self._run_sharded(fiber, "forward", lambda: self.body.run_forward(*op.args)))
        return self._run_phase(fiber, "forward", self.body.run_forward(*op.args))

    def _run_backward(self, fiber: Fiber, op: Op) -> Any:
        self.body.activate_worker(fiber.origin)
        if self.body.piece is not None:
            return self.run_inner(fiber, self._through_stages(*op.args))
        if self.body.split is not None:
            grad, micro = op.args
            return self.run_inner(fiber, self._joint_backward(fiber, grad, micro, False))
        value = self.body.run_backward(*op.args, False)
        if self.reading.sharded:
            return self.run_inner(fiber, self._run_sharded(fiber, "backward", lambda: value))
        return self._run_phase(fiber, "backward", value)

    def _update_model(self, fiber: Fiber, op: Op) -> Any:
        bucket, by, on = op.args
        if self.usage.step is not None:
            return self.run_inner(fiber, self._agreed_update(op))
        self.stale = True
        self.flow.versions.keep_weights()
        if on == "host":
            return self._update_on_host(fiber, bucket)
        share = 1.0 if bucket is None else bucket.data.numel() / self.body.layout.element_count
        self.body.activate_worker(fiber.origin)
        if self.world.real:
            self._drop_gradients()
        if bucket is not None:
            require_steppable(self.body.layout, self.body.optimizer, bucket, self.experiment)
        if bucket is None and self.rollback is not None:
            self.rollback.note_update()
        clip, squares, self._squares = self.experiment.clip, self._squares, None
        if clip and self.rank.mesh.inside and squares is None:
            return self.run_inner(fiber, self._clipped_update(op))
        if self.narrowing.is_narrow:
            norm = self._step_narrow(clip, by)
        else:
            norm = self.body.update_model(bucket, clip, by, squares)
        if norm is not None:
            self.note("grad_norm", norm)
        return self._run_phase(fiber, "update", None, share)

    async def _agreed_update(self, op: Op) -> Any:
        """An update before which the ranks agree on what the backward has used."""
        await self.usage.agree_on_unused(self)
        return await Op("update", *op.args)

    def _drop_gradients(self) -> None:
        """Parameters that no rank used, or that this rank alone updates and has frozen, keep no gradient."""
        layout = self.body.layout
        layout.drop_unused()
        if self.experiment.strategy.periodic and not self.usage.settled:
            layout.drop_frozen()

    def _backward_buckets(self, fiber: Fiber, op: Op) -> Any:
        self.body.activate_worker(fiber.origin)
        grad, micro = op.args
        self.usage.listening = self.world.real
        if self.body.piece is not None:
            return self.run_inner(fiber, self._through_stages(grad, micro, fiber))
        self.narrowing.require_awaited(True)
        if self.body.split is not None:
            return self.run_inner(fiber, self._joint_backward(fiber, grad, micro, True))
        self.body.run_backward(*op.args, True)
        fiber.passing = self._begin_pass(fiber, "backward", self.body.cut.ready)
        if self.reading.sharded:
            fiber.passing.events = deque(self.reading.list_events("backward"))
        return self._next_bucket(fiber, op)

    def _next_bucket(self, fiber: Fiber, op: Op) -> Any:
        """Answers with the next full bucket, at the time when it is full."""
        passing: BucketPass = fiber.passing
        if passing.events is not None:
            turn = passing.then is not None  # one micro-batch's pass; another fiber waits for its end
            return self.next_in_turn(fiber, passing) if turn else self.run_inner(fiber, self._next_full(passing))
        index = passing.next
        if index == len(passing.shares):
            return self._end_pass(fiber, passing)
        passing.next = index + 1
        self.clock.resume_at(
            self._reach_fraction(fiber, passing, passing.shares[index]), fiber, self.body.get_full_bucket(index)
        )
        return PARK

    def _forward_buckets(self, fiber: Fiber, op: Op) -> Any:
        (forward,) = op.args
        forward._state = self._begin_pass(fiber, "forward", self.body.cut.needed)
        return self._next_params(fiber, op)

    def _next_params(self, fiber: Fiber, op: Op) -> Any:
        """Answers with the next bucket of parameters, just before its layers are computed."""
        (forward,) = op.args
        passing: BucketPass | None = forward._state
        if passing is None:
            return END
        index = passing.next
        if index == len(passing.shares):
            forward.loss, forward._state = self.body.run_forward(forward.x, forward.micro), None
            return self._end_pass(fiber, passing)
        passing.next = index + 1
        params = self.body.list_params()
        self.clock.resume_at(
            self._reach_fraction(fiber, passing, passing.shares[index]), fiber, params[len(params) - 1 - index]
        )
        return PARK

    async def _run_sharded(self, fiber: Fiber, phase: str, computed: Callable[[], Any]) -> Any:
        """Runs a whole forward or backward of sharded parameters."""
        passing = self._begin_pass(fiber, phase, [])
        passing.events = deque(self.reading.list_events(phase))
        while await self._next_full(passing) is not END:
            pass
        if phase == "backward" or not self.world.real:
            return computed()
        more = await self.reading.gather_unforeseen(phase)
        value = computed()
        await self.reading.reshard_buckets(more)
        return value

    async def _next_full(self, passing: BucketPass) -> Any:
        """Returns the next full bucket in a pass of sharded or sliced parameters, or END."""
        reading, events = self.reading, passing.events
        assert events is not None
        reading.phase = self.rank.phase = passing.phase
        while events:
            event = events.popleft()
            await Op("reach", passing, event.share)
            if isinstance(event, PlannedMeeting):
                await self._perform_meeting(event)
                continue
            if event.kind == "full":
                await reading.note_filled(event.buckets[0])
                return self.body.get_full_bucket(event.buckets[0])
            if not reading.whole.issuperset(event.buckets):
                await reading.gather_buckets(event.buckets)
        await Op("reach", passing, 1.0)
        self._record_stretch(passing)
        if passing.phase == "backward":
            await reading.reshard_all()
        reading.phase = self.rank.phase = ""
        return END

    def _await_fraction(self, fiber: Fiber, op: Op) -> Any:
        """Waits until a share of a pass is computed."""
        self.clock.resume_at(self._reach_fraction(fiber, *op.args), fiber)
        return PARK

    def _begin_pass(self, fiber: Fiber, phase: str, shares: list[float], part: float = 1.0, name: str = "",
                 chunk: int = 0) -> BucketPass:  # fmt: skip
        began, lasts_ = max(self.clock.now, self.free.get(fiber.origin, 0.0)), self.phase_seconds(phase, part, chunk)
        self.computes_until = began + lasts_
        return BucketPass(name or phase, began, lasts_, shares)

    def _reach_fraction(self, fiber: Fiber, passing: BucketPass, share: float) -> float:
        """Returns when a share of a pass is computed. It pauses while the strategy waits or computes otherwise."""
        origin, free = fiber.origin, self.clock.now
        if (until := self.free.get(origin, 0.0)) > free:
            free = until
        if free > passing.last:
            self._record_stretch(passing)
            passing.began += free - passing.last
            passing.since = free
        passing.began, self._hindered = passing.began + self._hindered, 0.0
        last = passing.last = self.free[origin] = passing.began + passing.seconds * share
        self.computes_until = passing.began + passing.seconds
        return last

    def _record_stretch(self, passing: BucketPass) -> None:
        """Records the stretch of a pass that ran without a break."""
        if passing.last > passing.since:
            self.span("compute", passing.phase, passing.since, passing.since, passing.last, 0)

    def _end_pass(self, fiber: Fiber, passing: BucketPass) -> Any:
        """Ends a pass after its last bucket: its loop ends when the pass's time is over."""
        end = self._reach_fraction(fiber, passing, 1.0)
        self._record_stretch(passing)
        if passing.then is not None:
            self.clock.resume_at(end, *passing.then)  # this fiber answers the loop when the batch is over
            return PARK
        if end <= self.clock.now:
            return END
        self.clock.resume_at(end, fiber, END)
        return PARK

    def _list_params(self, fiber: Fiber, op: Op) -> Any:
        self.stale = True
        self.flow.versions.keep_weights()
        return self.body.list_params()

    def _list_grads(self, fiber: Fiber, op: Op) -> Any:
        self.body.activate_worker(fiber.origin)
        self.narrowing.require_awaited(True)
        return self.body.list_grads()

    def _list_slots(self, fiber: Fiber, op: Op) -> Any:
        return list_optimizer_tensors(self.body.layout, self.body.optimizer)

    def _hold_bucket(self, fiber: Fiber, op: Op) -> Any:
        (bucket,) = op.args
        self.reading.require_sharded()
        layout = self.body.layout
        if self.world.real:
            bucket = layout.hold_bucket(bucket)
            self.ledger.note_held(layout.held)
        else:  # one layout stands for the layouts of all ranks
            if self._held[0] is not layout.buckets:
                here = self.reading.whole
                self._held = layout.buckets, {b.index: b.nbytes for b in self.body.list_params() if b.index in here}
            self._held[1][bucket.index] = bucket.nbytes
            self.ledger.note_held(sum(self._held[1].values()))
        return bucket
