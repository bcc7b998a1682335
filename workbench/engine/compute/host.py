"""The engine's host: drives a strategy's coroutine on the wall clock, and records what happens.

[Note: The trampoline] A strategy is a coroutine that yields Ops. `drive_coroutine` sends each answer back in until the
step ends. While torch runs backward, autograd resumes the coroutine each time a bucket has filled. The coroutine runs
until it asks for the next bucket; then autograd goes on. So `async for bucket in rank.backward()` overlaps with
backward without a thread. Some Ops must not run inside autograd, such as an update or another forward. The host
performs them when backward has ended. A forward that is iterated resumes the coroutine from inside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from torch import Tensor

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lanes import Lanes
from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.forward_stops import VERBS_INSIDE, ForwardStops
from workbench.engine.compute.gradient_hooks import GradientHooks
from workbench.engine.compute.model import ModelPerformer
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.piecewise import PiecewiseCompute
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.engine.compute.request_timer import RequestTimer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.core.drive import CoroutineEnded, LeaveLoop, drive_coroutine
from workbench.host.memory.offload import OFFLOAD_LANES
from workbench.host.placement.optimizer_slots import copy_optimizer
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.rank import Bucket, Forward, Group, Handle, Op, StrategyError, message_name
from workbench.strategies.embedding_tables.engine import TablePerformer
from workbench.strategies.second_order.engine import CurvaturePerformer
from workbench.strategies.sub_models.engine import SubModelPerformer

_NOT_YET = {
    "forward_buckets": "begins a forward that stops before each bucket only in `step`, not inside of another pass: "
                       "await `rank.forward()` whole, or simulate",
}  # fmt: skip


class Host:
    """Drives the coroutines of one rank, and performs every verb.

    whole:  the performer of the model that this rank holds
    tables: the performer of embedding tables
    lanes:  run children
    met:    whether all ranks met in this step
    """

    def __init__(self, parts: ComputeParts, open_lane: Callable[[str], Lane], before_update: Callable[[], None],
                 check_background: Callable[[], None], check_peers: Callable[[], None]) -> None:  # fmt: skip
        """open_lane: makes one more lane
        before_update:    called before each update of the model
        check_background: raises the error of this rank's background
        check_peers:      raises if a peer has been gone for a while
        """
        self.parts, self.rank, self.lane, self.at, self.alone = parts, parts.rank, parts.lane, parts.at, parts.alone
        self.mailbox, self.pace, self.watch, self.usage = parts.mailbox, parts.pace, parts.watch, parts.usage
        self.check_background, self._check_peers = check_background, check_peers
        self._clock, self._record, self._unsharder = parts.watch.clock, parts.watch.record, parts.unsharder
        self.timing = PassTimer(parts.rank, parts.lane, parts.pace, parts.watch, parts.at)
        self.tensor = TensorPerformer(parts, self.timing, self.perform_op, self._perform_in_pass)
        self.hooks = GradientHooks(parts, self.timing, self.tensor, self.resume_strategy)
        self.pipeline = PipelinePerformer(parts, self.timing, self.tensor, self.hooks, self.perform_op)
        self.whole = ModelPerformer(parts, self.timing, self.tensor, self.pipeline, self.hooks, self._agree_on_usage,
                                    self._perform_in_pass, before_update)  # fmt: skip
        self._piecewise = PiecewiseCompute(parts, self.timing, self.tensor, self.pipeline, self.whole)
        self._sub_models = SubModelPerformer(self._piecewise)
        self._requests = RequestTimer(parts, self.timing, self.pipeline)
        self._second_order = CurvaturePerformer(self._requests, self.whole.curvature)
        self.tables = TablePerformer(parts, self.whole.draw_ahead, copy_optimizer)
        self.lanes = Lanes(parts.lane, open_lane)
        self.met = False
        self._stops = ForwardStops(parts, self.timing, self.perform_op)
        self._coro: Coroutine[Op, Any, Any] | None = None  # the step that a backward hands buckets to
        self._stash: Op | None = None  # its op that has to wait for the end of backward
        self._ended: CoroutineEnded | None = None
        self.verbs = self._list_verbs()

    def _list_verbs(self) -> dict[str, Callable[..., Any]]:
        whole, pipeline = self.whole, self.pipeline
        batches = self.parts.batches
        core: dict[str, Callable[..., Any]] = {
            "forward": whole.run_forward,
            "backward": whole.run_backward,
            "update": whole.update_model,
            "params": whole.list_params,
            "grads": whole.list_grads,
            "slots": whole.list_slots,
            "hold": whole.hold_bucket,
            "batch": whole.next_batch,
            "sample": whole.sample,
            "client": lambda index, count: batches.select_client(index, count),
            "start": self._start_child,
            "wait": self._await_child,
            "send": self._send_message,
            "recv": self._receive_message,
            "again": self._refuse_again,
            "stage_forward": pipeline.stage_forward,
            "stage_backward": pipeline.stage_backward,
            "stage_inputs": pipeline.stage_inputs,
            "stage_weights": pipeline.stage_weights,
            "coded": self.timing.run_codec,
            "drive": self.drive_coroutine,
            "stand": self._stand_still,
            "clock": self._clock.now,
            "do": lambda asked: asked(),  # may wait for peers: this rank holds no lock
        }
        return core | self.tables.verbs | self._second_order.verbs | self._sub_models.verbs

    def begin_step(self, met: bool) -> None:
        """met: whether all ranks meet in this step in any case"""
        self.met = met
        self.lanes.begin_step()
        self.at("step")

    def end_step(self) -> None:
        """Notes that the step is over, so that an update before the next one asks for no ticket."""
        self.met = False

    def _agree_on_usage(self) -> None:
        drive_coroutine(self.usage.agree_on_unused(self.parts), self.perform_op)

    def list_open(self) -> list[Tensor]:
        """Returns the losses and activations whose backward is still to come."""
        return [*self.whole.open_losses.values(), *self._piecewise.list_open(), *self.pipeline.list_open()]

    def drive_coroutine(self, coro: Coroutine[Op, Any, Any]) -> Any:
        """Runs a step to its end, and returns its result. See [Note: The trampoline]."""

        def perform(op: Op) -> Any:
            match op.verb:
                case "backward_buckets":
                    return self._backward_by_buckets(coro, op)
                case "forward_buckets":
                    return self._forward_by_buckets(coro, *op.args)
                case "next_params":
                    raise StopAsyncIteration
            return self.perform_op(op)

        return drive_coroutine(coro, perform, self.alone)

    @property
    def op(self) -> str:
        """The present operation; after a failure, the operation that failed."""
        return self.at.op

    def perform_op(self, op: Op) -> Any:
        around = self.at.now
        value = self._dispatch_op(op)
        self.at(*around[:2])
        return value

    def _dispatch_op(self, op: Op) -> Any:
        if op.verb in self.parts.away.verbs:
            return self.whole.move_values(op)
        do = self.verbs.get(op.verb)
        if do is not None:
            return do(*op.args) if op.group is None else do(*op.args, group=op.group)
        if op.verb in _NOT_YET:
            raise StrategyError(f"the engine {_NOT_YET[op.verb]}")
        return self._run_collective(op)

    def _backward_by_buckets(self, coro: Coroutine[Op, Any, Any], op: Op) -> Any:
        """Runs a backward that hands out buckets; then answers the op that waits for its end."""
        self._coro, self._stash, self._ended = coro, None, None
        grad, micro = op.args
        try:
            self.whole.run_backward(grad, micro, exchanged=True)
            self.hooks.hand_out_rest()
            self.usage.note_backward(self.rank.step)
            self.at("step")
        finally:
            self.hooks.end_exchange()
        self.hooks.learn_order()
        if self._ended is not None:
            raise self._ended
        stash, self._stash = self._stash, None
        if stash is None:
            raise StopAsyncIteration
        return self._backward_by_buckets(coro, stash) if stash.verb == "backward_buckets" else self.perform_op(stash)

    def _forward_by_buckets(self, coro: Coroutine[Op, Any, Any], forward: Forward) -> Any:
        """Runs a forward that stops before each bucket. The strategy goes on once all are handed out."""
        if self.pipeline.piece is not None or self.tensor.group is not None or self._unsharder.sharded:
            raise StrategyError("a forward stops before each bucket of a whole model: await `rank.forward()` here")
        with self._stops.stop_at_reads(coro):
            forward.loss = self.whole.run_forward(forward.x, forward.micro)
        self._stops.hand_out_rest()
        raise self._stops.ended or StopAsyncIteration

    def resume_strategy(self, bucket: Bucket) -> None:
        """Resumes the strategy with a full bucket, until it asks for the next one.

        Runs inside autograd, which has a thread of its own for a GPU. Chip and grad mode are set as on this rank's
        thread.
        """
        if self._stash is not None or self._ended is not None:
            return
        with self.lane.chip.use_stream():
            if self._unsharder.sharded:
                drive_coroutine(self._unsharder.note_filled(bucket.index), self._perform_in_pass, self.alone)
            self._resume_strategy(bucket)

    def _resume_strategy(self, bucket: Bucket) -> None:
        assert self._coro is not None
        try:
            self._ended = CoroutineEnded(drive_coroutine(self._coro, self._perform_inside, self.alone, bucket))
        except LeaveLoop:
            return

    def _perform_inside(self, op: Op) -> Any:
        """Performs an op that is possible inside autograd, and postpones any other."""
        if op.verb == "next_bucket":
            raise LeaveLoop
        if op.verb not in VERBS_INSIDE:
            self._stash = op
            raise LeaveLoop
        return self.perform_op(op)

    def _perform_in_pass(self, op: Op) -> Any:
        """Performs an op in the middle of a pass, such as those of `unshard` and `reshard`."""
        if op.verb not in VERBS_INSIDE:
            raise StrategyError(f"{op.verb} cannot be asked for while a model is computed: ask it in `step`")
        return self.perform_op(op)

    def take_part(self, spread: ReplicaSpread | None, seed: int) -> None:
        """Takes over this rank's part of the model. The order of its gradients must be learned again."""
        self.pipeline.take_part(spread, seed)
        self.usage.take_layout(self.parts.model, self.parts.layout, whole=spread is None)
        self.hooks.relearn_order()

    def _start_child(
        self,
        child: Coroutine[Op, Any, Any],
        lane: str,
        name: str,
        priority: int = 0,
        share: float = 1.0,
        group: Group | None = None,
    ) -> Handle:
        everybody = group is None and not self.rank.mesh.inside and len(self.rank.mesh.ranks) == self.rank.size
        if priority and (lane in OFFLOAD_LANES or not everybody):
            raise StrategyError("priority: all ranks, each with a whole replica, start the same children; take 0 here")
        everyone = group is None or group == self.rank.replicas.within or len(group) == self.rank.size
        self.met = self.met or (everyone and lane not in OFFLOAD_LANES)
        handle = self.lanes.start(child, name, lane, priority, share)
        if self.hooks.is_exchanging and lane not in OFFLOAD_LANES:
            self.usage.note_last(handle)
        return handle

    def _await_child(self, handle: Handle) -> Any:
        self.at(f"wait for {handle.name}", waits=True)
        began, asked = self._clock.now(), self.watch.now()
        value = self.lanes.wait(handle)
        waited, ended = self._clock.now() - began, self.watch.now()
        self.pace.exclude_wait(waited)
        self.watch.write_span(self.rank.step, "wait", handle.name, asked, asked, ended, 0)
        self.timing.note_wait(asked, ended, waited)
        if handle is self.usage.last and self.usage.step is not None:
            self._agree_on_usage()
        return value

    def _run_collective(self, op: Op) -> Any:
        async def child() -> Any:
            return await op

        return self._await_child(
            self._start_child(child(), self.lane.name, str(op.args[-1] or op.verb), group=op.group)
        )

    def _send_message(self, tensor: Tensor, to: int, kind: str = "") -> None:
        self.parts.memory_account.buffers.note_message(tensor)
        self.mailbox.send(tensor, to, kind, lane="measuring" if self._unsharder.phase == "evaluation" else "comm")

    def _receive_message(self, into: Tensor | None, source: int | None, kind: str) -> Any:
        name = message_name("recv", kind, **{"from": source})
        self.at(name, waits=True)
        began = self._clock.now()

        def over() -> bool:
            self.check_background()
            if self.pipeline.piece is not None:  # a peer that has sent no message has no connection that could close
                self._check_peers()
            return False

        got = self.mailbox.recv(into, source, kind, over)
        now = self._clock.now()
        if self._unsharder.phase != "evaluation":
            self._record.span(self.rank.step, "wait", name, began, began, now, 0)
        if into is None and got is not None:
            got = got[0].to(self.parts.layout.order[0].param.device), got[1]
        if source is None and got is not None:
            self._record.sample(self.rank.step, message_name("recv", kind), now, got[1])
        return got

    def _stand_still(self, seconds: float) -> float:
        """Stands still for `seconds`, or less if the run is hurried. Returns the seconds that it did."""
        began = self._clock.now()
        self.pace.paced_sleep.sleep_until(began + seconds)
        return self._clock.now() - began

    def _refuse_again(self, *_: Any, group: Group | None = None) -> int:
        raise StrategyError("`again` belongs in a background coroutine, not in `step`")
