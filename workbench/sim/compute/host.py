"""The simulator's host: performs the requests of one rank's coroutines on the virtual clock, and records them.

Compute requests queue for the rank's one device. Other requests take the time from Ports and Costs. A verb returns its
answer or PARKED; after PARKED, another part of the simulator resumes the fiber.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from workbench.experiment import Experiment
from workbench.host.core import all_reduce
from workbench.host.memory.offload import OFFLOAD_LANES
from workbench.host.placement.optimizer_slots import copy_optimizer
from workbench.rank import Handle, Op, StrategyError, collective
from workbench.sim.clock.background_rounds import BackgroundRounds
from workbench.sim.clock.batches import BatchPerformer
from workbench.sim.clock.collective import Collective
from workbench.sim.clock.fiber import PARKED, ChildFiber, CodedChildFiber, Fiber, Lane, Waiter
from workbench.sim.compute.bucket_delivery import BucketDelivery
from workbench.sim.compute.compute_parts import ComputeParts
from workbench.sim.compute.model import ModelPerformer
from workbench.sim.compute.offload import OffloadTransfers
from workbench.sim.compute.pass_timer import PassTimer
from workbench.sim.compute.piecewise import PiecewiseCompute
from workbench.sim.compute.pipeline import PipelinePerformer
from workbench.sim.compute.request_timer import RequestTimer
from workbench.sim.compute.tensor import TensorPerformer
from workbench.sim.costs.prices import Price, price_bytes
from workbench.strategies.embedding_tables.simulator import TablePerformer
from workbench.strategies.offload.simulator import OffloadPerformer
from workbench.strategies.second_order.simulator import CurvaturePerformer
from workbench.strategies.sub_models.simulator import SubModelPerformer

COMMUNICATION_VERBS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "all_to_allv", "broadcast", "send",
                       "recv", "again", "together", "told")  # fmt: skip


class Host:
    """Performs one rank's verbs.

    tensor:     computes with the ranks of the other slices
    whole:      computes this rank's model
    tables:     reads and updates rows of embedding tables
    met:        whether this rank has started a child in this step
    sent_bytes: bytes so far
    leaving:    whether the background has to end
    """

    def __init__(self, parts: ComputeParts, ended: Callable[[Fiber], None]) -> None:
        """ended: takes each ended fiber, except children"""
        self.parts, self.world, self.clock = parts, parts.world, parts.clock
        self.record, self.rank = parts.record, parts.rank
        self.index, self.size, self.body = parts.rank.id, parts.world.size, parts.body
        self.usage, self.memory_account = parts.usage, parts.memory_account
        self.span, self.note, self.ended = parts.span, parts.note, ended
        self.timing = PassTimer(parts)
        self.offload, self._piecewise = OffloadTransfers(parts, self.timing), PiecewiseCompute(parts, self.timing)
        self._sub_models = SubModelPerformer(self._piecewise)
        self._offload_verbs = OffloadPerformer(self.offload).verbs
        self._requests, self._batches = RequestTimer(parts, self.timing), BatchPerformer(parts.body)
        self._second_order = CurvaturePerformer(self._requests)
        self.tables = TablePerformer(parts.body, parts.world.real, copy_optimizer)
        self._delivery = BucketDelivery(parts, self.timing, self._make_fiber, self.run_inner)
        self.tensor = TensorPerformer(parts, self.timing, self._delivery)
        self._pipeline = PipelinePerformer(parts, self.timing, self._delivery, self.tensor)
        self.whole = ModelPerformer(parts, self.timing, self._delivery, self.tensor, self._pipeline, self._piecewise,
                                    self.offload)  # fmt: skip
        self.lanes: dict[str, Lane] = {}
        self.met = self.leaving = False
        self.sent_bytes = 0
        self.rounds = BackgroundRounds(self)
        self._prices: tuple[Price, ...] = ()
        self._prices_beside: tuple[Price, ...] = ()
        self.verbs = self._list_verbs()

    def _list_verbs(self) -> dict[str, Callable[[Fiber, Op], Any]]:
        whole, pipeline = self.whole, self._pipeline
        batches, meet = self._batches, self._run_collective
        body = self.body
        core: dict[str, Callable[[Fiber, Op], Any]] = {
            "next_bucket": self._delivery.next_bucket,
            "start": self._start_child,
            "wait": self._await_child,
            "all_reduce": meet,
            "all_gather": meet,
            "reduce_scatter": meet,
            "all_to_all": meet,
            "all_to_allv": meet,
            "broadcast": meet,
            "forward": whole.run_forward,
            "backward": whole.run_backward,
            "update": whole.update_model,
            "params": whole.list_params,
            "grads": whole.list_grads,
            "slots": whole.list_slots,
            "backward_buckets": whole.backward_buckets,
            "forward_buckets": whole.forward_buckets,
            "next_params": whole.next_params,
            "sample": self._record_sample,
            "clock": self._read_clock,
            "batch": batches.next_batch,
            "client": lambda fiber, op: body.use_client(*op.args),
            "stage_forward": pipeline.stage_forward,
            "stage_backward": pipeline.stage_backward,
            "stage_inputs": pipeline.stage_inputs,
            "stage_weights": pipeline.stage_weights,
            "coded": self._requests.run_codec,
            "hold": whole.hold_bucket,
            "send": self._send_message,
            "recv": self._receive_message,
            "again": self.rounds.next_step,
            "reach": self.timing.await_fraction,
            "drive": self._drive_coroutine,
            "stand": self._stand_still,
            "together": self._gather_ranks,
            "park": self._park_fiber,
            "told": self._broadcast_value,
        }
        return core | self.tables.verbs | self._second_order.verbs | self._sub_models.verbs | self._offload_verbs

    def wrap_verbs(self, wrap: Callable[[str, Callable[[Fiber, Op], Any]], Callable[[Fiber, Op], Any]]) -> None:
        """Replaces what performs each verb. wrap: takes the verb and what performs it now"""
        self.verbs = {verb: wrap(verb, do) for verb, do in self.verbs.items()}

    def count_sent(self, nbytes: int) -> None:
        self.sent_bytes += nbytes

    def begin_step(self) -> None:
        self.met = False

    def begin_background(self) -> None:
        self.leaving = False
        self.rounds.note_busy()

    def begin_leaving(self) -> None:
        """Lets the background end, because this rank goes to a meeting."""
        self.rounds.note_idle()
        self.leaving = True

    def end_leaving(self) -> None:
        self.leaving = False

    def end_requests(self) -> None:
        """Ends each fiber at its next request, because the rank has crashed."""
        self.verbs = dict.fromkeys(self.verbs, _park_forever)

    def cut_off(self) -> None:
        """Answers no further requests that involve other ranks."""
        for verb in COMMUNICATION_VERBS:
            self.verbs[verb] = partial(self._perform_alone, self.verbs[verb])

    def _perform_alone(self, perform: Callable[[Fiber, Op], Any], fiber: Fiber, op: Op) -> Any:
        return perform(fiber, op) if op.group is not None and len(op.group) == 1 else PARKED

    @property
    def experiment(self) -> Experiment:
        return self.parts.experiment

    def use_prices(self, prices: tuple[Price, ...], beside: tuple[Price, ...]) -> None:
        """Sets the prices of the compressor's stretches. Parameter `beside` has those while the rank computes."""
        self._prices, self._prices_beside = prices, beside

    # -- communication --

    def open_lane(self, name: str) -> Lane:
        if name not in self.lanes:
            self.lanes[name] = Lane(self, name)
        return self.lanes[name]

    def list_unfinished(self) -> list[Fiber]:
        return [child for lane in self.lanes.values() for child in lane.list_unfinished()]

    def stretch_seconds(self, number: int, nbytes: int) -> float:
        """Returns the seconds of a stretch of the compressor's work that begins now.

        A stretch during compute has its own price, and delays that compute.
        """
        computes = self.timing.computes_until - self.clock.now
        for kinds, is_beside in ((self._prices_beside, True), (self._prices, False)):
            seconds = price_bytes(kinds[min(number, len(kinds) - 1)], nbytes)
            if not is_beside or 2 * computes > seconds:
                break
        self.timing.delay_compute(min(seconds, max(0.0, computes)))
        return seconds

    def _start_child(self, fiber: Fiber, op: Op) -> Any:
        coro, lane, name, priority, share = op.args
        group = op.group
        everyone = group is None or group == self.rank.replicas.within or len(group) == self.size
        self.met = self.met or (everyone and lane not in OFFLOAD_LANES)
        by = self.offload.update_settings() if lane in OFFLOAD_LANES else None
        if self._prices and (nbytes := self.body.cut.nbytes.get(name, 0)):
            child: ChildFiber = CodedChildFiber(self, coro, name, fiber.origin, priority, share, by, nbytes)
        else:
            child = ChildFiber(self, coro, name, fiber.origin, priority, share, by)
        handle = Handle(name, lane, child)
        if self.usage.listening and lane not in OFFLOAD_LANES:
            self.usage.note_last(handle)
        name = fiber.origin + lane if fiber.origin else lane
        (self.lanes.get(name) or self.open_lane(name)).queue_child(child)
        return handle

    def _await_child(self, fiber: Fiber, op: Op) -> Any:
        handle: Handle = op.args[0]
        if handle is self.usage.last and self.usage.step is not None:
            self.usage.note_last(None)
            return self.run_inner(fiber, self._wait_and_agree(handle))
        child: ChildFiber = handle._state
        if child.done:
            self.memory_account.buffers.note_end(child)
            return child.value
        if fiber.lane is not None and fiber.lane is child.lane:
            raise StrategyError(f"{fiber.name} waits for {child.name} on its own lane, which can never begin")
        if child.waiter is not None:
            raise StrategyError(f"{child.name} is waited for twice: a handle is waited for once")
        return child.park_waiter(fiber)

    async def _wait_and_agree(self, handle: Handle) -> Any:
        """After a backward's last exchange, the ranks agree on the used parameters."""
        value = await Op("wait", handle)
        await self.usage.agree_on_unused(self.parts)
        return value

    def _run_collective(self, fiber: Fiber, op: Op) -> Any:
        group = op.group
        if (self.size if group is None else len(group)) == 1:
            x = op.args[0]
            return x.unsqueeze(0) if op.verb == "all_gather" else x
        lane = fiber.lane
        if lane is None:
            name = str(op.args[-1] or op.verb)
            start = Op("start", _await_op(op), "comm", name, 0, 1.0, group=op.group)
            handle = self._start_child(fiber, start)
            return self._await_child(fiber, Op("wait", handle))
        if (by := all_reduce.choose_algorithm(self.parts.experiment.fabric, self.size, op)) is not None:
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
        return PARKED

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
        """Runs a step as a fiber, so that its answers skip the requesting fiber."""
        return self.run_inner(fiber, op.args[0])

    def run_inner(self, fiber: Fiber, coro: Coroutine[Op, Any, Any]) -> Any:
        """Answers with the result of `coro`, whose requests count as the fiber's."""
        inner = Fiber(self, coro, "step", fiber.origin, fiber, fiber.lane)
        fiber.park(inner)
        inner.resume(None)
        return PARKED

    def _make_fiber(self, coro: Coroutine[Op, Any, Any], origin: str, waiter: Waiter | None = None) -> Fiber:
        return Fiber(self, coro, "step", origin, waiter)

    def _stand_still(self, fiber: Fiber, op: Op) -> Any:
        self.clock.resume_at(self.clock.now + op.args[0], fiber, op.args[0])
        return PARKED

    def _gather_ranks(self, fiber: Fiber, op: Op) -> Any:
        what, mine, joint, seconds = op.args
        return self.world.gather_ranks(fiber, what, mine, joint, seconds, op.group)

    def _broadcast_value(self, fiber: Fiber, op: Op) -> Any:
        what, mine = op.args
        return self.world.broadcast_value(fiber, what, mine, op.group)

    def _park_fiber(self, fiber: Fiber, op: Op) -> Any:
        """Parks the fiber. op.args: (receiver of the fiber, reason)"""
        fiber.park(op.args[1])
        op.args[0](fiber)
        return PARKED


def _park_forever(fiber: Fiber, op: Op) -> Any:
    return PARKED


async def _await_op(op: Op) -> Any:
    return await op
