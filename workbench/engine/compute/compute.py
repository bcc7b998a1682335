"""Performs forward, backward, update and passes over sharded parameters on the engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from workbench.engine.baselines.opaque import explaining
from workbench.engine.compute.hooks import GradientHooks
from workbench.engine.compute.stage import Stage
from workbench.engine.wire.watch import CODEC_FLOOR
from workbench.host.core.drive import drive
from workbench.host.observe.curvature import Curvature
from workbench.host.placement.canonical import clipped, optimizer_tensors
from workbench.host.placement.layout import Layout
from workbench.host.placement.slots import step_shard
from workbench.host.transfer.momentum import stilled
from workbench.host.transfer.tables import step_rows, taken
from workbench.rank import Bucket, Factors, Op, StrategyError

# ops that are possible inside torch, during a forward or a backward
INSIDE = {"all_reduce", "all_gather", "all_to_all", "all_to_allv", "broadcast", "reduce_scatter", "start", "wait",
          "sample", "params", "clock", "send", "recv", "hold", "offload", "fetch"}  # fmt: skip


def gone_back(loss: Tensor, grad: float | None) -> None:
    """Runs backward of a loss, scaled by `grad`."""
    loss.backward() if grad is None or grad == 1.0 else loss.backward(torch.full_like(loss, grad))


class Compute(Stage):
    """The part of a Host that computes."""

    alone: AbstractContextManager[Any]
    curvature: Curvature
    finite: Any = None  # its session's
    layout: Layout
    loss_of: Callable[..., Tensor]
    narrowing: Any  # its session's
    optimizer: Any
    ledger: Any = None  # its session's
    reading: Any = None  # its session's
    fully: Any = None  # the model that torch's fully_shard trains, if any
    away: Any = None  # its session's
    rollback: Any = None  # its session's
    _hooks: GradientHooks
    _open: dict[int, Tensor]  # losses without a backward so far, by micro-batch
    _perform: Callable[[Op], Any]
    _sample: Callable[[str, float], None]
    module: Callable[..., Any]  # the model, or torch's wrapper around it
    batches: Callable[[], Any]
    rows_of: Callable[[Any], dict[str, Tensor]]
    before_update: Callable[[], None]
    clip: Callable[[], float]  # the largest gradient norm; 0: any
    usage: Any
    strategy: Callable[[], Any]  # the strategy in force
    agree: Callable[[], None]
    steppable: Callable[[Bucket], None]  # raises if the bucket must not be stepped by itself
    shown: Callable[[Tensor], Tensor] = staticmethod(Tensor.detach)  # a loss as it is recorded
    go_back: Callable[[Tensor, Any], None] = staticmethod(gone_back)
    _looked: Any = None  # the batch of the next forward, if its rows were looked up
    _stretch: tuple[str, Any] | None = None  # the present pass, and since when it computes without a wait

    def _forward(self, x: Any, micro: int) -> Tensor | None:
        batch = self._batch() if x is None else x
        if self.piece is not None:  # backward takes it through the stages, both ways
            self._batches[micro] = batch
            return None
        self.meet_before(batch)
        self.begin_pass("forward")
        self.at("forward")
        self._stretch = "forward", self.watch.now()
        self.pace.begin("forward", self.rank.step, self._share * self.narrowing.share("forward"))
        with self.reading.passing("forward"), self.together.passing(None) if self.together else nullcontext():
            with explaining() if self.module is not self.model else nullcontext():
                loss = self.loss_of(self.module, batch)
            if self.reading.sharded:
                drive(self.reading.end_forward(), self._while_reading, self.alone)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError(f"the loss must be a scalar tensor with a gradient, not {_what(loss)}")
        self._open[micro] = loss
        self.losses.append(self.shown(loss))
        self.curvature.forward(batch)
        self.ledger.forward(batch)
        self._look_at_loss(batch)
        self.paced(1.0)
        self._computed()
        return self.losses[-1]

    def _look_at_loss(self, batch: Any) -> None:
        """Checks that the last loss is finite, unless the chip runs ahead: then it is known some steps later."""
        if not self.lane.chip.runs_ahead:
            self.finite.passed(self.losses[-1], batch)

    def _batch(self) -> Any:
        self.at("data iterator")
        looked, self._looked = self._looked, None
        return self.batches() if looked is None else looked

    def _backward(self, grad: Any, micro: int, exchanged: bool = False) -> None:
        """Computes a forward's gradients. If `exchanged`, they go into buckets, which are handed out as they fill."""
        if isinstance(grad, Tensor):
            raise StrategyError("a rank's backward begins with its loss, or its replica's: give a number, or nothing")
        self.layout.unused = set()
        self.usage.begin(self.rank.step)
        self.usage.require_trained(self.strategy())
        if self.fully is not None and (found := self.usage.found()):
            raise StrategyError(
                f"parameter {found[0]}: was unfrozen, and TorchFSDP has shared out what it "
                f"trains; unfreeze it before the run, or take ZeRO3"
            )
        if self.module is not self.model:  # torch exchanges this backward's gradients
            self.usage.step = self.rank.step
        if self.piece is not None:
            return self._through_stages(grad, micro, exchanged)
        self.narrowing.require_awaited(exchanged)
        if exchanged:
            self._listen()
        self.at("backward")
        loss = self._open.pop(micro, None)
        if loss is None:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        self.begin_pass("backward")
        self.curvature.backward(grad)
        self._stretch = "backward", self.watch.now()
        share = self._share * self.narrowing.share("backward")
        if self.fully is not None:
            self.fully.begin()
        self.pace.begin("backward", self.rank.step, share, self.again("backward"))
        with self.ledger.backward(self._hooks.listening), self.reading.passing("backward"):
            with explaining() if self.module is not self.model else nullcontext():
                self.go_back(loss, grad)
        if self.fully is not None:
            self.fully.passed()
        if self.reading.sharded:
            drive(self.reading.close(), self._while_reading, self.alone)
        self.paced(1.0)
        self._computed()

    def _computed(self) -> None:
        """Ends the present pass."""
        assert self._stretch is not None
        name, since = self._stretch
        self.watch.span(self.rank.step, name, since)
        self._stretch = None

    @contextmanager
    def within(self, name: str) -> Iterator[None]:
        """Runs a pass of that name in the middle of the present pass, as a span of its own."""
        around = self._stretch
        if around is not None:
            self._computed()
        since = self.watch.now()
        yield
        self.watch.span(self.rank.step, name, since)
        if around is not None:
            self._stretch = around[0], self.watch.now()

    @property
    def computing(self) -> bool:
        """Whether a pass of the model is under way."""
        return self._stretch is not None

    def stood(self, asked: Any, ended: Any, seconds: float) -> None:
        """Notes that a pass has waited: its compute before the wait becomes a span, as on a virtual clock."""
        if self._stretch is not None and (self.lane.chip.runs_ahead or seconds > CODEC_FLOOR):
            name, since = self._stretch
            self.watch.write(self.rank.step, "compute", name, since, since, asked, 0)
            self._stretch = name, ended

    def read(self, buckets: Iterable[int], beside: Iterable[int], share: float) -> None:
        """Makes these sharded buckets whole before a pass reads them.

        beside: whole buckets that the same call reads; share: the part of the pass that is computed by then
        Runs inside torch; for a GPU's backward, on autograd's thread.
        """
        with self.lane.chip.inside(), torch.inference_mode(False), torch.no_grad(), self.ledger.aside():
            around = self.at.now
            if self.reading.phase != "evaluation":
                self.paced(share)
            drive(self.reading.need(buckets, beside), self._while_reading, self.alone)
            self.at(*around[:2])

    def _while_reading(self, op: Op) -> Any:
        """Performs the ops of `unshard` and `reshard`."""
        if op.verb not in INSIDE:
            raise StrategyError(f"{op.verb} cannot be asked for while a model is computed: ask it in `step`")
        return self._perform(op)

    def _hold(self, bucket: Bucket) -> Bucket:
        self.reading.require_sharded()
        held = self.layout.hold(bucket)
        self.ledger.hold(self.layout.held)
        return held

    def _moved(self, op: Op) -> Any:
        """Performs a transfer to or from the place where a strategy keeps values off the device."""
        self.at(op.verb, waits=True)
        began, asked = self.clock.now(), self.watch.now()
        value = self.away.perform(op, self.rank.step, None)
        waited, ended = self.clock.now() - began, self.watch.now()
        self.pace.put_off(waited)
        self.stood(asked, ended, waited)
        return value

    def _update(self, bucket: Bucket | None, by: Callable[[], None] | None, on: str) -> None:
        if self.usage.step is not None:
            self.agree()
        self.before_update()
        self.at("update")
        self.stale = True
        self.flow.versions.keep()
        if on == "host":
            return self._moved(Op("update", bucket, by, on))
        began, since = self.watch.now(), self.clock.now()
        with self.pace.within() if self.computing else nullcontext():
            if bucket is None:
                self.pace.begin("update", self.rank.step, self._share * self.narrowing.share("update"))
                self.rollback.updates()
                self._update_all(by)
            else:
                self.pace.begin("update", self.rank.step, bucket.data.numel() / self.layout.numel)
                self.steppable(bucket)
                with self.alone:
                    step_shard(self.layout, self.optimizer, bucket)
            self.paced(1.0)
        self.watch.span(self.rank.step, "update", began)
        self.stood(began, self.watch.now(), self.clock.now() - since)

    def _update_all(self, by: Callable[[], None] | None) -> None:
        if self.narrowing.narrow:
            with self.alone:
                norm = self.narrowing.step(self.clip(), by)
            self.ledger.part(self.narrowing.trained, self.narrowing.state)
            return self._sample("grad_norm", norm) if norm is not None else None
        self.layout.drop_unused() if self.fully is None else self.fully.drop_unused()
        if self.strategy().periodic and not self.usage.settled:
            self.layout.drop_frozen()
        if longest := self.clip():
            of_replica = self._of_replica if self.rank.mesh.inside else float
            norm = self.fully.shorten(longest) if self.fully else clipped(self.layout, longest, of_replica)
            self._sample("grad_norm", norm)
        with self.alone:
            (by or self.optimizer.step)()
            stilled(self.layout, self.optimizer, self.rank.memory)
        self.optimizer.zero_grad(set_to_none=True)
        self.layout.let_go()
        self.curvature.stepped()

    def _factors(self) -> list[Factors]:
        self.at("factors")
        began = self.watch.now()
        found = self.curvature.factors()
        self.watch.span(self.rank.step, "factors", began)
        return found

    def _look_up(self) -> dict[str, Tensor]:
        batch = self._looked = self._batch()
        return self.rows_of(batch)

    def _row_grads(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return taken(self.layout, rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> None:
        with self.alone:
            step_rows(self.layout, self.optimizer, table, rows, grad, lr)

    def _curve(self, vector: list[Tensor]) -> list[Tensor]:
        """Returns a curvature product. With a pace, it lasts as long as a forward and a backward."""
        self.at("curve")
        began = self.watch.now()
        self.pace.begin("forward", self.rank.step, self._share)
        self.paced(1.0)
        self.pace.begin("backward", self.rank.step, self._share)
        product = self.curvature.product(vector, self.rank.step)
        self.paced(1.0)
        self.watch.span(self.rank.step, "curve", began)
        return product

    def _value(self) -> Tensor:
        self.at("value")
        began = self.watch.now()
        self.pace.begin("forward", self.rank.step, self._share)
        value = self.curvature.value(self.rank.step)
        self.paced(1.0)
        self.watch.span(self.rank.step, "value", began)
        return value

    def _work(self, of: Callable[[], Any], flops: float, name: str) -> Any:
        """Runs a strategy's own arithmetic, in its step."""
        self.at(name)
        began = self.watch.now()
        value = of()
        self.watch.span(self.rank.step, name, began)
        self._sample(f"flops {name}", flops)
        return value

    def _params(self) -> list[Bucket]:
        self.stale = True
        self.flow.versions.keep()
        return self.layout.params()

    def _grads(self) -> list[Bucket]:
        self.narrowing.require_awaited(True)
        return self.layout.grads()

    def _slots(self) -> list[Tensor]:
        return optimizer_tensors(self.layout, self.optimizer)


def _what(loss: Any) -> str:
    if isinstance(loss, Tensor):
        return f"a tensor of shape {tuple(loss.shape)}" + ("" if loss.requires_grad else " without gradient")
    return f"a {type(loss).__name__}"
