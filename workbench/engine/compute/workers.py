"""Workers: threads that run several steps of one rank at once, each with a copy of the model.

A copy has its own gradients. It reads and writes the rank's parameters and buffers without locks while other workers
compute. Workers share one optimizer and update one at a time. Collectives and buckets of gradients belong to the rank,
so a worker cannot use them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import torch
from torch import Tensor

from workbench.engine.collectives.shaping import ComputePace
from workbench.engine.compute.clocked_view import ClockedView
from workbench.engine.compute.host import Host
from workbench.host.core.drive import drive_coroutine
from workbench.host.memory.batches import BatchReader
from workbench.rank import Op, Rank, StrategyError, message_name
from workbench.rank.errors import explain_missing_forward
from workbench.strategies.embedding_tables.engine import WorkerTablePerformer


class WorkerView(ClockedView, Protocol):
    """A rank with several workers."""

    @property
    def batches(self) -> BatchReader: ...
    @property
    def host(self) -> Host: ...


class WorkerModel:
    """One of a rank's workers. number: from 0; batches: draws the rank's next batch, for one worker at a time"""

    def __init__(self, run: WorkerView, number: int, batches: Callable[[], Any]) -> None:
        self.run, self.number, self._batches = run, number, batches
        self.model = copy.deepcopy(run.model)
        self.params = dict(self.model.named_parameters())
        self.pace = ComputePace(run.rank.id, run.paced_sleep)
        self.error: BaseException | None = None
        self._drawn_batch: Any = None  # of the next forward, if its rows were looked up
        self._loss: Tensor | None = None
        tables = WorkerTablePerformer(run.host.parts, self._draw_ahead, self.params)
        self._verbs: dict[str, Callable[..., Any]] = {
            "batch": batches,
            "forward": self._run_forward,
            "backward": self._run_backward,
            "update": self._update_model,
            "params": run.layout.list_params,
            "send": run.host.mailbox.send,
            "recv": self._receive_message,
            "clock": run.clock.now,
            "sample": self._record_sample,
            **tables.verbs,
        }

    def run_step(self, coro: Coroutine[Op, Any, Any]) -> None:
        """Keeps its error for `WorkerPool.run_steps`."""
        try:
            self.run.chip.bind_thread()
            self._tie_parameters()
            drive_coroutine(coro, self._perform_op, self.run.host.alone)
        except BaseException as error:
            self.error = error

    def _tie_parameters(self) -> None:
        """Makes the copy use the rank's present parameters and buffers."""
        own, host = self.run.model, self.run.host
        for name, param in own.named_parameters():
            self.params[name].data = param.data
        for twin, buffer in zip(self.model.buffers(), own.buffers(), strict=True):
            twin.data = buffer.data
        self.pace.set_pace(host.pace.seconds, host.pace.faults)

    def _perform_op(self, op: Op) -> Any:
        if op.verb not in self._verbs or op.group is not None:
            raise StrategyError(f"`{op.verb}`: one of several workers cannot request it; take workers=1")
        return self._verbs[op.verb](*op.args)

    def _draw_ahead(self) -> Any:
        self._drawn_batch = self._batches()
        return self._drawn_batch

    def _run_forward(self, x: Any, micro: int) -> Tensor:
        looked, self._drawn_batch = self._drawn_batch, None
        batch = x if x is not None else self._batches() if looked is None else looked
        with _Phase(self, "forward"):
            loss = self._loss = self.run.learner.loss(self.model, batch)
        self.run.host.timing.losses.append(loss.detach())
        return loss.detach()

    def _run_backward(self, grad: float | None, micro: int) -> None:
        loss, self._loss = self._loss, None
        if loss is None:
            raise StrategyError(explain_missing_forward(micro))
        with _Phase(self, "backward"):
            loss.backward(None if grad is None else torch.full_like(loss, grad))

    def _update_model(self, bucket: Any, by: Callable[[], None] | None, on: str) -> None:
        if bucket is not None or by is not None:
            raise StrategyError("one of several workers updates as the task's optimizer does: `rank.update()` whole")
        with _Phase(self, "update"), self.run.host.alone:
            for place in self.run.layout.order:
                twin = self.params[place.name]
                place.param.grad, twin.grad = twin.grad, None
            self.run.optimizer.step()
            self.run.optimizer.zero_grad(set_to_none=True)

    def _receive_message(self, into: Tensor | None, source: int | None, kind: str) -> Any:
        run, began = self.run, self.run.clock.now()

        def over() -> bool:
            run.host.check_background()
            return False

        got = run.host.mailbox.recv(into, source, kind, over)
        run.record.span(run.rank.step, "wait", message_name("recv", kind, **{"from": source}), began, began,
                        run.clock.now(), 0)  # fmt: skip
        return got

    def _record_sample(self, name: str, value: float) -> None:
        self.run.record.sample(self.run.rank.step, name, self.run.clock.now(), float(value))


class _Phase:
    """Recorded as a span, as long as the pace says."""

    def __init__(self, worker: WorkerModel, name: str) -> None:
        self.worker, self.name = worker, name

    def __enter__(self) -> None:
        run = self.worker.run
        self.began = run.host.watch.now()
        self.worker.pace.begin_phase(self.name, run.rank.step)

    def __exit__(self, *error: object) -> None:
        run = self.worker.run
        self.worker.pace.reach_fraction(1.0)
        run.host.watch.end_span(run.rank.step, self.name, self.began)


class WorkerPool:
    """One rank's workers."""

    def __init__(self, run: WorkerView) -> None:
        self.run = run
        self._lock = threading.Lock()
        self._all: list[WorkerModel] = []

    def _draw_batch(self) -> Any:
        with self._lock:
            return self.run.batches.next_batch()

    def run_steps(self) -> None:
        """Makes one step on every worker, and waits for all. Raises a worker's error."""
        run, strategy = self.run, self.run.experiment.strategy
        while len(self._all) < strategy.workers:
            self._all.append(WorkerModel(run, len(self._all), self._draw_batch))
        threads = []
        for worker in self._all[: strategy.workers]:
            name = f"rank {run.rank.id} worker {worker.number}"
            coro = strategy.step(_view_as_worker(run.rank, worker.number), run.state)
            threads.append(threading.Thread(target=worker.run_step, args=(coro,), name=name, daemon=True))
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for worker in self._all:
            error, worker.error = worker.error, None
            if error is not None:
                raise error


def _view_as_worker(rank: Rank, worker: int) -> Rank:
    mine = type(rank)(rank.id, rank.size)
    mine.__dict__.update(rank.__dict__, worker=worker, _groups={})
    return mine
