"""The simulator's host: performs on the virtual clock what one rank's coroutines ask for, and writes it down.

Computing takes the rank's one device: what is asked while it is busy queues. Everything else costs what Ports and
Costs say. A verb's answer is given at once, or PARK: whoever the verb waits for will resume the fiber.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.fabric.load import stretch
from workbench.fabric.pace import SHARES, Kept, lasts
from workbench.host.canonical import optimizer_tensors
from workbench.host.slots import require_steppable
from workbench.rank import Handle, Op, Rank, StrategyError
from workbench.sim.collective import Collective
from workbench.sim.fiber import END, PARK, Child, CodedChild, Fiber, Lane
from workbench.sim.passing import Pass
from workbench.sim.rounds import Rounds

if TYPE_CHECKING:
    from workbench.sim.world import World


class Host:
    """One rank on the virtual clock."""

    def __init__(self, world: World, index: int, experiment: Experiment, body: Any) -> None:
        self.world, self.clock, self.record, self.index, self.size = world, world.clock, world.record, index, world.size
        self.rank, self.experiment, self.body = Rank(index, world.size, experiment.seed), experiment, body
        self.lanes: dict[str, Lane] = {}
        self.free: dict[str, float] = {}  # when each worker's device is free again
        self.met = False  # did this rank start a child in this step?
        self.sent = 0  # bytes so far
        self.leaving = False  # does the background have to end?
        self.rounds = Rounds(self)
        self.ledger: Any = None  # its session's
        self.ended: Callable[[Fiber], None] = lambda fiber: None
        self._kept = Kept()
        self._asked = self._took = 0.0  # seconds that this step's compute was to take, and takes without faults
        self.kinds: tuple[float, ...] = ()  # seconds per byte of the compressor's stretches
        meet = self._collective
        self.verbs: dict[str, Callable[[Fiber, Op], Any]] = {
            "next_bucket": self._next_bucket, "start": self._start, "wait": self._wait, "all_reduce": meet,
            "all_gather": meet, "reduce_scatter": meet, "all_to_all": meet, "all_to_allv": meet, "broadcast": meet,
            "forward": self._forward, "backward": self._backward, "update": self._update, "params": self._params,
            "grads": self._grads, "slots": self._slots,
            "backward_buckets": self._backward_buckets, "forward_buckets": self._forward_buckets,
            "next_params": self._next_params, "sample": self._sample, "clock": self._now, "batch": self._batch,
            "hold": self._hold, "send": self._send, "recv": self._recv, "again": self.rounds.again,
            "drive": self._drive, "stand": self._stand, "together": self._together, "park": self._park,
        }  # fmt: skip

    def span(self, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int, step: int = -1) -> None:
        self.record.span(self.index, self.rank.step if step < 0 else step, lane, name, asked, t0, t1, nbytes)

    def note(self, name: str, value: float) -> None:
        """Writes one number into the record."""
        self.record.sample(self.index, self.rank.step, name, self.clock.now, float(value))

    # -- compute --

    def seconds(self, phase: str, share: float = 1.0) -> float:
        """How long a phase of compute, or a share of it, lasts on this rank in this step."""
        e, costs, step = self.experiment, self.world.costs, self.rank.step
        share *= self.body.share
        asked = e.pace * 1e-3 * SHARES[phase] * share
        computed = costs.seconds(phase, self.index, step, e.seed) * share if costs is not None else 0.0
        factor = stretch(e.fabric.faults, self.index, step, phase) if e.fabric.faults else 1.0
        self._asked, self._took = self._asked + asked, self._took + lasts(asked, computed)
        return lasts(asked, computed, factor)

    def pace_said(self) -> dict[str, Any] | None:
        """A step is over; what there is to say of the pace, if that is news."""
        asked, took, self._asked, self._took = self._asked, self._took, 0.0, 0.0
        return self._kept.step(self.experiment.pace * 1e-3, asked, took)

    def _occupy(self, fiber: Fiber, seconds: float) -> float:
        """The device works for so long, from when it is free; returns when it begins."""
        began = max(self.clock.now, self.free.get(fiber.origin, 0.0))
        self.free[fiber.origin] = began + seconds
        return began

    def _compute(self, fiber: Fiber, phase: str, value: Any, share: float = 1.0) -> Any:
        seconds = self.seconds(phase, share)
        began = self._occupy(fiber, seconds)
        self.span("compute", phase, self.clock.now, began, began + seconds, 0)
        self.clock.at(began + seconds, fiber, value)
        return PARK

    def _forward(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        return self._compute(fiber, "forward", self.body.forward(*op.args))

    def _backward(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        return self._compute(fiber, "backward", self.body.backward(*op.args, False))

    def _update(self, fiber: Fiber, op: Op) -> Any:
        bucket, by = op.args
        share = 1.0 if bucket is None else bucket.data.numel() / self.body.layout.numel
        self.body.turn(fiber.origin)
        if bucket is not None:
            require_steppable(self.body.layout, self.body.optimizer, bucket, self.experiment)
        norm = self.body.update(bucket, self.experiment.clip, by)
        if norm is not None:
            self.note("grad_norm", norm)
        return self._compute(fiber, "update", None, share)

    def _backward_buckets(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        self.body.backward(*op.args, True)
        fiber.passing = self._passing(fiber, "backward", self.body.cut.ready)
        return self._next_bucket(fiber, op)

    def _next_bucket(self, fiber: Fiber, op: Op) -> Any:
        """The next full bucket, at the time at which it is full."""
        passing: Pass = fiber.passing
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
        """The next bucket of parameters, just before its layers are computed."""
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

    def _passing(self, fiber: Fiber, phase: str, shares: list[float]) -> Pass:
        began = max(self.clock.now, self.free.get(fiber.origin, 0.0))
        return Pass(phase, began, self.seconds(phase), shares)

    def _reach(self, fiber: Fiber, passing: Pass, share: float) -> float:
        """When so much of a pass is computed. It stood still while the strategy waited or computed something else."""
        origin, free = fiber.origin, self.clock.now
        if (until := self.free.get(origin, 0.0)) > free:
            free = until
        if free > passing.last:
            self._stretch(passing)
            passing.began += free - passing.last
            passing.since = free
        last = passing.last = self.free[origin] = passing.began + passing.seconds * share
        return last

    def _stretch(self, passing: Pass) -> None:
        """Writes down what was computed without a break."""
        if passing.last > passing.since:
            self.span("compute", passing.phase, passing.since, passing.since, passing.last, 0)

    def _over(self, fiber: Fiber, passing: Pass) -> Any:
        """A pass has been handed out whole: its loop is left when its time is over."""
        end = self._reach(fiber, passing, 1.0)
        self._stretch(passing)
        if end <= self.clock.now:
            return END
        self.clock.at(end, fiber, END)
        return PARK

    def _params(self, fiber: Fiber, op: Op) -> Any:
        return self.body.params()

    def _grads(self, fiber: Fiber, op: Op) -> Any:
        self.body.turn(fiber.origin)
        return self.body.grads()

    def _slots(self, fiber: Fiber, op: Op) -> Any:
        return optimizer_tensors(self.body.layout, self.body.optimizer)

    def _hold(self, fiber: Fiber, op: Op) -> Any:
        (bucket,) = op.args
        held = self.world.held.setdefault(self.index, dict(self.body.cut.nbytes))
        held[bucket.name] = bucket.nbytes
        self.note("held", self.ledger.hold(sum(held.values())))
        return bucket

    def _batch(self, fiber: Fiber, op: Op) -> Any:
        return self.body.batch()

    # -- communication --

    def lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(self, name)
        return self.lanes[name]

    def unfinished(self) -> list[Fiber]:
        """Children that wait for their turn, or are in it."""
        return [child for lane in self.lanes.values() for child in lane.unfinished()]

    def codec(self, name: str) -> tuple[float, ...]:
        """Seconds of each stretch of a compressor's own work on the bucket called `name`."""
        nbytes = self.body.cut.nbytes.get(name, 0)
        return tuple(per_byte * nbytes for per_byte in self.kinds) if nbytes else ()

    def _start(self, fiber: Fiber, op: Op) -> Any:
        coro, lane, name, priority = op.args
        self.met = self.met or op.group is None or len(op.group) == self.size
        handle = Handle(name, lane)
        if self.kinds and (codec := self.codec(name)):
            child: Child = CodedChild(self, coro, name, fiber.origin, priority, codec)
        else:
            child = Child(self, coro, name, fiber.origin, priority)
        handle._state = child
        name = fiber.origin + lane if fiber.origin else lane
        (self.lanes.get(name) or self.lane(name)).add(child)
        return handle

    def _wait(self, fiber: Fiber, op: Op) -> Any:
        child: Child = op.args[0]._state
        if child.done:
            return child.value
        if fiber.lane is not None and fiber.lane is child.lane:
            raise StrategyError(f"{fiber.name} waits for {child.name} on its own lane, which can never begin")
        if child.waiter is not None:
            raise StrategyError(f"{child.name} is waited for twice: a handle is waited for once")
        child.waiter, child.since = fiber, self.clock.now
        fiber.on = child
        return PARK

    def _collective(self, fiber: Fiber, op: Op) -> Any:
        group = op.group
        if (self.size if group is None else len(group)) == 1:
            x = op.args[0]
            return x.unsqueeze(0) if op.verb == "all_gather" else x
        lane = fiber.lane
        if lane is None:
            name = str(op.args[-1] or op.verb)
            start = Op("start", _asked(op), "comm", name, 0)
            start.group = op.group
            handle = self._start(fiber, start)
            return self._wait(fiber, Op("wait", handle))
        number = lane.met.get(group, 0)
        lane.met[group] = number + 1
        meeting = lane.open.get((group, number))
        if meeting is None:
            meeting = lane.open[group, number] = Collective(self.world, lane.name, number, fiber, op)
        if meeting.left == 1:
            del lane.open[group, number]
        meeting.join(fiber, op)
        return PARK

    def _send(self, fiber: Fiber, op: Op) -> Any:
        self.world.mail.send(fiber, *op.args)

    def _recv(self, fiber: Fiber, op: Op) -> Any:
        return self.world.mail.recv(fiber, *op.args)

    # -- the rest --

    def _sample(self, fiber: Fiber, op: Op) -> Any:
        self.note(*op.args)

    def _now(self, fiber: Fiber, op: Op) -> Any:
        return self.clock.now

    def _drive(self, fiber: Fiber, op: Op) -> Any:
        """A step runs as a fiber of its own: an answer need not pass through whoever asked for the step."""
        fiber.on = inner = Fiber(self, op.args[0], "step", fiber.origin)
        inner.waiter = fiber
        inner.resume(None)
        return PARK

    def _stand(self, fiber: Fiber, op: Op) -> Any:
        """Stands still for so many seconds, and answers with them."""
        self.clock.at(self.clock.now + op.args[0], fiber, op.args[0])
        return PARK

    def _together(self, fiber: Fiber, op: Op) -> Any:
        """All ranks meet beside the network; the last to come does something for all and answers each."""
        return self.world.together(fiber, *op.args)

    def _park(self, fiber: Fiber, op: Op) -> Any:
        """Waits until somebody who knows resumes it: `op.args[0]` takes the fiber; the rest says what for."""
        fiber.on = op.args[1]
        op.args[0](fiber)
        return PARK


async def _asked(op: Op) -> Any:
    return await op
