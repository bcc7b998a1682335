"""Real tensors: what one virtual rank computes with, in one process with all the others."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.experiment import Experiment
from workbench.experiment.partitioned import dealt
from workbench.host.memory.batches import Batches
from workbench.host.memory.offload import Offloaded
from workbench.host.observe.curvature import Curvature
from workbench.host.passes.checkpointing import received_twice
from workbench.host.passes.waves import Waves
from workbench.host.placement.canonical import clipped
from workbench.host.placement.layout import Layout, Place
from workbench.host.placement.slots import step_shard
from workbench.host.transfer.tables import read, step_rows, taken
from workbench.optimizers import built
from workbench.rank import Bucket, Factors, StrategyError
from workbench.sim.model.anew import TensorsAnew
from workbench.sim.model.outline import Cut, ready
from workbench.sim.model.portion import Portion
from workbench.tasks import Learner


class Tensors(TensorsAnew, Portion):
    """One rank's model, data and optimizer, seeded as on the engine."""

    shards: Any = None  # what Sizes are told, and these show
    gradient_shards = 1

    def __init__(self, experiment: Experiment, learner: Learner, rank: int) -> None:
        super().__init__()
        torch.manual_seed(experiment.seed)
        random.seed(experiment.seed)
        self.learner = learner
        self.model = learner.model().train()
        self.layout = Layout(self.model, experiment.bucket_mb)
        self.layout.keeps_values = True  # a whole pass is computed at once, and what is gathered comes bit by bit
        self.curvature = Curvature(self.model, learner.loss, self.layout)
        self.optimizer = self.made(experiment)
        self.away = Offloaded()
        self.batches = Batches(learner.data, rank, experiment.ranks, "cpu", learner.indexed)
        self.batches.share(*dealt(experiment, rank))
        self.restart_data(experiment.batch, experiment.seed, 0)
        torch.manual_seed(experiment.seed * 100_003 + rank + 1)
        self._random_state = torch.get_rng_state()
        self.losses: list[float] = []
        self.ledger: Any = None  # its session's
        self.reading: Any = None  # its session's
        self.finite: Any = None  # its session's
        self._open: dict[tuple[str, int], Tensor] = {}  # losses whose backward is to come, by worker and micro-batch
        self._worker = ""
        self._looked: dict[str, Any] = {}  # by worker, the batch of its next forward, whose rows were looked up
        self._waves: Waves | None = None
        self._grads: dict[str, list[Tensor | None]] = {}  # the gradients of the workers whose turn it is not
        self._arrival: list[str] | None = None
        self._learned = False
        self.usage: Any = None  # its host's
        self.strategy_now: Callable[[], Any] = lambda: None  # the one that is in force
        self.step_now: Callable[[], int] = lambda: 0  # this rank's step
        self.stepped: Callable[[], None] = lambda: None  # follows each step of the optimizer, before gradients are gone
        self._cut()

    def made(self, experiment: Experiment, params: list[Any] | None = None) -> Any:
        """The optimizer that `experiment` wants, for the parameters that lie here or for these."""
        if params is None:
            here = {id(place.param) for place in self.layout.order}  # a frozen one may be unfrozen later
            params = [p for p in self.model.parameters() if id(p) in here or not p.requires_grad]
        return built(experiment.optimizer, self.learner.optimizer, params, experiment.lr)

    def use(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def like(self, other: Tensors) -> None:
        """Takes over the parameters and buffers of `other`: random starts may differ from process to process."""
        mine, its = self.model.state_dict(), other.model.state_dict()
        for name, x in mine.items():
            x.copy_(its[name])

    def _cut(self) -> None:
        self.cut = Cut(self.layout, self._arrival or [p.name for p in self.layout.order])

    def rebucket(self, bucket_mb: float) -> None:
        self.layout.rebucket(bucket_mb)
        self._cut()

    def lie_with(self, other: Tensors) -> None:
        """From now on the parameters are the very ones of `other`."""
        if other is not self:
            self.layout.lie_in(other.layout.weights)
            self._cut()

    def lie_alone(self) -> None:
        """The parameters are this rank's own again."""
        self.layout.lie_in([w.clone() for w in self.layout.weights])
        self._cut()

    @property
    def to_learn(self) -> bool:
        """Has a backward shown in which order gradients appear, for the first time?"""
        return self._arrival is not None and not self._learned

    def learned(self) -> list[str]:
        """The order in which gradients appeared; asked for once."""
        assert self._arrival is not None
        self._learned = True
        return self._arrival

    def learn(self, names: list[str]) -> None:
        """Lays parameters out in the order of gradients; the buckets may differ from now on."""
        self.layout.reorder(names)
        self._cut()

    def deal(self, rank: int, size: int, seed: int | None) -> None:
        """Reads from the next restart on the data of `rank` of `size`; see `Batches.share`."""
        self.batches.share(rank, size, seed)

    def restart_data(self, batch: int, seed: int, step: int, used: int = 0) -> None:
        self.batches.restart(batch, seed, step, used)

    def batch(self) -> Any:
        return self.batches.next()

    @property
    def taken(self) -> int:
        return self.batches.taken

    def look_up(self) -> dict[str, Tensor]:
        batch = self._looked[self._worker] = self.batches.next()
        return read(self.learner, batch, self.layout)

    def row_grads(self, rows: dict[str, Tensor]) -> dict[str, Tensor]:
        return taken(self.layout, rows)

    def update_rows(self, table: str, rows: Tensor, grad: Tensor, lr: float) -> None:
        step_rows(self.layout, self.optimizer, table, rows, grad, lr)

    def client(self, index: int, count: int) -> None:
        self.batches.client(index, count)

    def forward(self, x: Any, micro: int) -> Tensor:
        with self._own_randomness(), torch.enable_grad():
            looked = self._looked.pop(self._worker, None) if x is None else x
            inputs = self.batches.next() if looked is None else looked
            with self.reading.passing("forward"), self.going_through(None):
                loss = self.learner.loss(self.model, inputs)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise TypeError("the loss must be a scalar tensor with a gradient")
        self._open[self._worker, micro] = loss
        self.losses.append(float(loss.detach()))
        self.curvature.forward(inputs)
        self.ledger.forward(inputs)
        self._look_at_loss(loss, inputs)
        return loss.detach()

    def rise(self, waves: Waves, micro: int, piece: int, of: int, falls: bool) -> Tensor | None:
        """A batch through a piece of the model; through the last one, its loss."""
        self._waves = waves
        with self._own_randomness(), torch.enable_grad():
            batch, loss = waves.rise(self.batches.next, micro, piece, of, falls)
        if loss is not None:
            self.losses.append(float(loss.detach()))
            if not falls:
                self._open[self._worker, micro] = loss
            self._look_at_loss(loss, batch)
        self.ledger.forward(batch)
        return None if loss is None else loss.detach()

    def _look_at_loss(self, loss: Tensor, batch: Any) -> None:
        with self._own_randomness():
            self.finite.passed(loss.detach(), batch)

    def opened(self) -> Iterable[Tensor]:
        """What backward is still to be asked of."""
        risen = self._waves.opened() if self._waves else ()
        return [*risen, *self._open.values(), *(self.piece.opened.values() if self.piece else ())]

    def turn(self, worker: str) -> None:
        """What comes now is `worker`'s: parameters are common to all workers of a rank, gradients are not."""
        if worker != self._worker:
            params = [place.param for place in self.layout.order]
            self._grads[self._worker] = [p.grad for p in params]
            for p, grad in zip(params, self._grads.pop(worker, [None] * len(params)), strict=True):
                p.grad = grad
            self._worker = worker

    def backward(self, grad: Any, micro: int, exchanged: bool) -> None:
        """Gradients of a forward; if they are `exchanged` they go into the buckets."""
        if isinstance(grad, Tensor):
            raise StrategyError("a rank's backward begins with its loss, or its replica's: give a number, or nothing")
        loss = self._open.pop((self._worker, micro), None)
        if loss is None:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        if exchanged and self._worker:
            raise StrategyError("several workers have one set of buckets: await rank.backward() whole, or real=False")
        self.curvature.backward(grad)
        self._gathered(partial(_run, loss, grad), exchanged)

    def _gathered(
        self, run: Callable[[], None], exchanged: bool, first: bool = False, there: Collection[str] = ()
    ) -> None:
        """Runs a backward. there: whose gradients came in others before"""
        self.layout.unused = set()
        self.usage.begin(self.step_now())
        self.usage.require_trained(self.strategy_now())
        if exchanged:
            self.layout.make_room()
        with self.ledger.backward(exchanged), self._own_randomness(), torch.enable_grad():
            with self.reading.passing("backward"):
                if exchanged:
                    names = self._watched(run)
                    if self._arrival is None:
                        self._arrival = [*there, *(name for name in names if name not in there)]
                        self.cut.ready = ready(self.layout, self._arrival)
                    self._note_unused()
                elif self.piece is not None:  # one of several backwards whose gradients add up
                    self._heard(run)
                else:
                    run()
            if first:
                self.layout.take_in()
            elif exchanged:
                self.grads()

    def _note_unused(self) -> None:
        """Notes the parameters that no backward of this step has used, and raises a hand if there are any."""
        self.layout.unused = {place.name for place in self.layout.order if place.param.grad is None or place.filled}
        if self.layout.unused:
            self.usage.raise_hand(self.step_now())

    def _watched(self, run: Callable[[], None]) -> list[str]:
        """Runs backward and returns in which order gradients appeared; those that did not come last.

        Raises StrategyError if one gradient came twice, as real ranks do.
        """
        names = self._heard(run)
        if len(set(names)) < len(names):
            raise received_twice(next(name for name in names if names.count(name) > 1))
        return names + [p.name for p in self.layout.order if p.name not in set(names)]

    def _heard(self, run: Callable[[], None]) -> list[str]:
        """Runs backward and returns the names of the parameters that it used, in the order of their gradients."""
        names: list[str] = []

        def hear(_: Tensor, place: Place) -> None:
            names.append(place.name)
            place.filled = False

        hooks = [
            place.param.register_post_accumulate_grad_hook(partial(hear, place=place))
            for place in self.layout.order if place.param.requires_grad
        ]
        try:
            run()
        finally:
            for hook in hooks:
                hook.remove()
        return names

    def clear(self) -> None:
        """No bucket keeps room for gradients."""
        self.layout.clear()

    def full(self, index: int) -> Bucket:
        return self.layout.full(index)

    def squares(self) -> float:
        """The sum of the squares of all gradients here."""
        return clipped(self.layout, math.inf) ** 2

    def update(self, bucket: Bucket | None, longest: float, by: Callable[[], None] | None,
               squares: float | None = None) -> float | None:  # fmt: skip
        """One step of the optimizer; the norm of the gradient if it was not to be above `longest`.

        squares: of a whole replica's gradients, where this is a stage of one
        """
        if bucket is None:
            of_replica = float if squares is None else lambda own: squares
            norm = clipped(self.layout, longest, of_replica) if longest else None
            with self._unnoticed():
                (by or self.optimizer.step)()
            self.stepped()
            self.optimizer.zero_grad(set_to_none=True)
            self.layout.let_go()
            self.curvature.stepped()
            return norm
        step_shard(self.layout, self.optimizer, bucket)
        return None

    def stepped_apart(self) -> None:
        """Some of what lies apart from the model was stepped."""

    def grads(self) -> list[Bucket]:
        if self._worker:
            raise StrategyError("several workers have one set of buckets: await rank.backward() whole, or real=False")
        return self.layout.grads()

    def collect(self) -> None:
        self.curvature.collect()

    def factors(self) -> list[Factors]:
        return self.curvature.factors()

    def curve(self, vector: list[Tensor], step: int) -> list[Tensor]:
        return self.curvature.product(vector, step)

    def value(self, step: int) -> Tensor:
        return self.curvature.value(step)

    def params(self) -> list[Bucket]:
        return self.layout.params()

    def _unnoticed(self) -> Any:
        """A worker's update may fall between another's forward and backward, as without locks it does."""
        params = tuple(place.param for place in self.layout.order)
        return torch.autograd._unsafe_preserve_version_counter(params) if self._worker else nullcontext()

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        """torch's random numbers belong to the whole process; inside they are this rank's."""
        torch.set_rng_state(self._random_state)
        yield
        self._random_state = torch.get_rng_state()


def _run(loss: Tensor, grad: float | None) -> None:
    loss.backward() if grad is None or grad == 1.0 else loss.backward(torch.full_like(loss, grad))
