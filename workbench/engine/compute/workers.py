"""Runs several steps of one rank at once: each worker is a thread with a copy of the model.

A copy has its own gradients. Its parameters and buffers are the rank's, read and written without locks while other
workers compute. There is one optimizer, so workers update one at a time. A worker cannot use collectives or buckets of
gradients, because those belong to the rank.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from workbench.engine.wire.shaping import Pace
from workbench.host.core.drive import drive
from workbench.host.transfer.tables import taken_of
from workbench.rank import Op, Rank, StrategyError, message_name

if TYPE_CHECKING:
    from workbench.engine.rank.setup import Parts


class Twin:
    """One of a rank's workers. number: from 0; batches: draws the rank's next batch, for one worker at a time"""

    def __init__(self, run: Parts, number: int, batches: Callable[[], Any]) -> None:
        self.run, self.number, self._batches = run, number, batches
        self.model = copy.deepcopy(run.model)
        self.params = dict(self.model.named_parameters())
        self.pace = Pace(run.rank.id, run.naps)
        self.error: BaseException | None = None
        self._looked: Any = None  # the batch of the next forward, if its rows were looked up
        self._loss: Tensor | None = None
        self._did: dict[str, Callable[..., Any]] = {
            "batch": batches, "look_up": self._look_up, "forward": self._forward, "backward": self._backward,
            "row_grads": partial(taken_of, self.params), "update": self._update, "params": run.layout.params,
            "send": run.host.mailbox.send, "recv": self._recv, "clock": run.clock.now, "sample": self._sample,
        }  # fmt: skip

    def step(self, coro: Coroutine[Op, Any, Any]) -> None:
        """Runs a step to its end. Keeps its error for `Workers.step`."""
        try:
            self.run.chip.bind()
            self._tie()
            drive(coro, self._perform, self.run.host.alone)
        except BaseException as error:
            self.error = error

    def _tie(self) -> None:
        """Makes the copy use the rank's parameters and buffers, wherever they are now."""
        own, host = self.run.model, self.run.host
        for name, param in own.named_parameters():
            self.params[name].data = param.data
        for twin, buffer in zip(self.model.buffers(), own.buffers(), strict=True):
            twin.data = buffer.data
        self.pace.ask(host.pace.seconds, host.pace.faults)

    def _perform(self, op: Op) -> Any:
        if op.verb not in self._did or op.group is not None:
            raise StrategyError(f"`{op.verb}`: one of several workers cannot ask for it; take workers=1")
        return self._did[op.verb](*op.args)

    def _look_up(self) -> dict[str, Tensor]:
        self._looked = self._batches()
        return self.run.host.whole.rows_of(self._looked)

    def _forward(self, x: Any, micro: int) -> Tensor:
        looked, self._looked = self._looked, None
        batch = x if x is not None else self._batches() if looked is None else looked
        with _Phase(self, "forward"):
            loss = self._loss = self.run.learner.loss(self.model, batch)
        self.run.host.timing.losses.append(loss.detach())
        return loss.detach()

    def _backward(self, grad: float | None, micro: int) -> None:
        loss, self._loss = self._loss, None
        if loss is None:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        with _Phase(self, "backward"):
            loss.backward(None if grad is None else torch.full_like(loss, grad))

    def _update(self, bucket: Any, by: Callable[[], None] | None, on: str) -> None:
        if bucket is not None or by is not None:
            raise StrategyError("one of several workers updates as the task's optimizer does: `rank.update()` whole")
        with _Phase(self, "update"), self.run.host.alone:
            for place in self.run.layout.order:
                twin = self.params[place.name]
                place.param.grad, twin.grad = twin.grad, None
            self.run.optimizer.step()
            self.run.optimizer.zero_grad(set_to_none=True)

    def _recv(self, into: Tensor | None, source: int | None, kind: str) -> Any:
        run, began = self.run, self.run.clock.now()

        def over() -> bool:
            run.host.check_background()
            return False

        got = run.host.mailbox.recv(into, source, kind, over)
        run.record.span(run.rank.step, "wait", message_name("recv", kind, **{"from": source}), began, began,
                        run.clock.now(), 0)  # fmt: skip
        return got

    def _sample(self, name: str, value: float) -> None:
        self.run.record.sample(self.run.rank.step, name, self.run.clock.now(), float(value))


class _Phase:
    """A phase of compute, recorded as a span and as long as the pace says."""

    def __init__(self, worker: Twin, name: str) -> None:
        self.worker, self.name = worker, name

    def __enter__(self) -> None:
        run = self.worker.run
        self.began = run.host.watch.now()
        self.worker.pace.begin(self.name, run.rank.step)

    def __exit__(self, *error: object) -> None:
        run = self.worker.run
        self.worker.pace.reach(1.0)
        run.host.watch.span(run.rank.step, self.name, self.began)


class Workers:
    """All workers of one rank."""

    def __init__(self, run: Parts) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._all: list[Twin] = []

    def _draw(self) -> Any:
        with self._lock:
            return self.run.batches.next()

    def step(self) -> None:
        """Makes one step of the strategy on every worker, and waits for all of them. Raises a worker's error."""
        run, strategy = self.run, self.run.experiment.strategy
        while len(self._all) < strategy.workers:
            self._all.append(Twin(run, len(self._all), self._draw))
        threads = []
        for worker in self._all[: strategy.workers]:
            name = f"rank {run.rank.id} worker {worker.number}"
            coro = strategy.step(_as(run.rank, worker.number), run.state)
            threads.append(threading.Thread(target=worker.step, args=(coro,), name=name, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in self._all:
            error, worker.error = worker.error, None
            if error is not None:
                raise error


def _as(rank: Rank, worker: int) -> Rank:
    """Returns the rank as one of its workers sees it."""
    mine = type(rank)(rank.id, rank.size)
    mine.__dict__.update(rank.__dict__, worker=worker, _groups={})
    return mine
