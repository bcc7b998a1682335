"""The engine's host: drives a strategy's coroutine on the wall clock, and records what happens.

[Note: The trampoline] A strategy is a coroutine that yields Ops. `drive` sends each answer back in until the step ends.
One thing is unusual: while torch runs backward, autograd resumes the coroutine each time a bucket has filled. The
coroutine runs until it asks for the next bucket; then autograd goes on. So `async for bucket in rank.backward()`
overlaps with backward without a thread, and reads top to bottom. Some Ops must not run inside autograd, such as an
update or another forward. The host performs them when backward has ended. A forward that is iterated resumes the
coroutine in the same way, from inside the model.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from torch import Tensor, nn

from workbench.engine.compute.at import At
from workbench.engine.compute.compute import INSIDE
from workbench.engine.compute.hooks import GradientHooks
from workbench.engine.compute.stops import Stops
from workbench.engine.compute.waving import Waving
from workbench.engine.p2p.mailbox import Mailbox
from workbench.engine.wire.lane import Lane
from workbench.engine.wire.lanes import Lanes
from workbench.engine.wire.shaping import Pace
from workbench.engine.wire.watch import Watch
from workbench.host.core.drive import Ended, Later, drive
from workbench.host.memory.offload import LANES
from workbench.host.observe.curvature import Curvature
from workbench.host.passes.flow import Flow
from workbench.host.placement.layout import Layout
from workbench.host.placement.spread import Spread
from workbench.host.sharding.usage import Usage
from workbench.partitions import Whole
from workbench.rank import Bucket, Forward, Group, Handle, Op, Rank, StrategyError, message_name

Span = Callable[..., None]
_NOT_YET = {
    "forward_buckets": "begins a forward that stops before each bucket only in `step`, not inside of another pass: "
                       "await `rank.forward()` whole, or simulate",
}  # fmt: skip


class Host(Waving):
    """One rank's model, optimizer, layout and lane; performs every verb."""

    def __init__(self, rank: Rank, model: nn.Module, loss: Callable[..., Tensor], optimizer: Any, layout: Layout,
                 lane: Lane, mailbox: Mailbox, pace: Pace, watch: Watch) -> None:
        self.rank, self.model, self.loss_of, self.optimizer = rank, model, loss, optimizer
        self.layout, self.lane, self.mailbox, self.pace, self.watch = layout, lane, mailbox, pace, watch
        self.lanes = Lanes(lane, lambda name: lane)
        self.alone = threading.Lock()  # held while a coroutine of this rank or the optimizer runs
        self.clock, self.record = watch.clock, watch.record
        self.module = model
        self.batches = self.before_update = lambda: None
        self.rows_of: Callable[[Any], dict[str, Tensor]] = lambda batch: {}  # which rows of tables a batch reads
        self.client: Callable[[int, int], None] = lambda index, count: None  # selects whose batches come next
        self.clip = lambda: 0.0
        self.steppable = lambda bucket: None
        self.still_well: Callable[[], None] = lambda: None  # raises the error of this rank's background
        self.follow: Callable[[], None] = lambda: None  # raises if a peer has been gone for a while
        self.met = False  # whether all ranks met in this step
        self.at = At()
        self.losses: list[Tensor] = []
        self._open, self._batches = {}, {}
        self.coming: Callable[[int], Any] = lambda after: None  # the batch to come after so many
        self.flow = Flow(lambda: self.layout, lambda after: self.coming(after), self._buffers, self._forget)
        self.partition = Whole
        self._order: list[str] | None = []  # the order in which gradients appear, until it is learned
        self._hooks, self._stops = GradientHooks(self), Stops(self, self._perform)
        self.use(Usage())
        self.curvature = Curvature(model, loss, layout)
        self._begun = False  # whether backward has emitted a first bucket
        self._coro: Coroutine[Op, Any, Any] | None = None
        self._stash: Op | None = None
        self._ended: Ended | None = None
        self._did: dict[str, Callable[..., Any]] = {
            "forward": self._forward, "backward": self._backward, "update": self._update, "params": self._params,
            "start": self._start, "wait": self._wait, "sample": self._sample, "again": self._again,
            "stage_forward": self._stage_forward, "stage_backward": self._stage_backward,
            "stage_inputs": self._stage_inputs, "stage_weights": self._stage_weights,
            "coded": self._coded, "pieces": self._pieces, "rise": self._rise, "fall": self._fall,
            "units": lambda: self.narrowing.units, "narrow": self._narrow,
            "hold": self._hold, "batch": self._batch, "grads": self._grads, "clock": self.clock.now, "send": self._send,
            "client": lambda index, count: self.client(index, count),
            "look_up": self._look_up, "row_grads": self._row_grads, "update_rows": self.update_rows,
            "collect": self.curvature.collect, "factors": self._factors, "curve": self._curve,
            "value": self._value, "work": self._work, "recv": self._recv, "slots": self._slots,
            "drive": self.drive, "stand": self._stand,
            "do": lambda asked: asked(),  # may wait for peers: this rank holds no lock
        }

    def use(self, usage: Usage) -> None:
        """Replaces the object that notes which parameters steps use."""
        self.usage = usage
        usage.lie(self.model, self.layout)

    def agree(self) -> None:
        """Makes the ranks agree on the parameters that the last backward used."""
        drive(self.usage.agree(self), self._perform)

    def opened(self) -> list[Tensor]:
        """Returns the losses and activations whose backward is still to come."""
        risen = self.waves.opened() if self.waves else ()
        return [*self._open.values(), *risen, *(self.piece.opened.values() if self.piece is not None else ())]

    def _buffers(self) -> list[Tensor]:
        return self.piece.buffers() if self.piece is not None else []

    def _forget(self, micros: list[int]) -> None:
        if self.piece is not None:
            self.piece.forget(micros)

    def _listen(self, there: Sequence[Any] = ()) -> None:
        """Exchanges the next backward; the gradients of the parameters `there` exist already."""
        self._hooks.open(learn=self._order is not None)
        if there:
            self._hooks.have({id(param) for param in there})

    def drive(self, coro: Coroutine[Op, Any, Any]) -> Any:
        """Runs a step to its end, and returns its result. See [Note: The trampoline]."""

        def perform(op: Op) -> Any:
            match op.verb:
                case "backward_buckets":
                    return self._backward_out(coro, op)
                case "forward_buckets":
                    return self._forward_out(coro, *op.args)
                case "next_params":
                    raise StopAsyncIteration
            return self._perform(op)

        return drive(coro, perform, self.alone)

    @property
    def op(self) -> str:
        """The present operation; after a failure, the operation that failed."""
        return self.at.op

    def perform(self, op: Op) -> Any:
        """Performs an op of the host itself."""
        return self._perform(op)

    def _perform(self, op: Op) -> Any:
        around = self.at.now
        value = self._do(op)
        self.at(*around[:2])
        return value

    def _do(self, op: Op) -> Any:
        if op.verb in ("offload", "fetch"):
            return self._moved(op)
        do = self._did.get(op.verb)
        if do is not None:
            return do(*op.args) if op.group is None else do(*op.args, group=op.group)
        if op.verb in _NOT_YET:
            raise StrategyError(f"the engine {_NOT_YET[op.verb]}")
        return self._collective(op)

    def _backward_out(self, coro: Coroutine[Op, Any, Any], op: Op) -> Any:
        """Runs a backward that hands out buckets; then answers the op that waits for its end."""
        self._coro, self._stash, self._ended = coro, None, None
        grad, micro = op.args
        try:
            self._backward(grad, micro, exchanged=True)
            self._hooks.flush()
            self.usage.step = self.rank.step
            self.at("step")
        finally:
            self._hooks.shut()
        self._learn_order()
        if self._ended is not None:
            raise self._ended
        stash, self._stash = self._stash, None
        if stash is None:
            raise StopAsyncIteration
        return self._backward_out(coro, stash) if stash.verb == "backward_buckets" else self._perform(stash)

    def _forward_out(self, coro: Coroutine[Op, Any, Any], forward: Forward) -> Any:
        """Runs a forward that stops before each bucket. The strategy goes on once all are handed out."""
        if self.piece is not None or self.together is not None or self.reading.sharded:
            raise StrategyError("a forward stops before each bucket of a whole model: await `rank.forward()` here")
        with self._stops.watching(coro):
            forward.loss = self._forward(forward.x, forward.micro)
        self._stops.rest()
        raise self._stops.ended or StopAsyncIteration

    def hand_out(self, bucket: Bucket) -> None:
        """Resumes the strategy with a full bucket, until it asks for the next one.

        Runs inside autograd, which has a thread of its own for a GPU. Chip and grad mode are set as on this rank's
        thread.
        """
        if self._stash is not None or self._ended is not None:
            return
        with self.lane.chip.inside():
            if self.reading.sharded:
                drive(self.reading.filled(bucket.index), self._while_reading, self.alone)
            self._hand_out(bucket)

    def _hand_out(self, bucket: Bucket) -> None:
        assert self._coro is not None
        try:
            self._ended = Ended(drive(self._coro, self._inside, self.alone, bucket))
        except Later:
            return

    def _inside(self, op: Op) -> Any:
        """Performs an op that is possible inside autograd, and postpones any other."""
        if op.verb == "next_bucket":
            raise Later
        if op.verb not in INSIDE:
            self._stash = op
            raise Later
        return self._perform(op)

    def lie(self, spread: Spread | None, seed: int) -> None:
        """Takes over this rank's part of the model; the order of its gradients must be learned again."""
        super().lie(spread, seed)
        self.usage.lie(self.model, self.layout, whole=spread is None)
        self._order = []

    def _learn_order(self) -> None:
        if self._order is not None:  # a rank that used no parameter keeps its layout's order
            self._order = self._hooks.arrived or [place.name for place in self.layout.order]

    @property
    def exchanging(self) -> bool:
        """Whether a backward with exchange is under way."""
        return self._hooks.listening

    @property
    def knows_order(self) -> bool:
        """Whether the first exchanged backward has ended, and `learned_order` has not been called."""
        return bool(self._order)

    def learned_order(self) -> list[str]:
        """Returns the order in which gradients appeared in the first exchanged backward. Can be called once."""
        assert self._order
        names, self._order = self._order, None
        missing = [p.name for p in self.layout.order if p.name not in set(names)]
        return names + missing

    def forget_hooks(self) -> None:
        """Takes the hooks off the gradients, until a strategy asks for buckets again."""
        self._hooks.detach()

    def _start(self, child: Coroutine[Op, Any, Any], lane: str, name: str, priority: int = 0, share: float = 1.0,
               group: Group | None = None) -> Handle:
        everybody = group is None and not self.rank.mesh.inside and len(self.rank.mesh.ranks) == self.rank.size
        if priority and (lane in LANES or not everybody):
            raise StrategyError("priority: all ranks, each with a whole replica, start the same children; take 0 here")
        everyone = group is None or group == self.rank.replicas.within or len(group) == self.rank.size
        self.met = self.met or (everyone and lane not in LANES)
        handle = self.lanes.start(child, name, lane, priority, share)
        if self._hooks.listening and lane not in LANES:
            self.usage.last = handle
        return handle

    def _wait(self, handle: Handle) -> Any:
        self.at(f"wait for {handle.name}", waits=True)
        began, asked = self.clock.now(), self.watch.now()
        value = self.lanes.wait(handle)
        waited, ended = self.clock.now() - began, self.watch.now()
        self.pace.put_off(waited)
        self.watch.write(self.rank.step, "wait", handle.name, asked, asked, ended, 0)
        self.stood(asked, ended, waited)
        if handle is self.usage.last and self.usage.step is not None:
            self.agree()
        return value

    def _collective(self, op: Op) -> Any:
        async def child() -> Any:
            return await op

        return self._wait(self._start(child(), self.lane.name, str(op.args[-1] or op.verb), group=op.group))

    def _send(self, tensor: Tensor, to: int, kind: str = "") -> None:
        self.ledger.buffers.post(tensor)
        self.mailbox.send(tensor, to, kind, lane="measuring" if self.reading.phase == "evaluation" else "comm")

    def _recv(self, into: Tensor | None, source: int | None, kind: str) -> Any:
        name = message_name("recv", kind, **{"from": source})
        self.at(name, waits=True)
        began = self.clock.now()

        def over() -> bool:
            self.still_well()
            if self.piece is not None:  # a peer that has sent no message has no connection that could close
                self.follow()
            return False

        got = self.mailbox.recv(into, source, kind, over)
        now = self.clock.now()
        if self.reading.phase != "evaluation":
            self.record.span(self.rank.step, "wait", name, began, began, now, 0)
        if into is None and got is not None:
            got = got[0].to(self._device), got[1]
        if source is None and got is not None:
            self.record.sample(self.rank.step, message_name("recv", kind), now, got[1])
        return got

    def _sample(self, name: str, value: float) -> None:
        self.record.sample(self.rank.step, name, self.clock.now(), float(value))

    def _stand(self, seconds: float) -> float:
        """Stands still for `seconds`, or less if the run is hurried. Returns the seconds that it did."""
        began = self.clock.now()
        self.pace.naps.until(began + seconds)
        return self.clock.now() - began

    def _again(self, *_: Any, group: Group | None = None) -> int:
        raise StrategyError("`again` belongs in a background coroutine, not in `step`")
