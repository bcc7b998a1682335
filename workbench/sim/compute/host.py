"""The simulator's host: performs the requests of one rank's coroutines on the virtual clock, and records them.

Compute uses the rank's one device, and requests queue while it is busy. Other requests cost the time that Ports and
Costs give. A verb returns its answer or PARK; then another part of the simulator resumes the fiber later.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from workbench.experiment import Experiment
from workbench.fabric import Ways
from workbench.host.core import all_reduce
from workbench.host.memory.offload import OFFLOAD_LANES
from workbench.host.passes.in_flight import InFlight
from workbench.host.sharding.usage import ParameterUsage
from workbench.rank import Handle, Op, Rank, StrategyError, collective
from workbench.sim.clock.batches import BatchPerformer
from workbench.sim.clock.collective import Collective
from workbench.sim.clock.fiber import PARK, ChildFiber, CodedChildFiber, Fiber, Lane
from workbench.sim.clock.rounds import BackgroundRounds
from workbench.sim.compute.offload import OffloadPerformer
from workbench.sim.compute.piecewise import PiecewisePerformer
from workbench.sim.costs.prices import Price, price_bytes

if TYPE_CHECKING:
    from workbench.sim.clock.world import VirtualWorld


WITH_OTHERS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_allv", "broadcast", "send", "recv",
               "again", "together", "told")  # fmt: skip


class Host(PiecewisePerformer, OffloadPerformer, BatchPerformer):
    """One rank on the virtual clock."""

    def __init__(self, world: VirtualWorld, index: int, experiment: Experiment, body: Any) -> None:
        super().__init__()
        self.world, self.clock, self.record, self.index, self.size = world, world.clock, world.record, index, world.size
        self.member = world.members[index]
        self.rank, self.experiment, self.body = Rank(index, world.size, experiment.seed), experiment, body
        self.rank.members = tuple(world.members) if len(world.members) == world.size else ()
        self.flow = body.flow = InFlight(lambda: body.layout, body.peek_batch, body.list_buffers, body.forget_micros,
                                     lambda: self.experiment.steps)  # fmt: skip
        self.lanes: dict[str, Lane] = {}
        self.met = False  # whether this rank has started a child in this step
        self.sent_bytes = 0  # bytes so far
        self.usage = ParameterUsage(world.make_unused_flags(index))
        self.alone: AbstractContextManager[None] = nullcontext()
        self.leaving = False  # does the background have to end?
        self.rounds = BackgroundRounds(self)
        self._ways = Ways()
        self.ended: Callable[[Fiber], None] = lambda fiber: None
        self.steering: Any = None  # of its session
        self.kinds: tuple[Price, ...] = ()  # prices of the compressor's stretches
        self.kinds_beside: tuple[Price, ...] = ()  # the same while the rank computes
        meet = self._run_collective
        self.verbs: dict[str, Callable[[Fiber, Op], Any]] = {
            "next_bucket": self._next_bucket,
            "start": self._start_child,
            "wait": self._await_child,
            "all_reduce": meet,
            "all_gather": meet,
            "reduce_scatter": meet,
            "all_to_all": meet,
            "all_to_allv": meet,
            "broadcast": meet,
            "forward": self._run_forward,
            "backward": self._run_backward,
            "update": self._update_model,
            "params": self._list_params,
            "grads": self._list_grads,
            "slots": self._list_slots,
            "collect": self._collect_factors,
            "factors": self._compute_factors,
            "curve": self._compute_curvature,
            "value": self._compute_value,
            "work": self._run_work,
            "backward_buckets": self._backward_buckets,
            "forward_buckets": self._forward_buckets,
            "next_params": self._next_params,
            "sample": self._record_sample,
            "clock": self._read_clock,
            "batch": self._next_batch,
            "client": lambda fiber, op: self.body.use_client(*op.args),
            "stage_forward": self._stage_forward,
            "stage_backward": self._stage_backward,
            "stage_inputs": self._stage_inputs,
            "stage_weights": self._stage_weights,
            "coded": self._run_codec,
            "pieces": self._count_pieces,
            "rise": self._piece_forward,
            "fall": self._piece_backward,
            "units": lambda fiber, op: self.narrowing.hidden_units,
            "narrow": self._narrow_model,
            "look_up": self._look_up,
            "row_grads": self._row_grads,
            "update_rows": self._update_rows,
            "hold": self._hold_bucket,
            "offload": self._offload_values,
            "fetch": self._fetch_values,
            "send": self._send_message,
            "recv": self._receive_message,
            "again": self.rounds.next_step,
            "reach": self._await_fraction,
            "drive": self._drive_coroutine,
            "stand": self._stand_still,
            "together": self._gather_ranks,
            "park": self._park_fiber,
            "told": self._broadcast_value,
        }

    @property
    def layout(self) -> Any:
        return self.body.layout

    @property
    def optimizer(self) -> Any:
        return self.body.optimizer

    @property
    def model(self) -> Any:
        return self.body.model

    module = model  # nothing is wrapped around it

    def strategy(self) -> Any:
        """The one that is in force."""
        return self.experiment.strategy

    def end_requests(self) -> None:
        """Ends everything under way on this rank at its next request, because the rank has crashed."""
        self.verbs = dict.fromkeys(self.verbs, _park_forever)

    def cut_off(self) -> None:
        """Answers no further requests that involve other ranks."""
        for verb in WITH_OTHERS:
            self.verbs[verb] = partial(self._perform_alone, self.verbs[verb])

    def _perform_alone(self, perform: Callable[[Fiber, Op], Any], fiber: Fiber, op: Op) -> Any:
        return perform(fiber, op) if op.group is not None and len(op.group) == 1 else PARK

    def span(self, lane: str, name: str, asked: float, t0: float, t1: float, nbytes: int, step: int = -1) -> None:
        if lane == "compute" and self.steering.names:
            self.steering.receive_sample(lane, t1 - t0)
        self.record.span(self.index, self.rank.step if step < 0 else step, lane, name, asked, t0, t1, nbytes)

    def note(self, name: str, value: float) -> None:
        """Records one number."""
        self.steering.receive_sample(name, value)
        self.record.sample(self.index, self.rank.step, name, self.clock.now, float(value))

    # -- communication --

    def open_lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(self, name)
        return self.lanes[name]

    def list_unfinished(self) -> list[Fiber]:
        """Returns the running and the waiting children."""
        return [child for lane in self.lanes.values() for child in lane.list_unfinished()]

    def stretch_seconds(self, number: int, nbytes: int) -> float:
        """Returns the seconds of a stretch of the compressor's work on `nbytes` bytes that begins now.

        A stretch during compute has its own price, and makes that compute longer.
        """
        computes = self.computes_until - self.clock.now
        for kinds, is_beside in ((self.kinds_beside, True), (self.kinds, False)):
            seconds = price_bytes(kinds[min(number, len(kinds) - 1)], nbytes)
            if not is_beside or 2 * computes > seconds:
                break
        self.delay_compute(min(seconds, max(0.0, computes)))
        return seconds

    def _start_child(self, fiber: Fiber, op: Op) -> Any:
        coro, lane, name, priority, share = op.args
        group = op.group
        everyone = group is None or group == self.rank.replicas.within or len(group) == self.size
        self.met = self.met or (everyone and lane not in OFFLOAD_LANES)
        handle = Handle(name, lane)
        if self.usage.listening and lane not in OFFLOAD_LANES:
            self.usage.last = handle
        if self.kinds and (nbytes := self.body.cut.nbytes.get(name, 0)):
            child: ChildFiber = CodedChildFiber(self, coro, name, fiber.origin, priority, share, nbytes)
        else:
            child = ChildFiber(self, coro, name, fiber.origin, priority, share)
        handle._state = child
        child.by = self.update_settings() if lane in OFFLOAD_LANES else None
        name = fiber.origin + lane if fiber.origin else lane
        (self.lanes.get(name) or self.open_lane(name)).queue_child(child)
        return handle

    def _await_child(self, fiber: Fiber, op: Op) -> Any:
        handle = op.args[0]
        if handle is self.usage.last and self.usage.step is not None:
            self.usage.last = None
            return self.run_inner(fiber, self._wait_and_agree(handle))
        child: ChildFiber = handle._state
        if child.done:
            self.ledger.buffers.note_end(child)
            return child.value
        if fiber.lane is not None and fiber.lane is child.lane:
            raise StrategyError(f"{fiber.name} waits for {child.name} on its own lane, which can never begin")
        if child.waiter is not None:
            raise StrategyError(f"{child.name} is waited for twice: a handle is waited for once")
        child.waiter, child.since = fiber, self.clock.now
        fiber.on = child
        return PARK

    async def _wait_and_agree(self, handle: Handle) -> Any:
        """After the last exchange of a backward the ranks agree on what it has used."""
        value = await Op("wait", handle)
        await self.usage.agree_on_unused(self)
        return value

    def _run_collective(self, fiber: Fiber, op: Op) -> Any:
        group = op.group
        if (self.size if group is None else len(group)) == 1:
            x = op.args[0]
            return x.unsqueeze(0) if op.verb == "all_gather" else x
        lane = fiber.lane
        if lane is None:
            name = str(op.args[-1] or op.verb)
            start = Op("start", _await_op(op), "comm", name, 0, 1.0)
            start.group = op.group
            handle = self._start_child(fiber, start)
            return self._await_child(fiber, Op("wait", handle))
        if (by := all_reduce.choose_algorithm(self.experiment.fabric, self.size, op)) is not None:
            return self.run_inner(
                fiber, all_reduce.run_all_reduce(by, self.rank, op, f"{collective(op, fiber.name)}{lane.name_suffix}")
            )
        number = lane.met.get(group, 0)
        lane.met[group] = number + 1
        meeting = lane.open.get((group, number))
        if meeting is None:
            meeting = lane.open[group, number] = Collective(self.world, lane.name, number, fiber, op)
        if meeting.left == 1:
            del lane.open[group, number]
        meeting.add_rank(fiber, op)
        return PARK

    def _send_message(self, fiber: Fiber, op: Op) -> Any:
        self.world.mail.send(fiber, *op.args)

    def _receive_message(self, fiber: Fiber, op: Op) -> Any:
        return self.world.mail.recv(fiber, *op.args)

    # -- other verbs --

    def _record_sample(self, fiber: Fiber, op: Op) -> Any:
        self.note(*op.args)

    def _read_clock(self, fiber: Fiber, op: Op) -> Any:
        return self.clock.now

    def _drive_coroutine(self, fiber: Fiber, op: Op) -> Any:
        """Runs a step as a fiber of its own, so that its answers skip the requesting fiber."""
        return self.run_inner(fiber, op.args[0])

    def run_inner(self, fiber: Fiber, coro: Coroutine[Op, Any, Any]) -> Any:
        """Answers with the result of `coro`, whose requests count as the fiber's."""
        fiber.on = inner = Fiber(self, coro, "step", fiber.origin)
        inner.waiter, inner.lane = fiber, fiber.lane
        inner.resume(None)
        return PARK

    def _stand_still(self, fiber: Fiber, op: Op) -> Any:
        """Waits for a number of seconds, and answers with it."""
        self.clock.resume_at(self.clock.now + op.args[0], fiber, op.args[0])
        return PARK

    def _gather_ranks(self, fiber: Fiber, op: Op) -> Any:
        """Gathers ranks outside the network. The last one computes the answers for all."""
        what, mine, joint, seconds = op.args
        return self.world.gather_ranks(fiber, what, mine, joint, seconds, op.group)

    def _broadcast_value(self, fiber: Fiber, op: Op) -> Any:
        """What the first rank of all, or of `op.group`, says; the other ranks wait for it, and it for nobody."""
        what, mine = op.args
        return self.world.broadcast_value(fiber, what, mine, op.group)

    def _park_fiber(self, fiber: Fiber, op: Op) -> Any:
        """Parks the fiber until another part of the simulator resumes it. op.args: (receiver of the fiber, reason)"""
        fiber.on = op.args[1]
        op.args[0](fiber)
        return PARK


def _park_forever(fiber: Fiber, op: Op) -> Any:
    return PARK


async def _await_op(op: Op) -> Any:
    return await op
