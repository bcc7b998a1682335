"""Lanes: the threads on which children run beside the step, and the performing of what they ask.

One lane, one wire, one thread. Children run one after the other in the order in which they were started, which
is the same on all ranks. Encoding happens here and so overlaps with backward.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import torch
from torch import Tensor

from workbench.engine.collectives import Wire
from workbench.engine.shaping import Clock, Shaper
from workbench.fabric import Load, even, uneven
from workbench.ops import Handle, Op, StrategyError

CODEC_FLOOR = 100e-6  # shorter stretches of a child's own work are not worth a span


class Job:
    """A child under way: its coroutine, its result, and when what happened."""

    __slots__ = ("asked", "child", "done", "error", "flight", "measures", "name", "number", "resumed", "step",
                 "value")

    def __init__(self, child: Coroutine[Op, Any, Any], name: str, asked: float, done: threading.Event | None,
                 step: int, number: int) -> None:
        self.child, self.name, self.asked, self.number = child, name, asked, number
        self.step = step  # that it was started in, which is the step of all that it does
        self.done = done  # None where the thread that waits also runs it
        self.value: Any = None
        self.error: BaseException | None = None
        self.flight: Flight | None = None
        self.resumed = asked
        self.measures = False  # was what it asked for last a part of measuring?


class Flight:
    """A collective issued and not yet waited for."""

    __slots__ = ("arrived", "asked", "finished", "hold", "load", "op", "step", "what", "work")

    def __init__(self, op: Op, what: str, work: Any, asked: float, arrived: float, load: Load, hold: Any,
                 step: int) -> None:
        self.op, self.what, self.work, self.asked, self.arrived = op, what, work, asked, arrived
        self.load, self.hold, self.step = load, hold, step
        self.finished = 0.0


class Lane:
    """One lane of one rank: performs the collectives that children ask for and records them.

    `eager` runs children on the caller's thread up to their first collective, which goes on by itself; what
    follows it is done when the child is waited for. It saves a thread when there is nothing to compute or to
    sleep for.
    """

    def __init__(self, name: str, wire: Wire | None, clock: Clock, shaper: Shaper, record: Any,
                 device: str = "cpu") -> None:
        self.name, self.wire, self.clock, self.shaper, self.record = name, wire, clock, shaper, record
        self.size = wire.size if wire else 1
        self.rank = wire.rank if wire else 0
        self.eager = False
        self.busy = ""
        self.sent = 0  # bytes sent so far
        self.step = 0
        self.started = self.completed = 0  # numbers of the last child that was started, and of the last waited for
        self.before: Callable[[int], None] = lambda number: None  # called before a child begins
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._device = device

    # -- called by the host's thread --

    def start(self, child: Coroutine[Op, Any, Any], name: str) -> Handle:
        handle = Handle(name, self.name)
        here = self.eager or self.size == 1
        self.started += 1
        self.before(self.started)
        done = None if here else threading.Event()
        job = handle._state = Job(child, name, self.clock.now(), done, self.step, self.started)
        if here:
            self._advance(job, finish=False)
        else:
            if self._thread is None:
                self._open()
            self._jobs.put(job)
        return handle

    def wait(self, handle: Handle) -> Any:
        job: Job = handle._state
        if job.flight is not None:
            self._land(job)
        if job.done is not None:
            job.done.wait()
        if job.error is not None:
            raise job.error
        self.completed = max(self.completed, job.number)
        return job.value

    def close(self) -> None:
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(5)
            self._thread = None
        if self.shaper.board is not None:
            self.shaper.board.close()

    def _open(self) -> None:
        self._thread = threading.Thread(target=self._serve, name=f"rank {self.rank} {self.name}", daemon=True)
        self._thread.start()

    # -- on the lane's own thread --

    def _serve(self) -> None:
        torch.set_grad_enabled(False)
        if self._device.startswith("cuda"):
            torch.cuda.set_device(self._device)
        while (job := self._jobs.get()) is not None:
            self._advance(job, finish=True)

    def _advance(self, job: Job, finish: bool, value: Any = None) -> None:
        """Runs the child on; with `finish` to its end, else until its first collective is under way."""
        try:
            with torch.no_grad():
                while True:
                    began = self.clock.now()
                    op = job.child.send(value)
                    self._codec(job, began)
                    flight = self._issue(op, job)
                    if not finish and flight is not None:
                        job.flight = flight
                        return
                    value = self._complete(flight) if flight else _alone(op)
                    job.resumed = self.clock.now()
        except StopIteration as stop:
            self._codec(job, began)
            job.value = stop.value
        except BaseException as error:
            job.error = error
        if job.done is not None:
            job.done.set()

    def _land(self, job: Job) -> None:
        """Finishes a child whose first collective went on by itself."""
        flight, job.flight = job.flight, None
        try:
            value = self._complete(flight)
        except BaseException as error:
            job.error = error
            return
        self._advance(job, finish=True, value=value)

    def _codec(self, job: Job, began: float) -> None:
        now = self.clock.now()
        if now - began > CODEC_FLOOR:
            lane = "measuring" if job.measures else "codec"
            self.record.span(job.step, lane, job.name, began, began, now, 0)

    # -- one collective --

    def _issue(self, op: Op, job: Job) -> Flight | None:
        """Puts a collective on the wire; None when one rank is all there is, or for a Sample."""
        if op.verb == "sample":
            name, value = op.args
            return self.record.sample(job.step, name, self.clock.now(), float(value))
        issue = getattr(self, f"_{op.verb}", None)
        if issue is None:
            raise StrategyError(f"a child asked for {op.verb}, which is not one of the collectives: ask it in `step`")
        job.measures = op.measures
        if self.size == 1:
            return None
        what = f"{op.verb} {op.args[-1] or job.name}"
        self.busy = what
        now = self.clock.now()
        if self.shaper.active:
            self.shaper.ready(now, job.asked)
        work, hold = issue(op)
        flight = Flight(op, what, work, job.resumed, now, self._load(op), hold, job.step)
        if self.eager and self._device == "cpu":  # on CUDA "done" would mean enqueued
            work.get_future().add_done_callback(lambda _: setattr(flight, "finished", self.clock.now()))
        return flight

    def _complete(self, flight: Flight) -> Any:
        assert self.wire is not None
        self.wire.wait(flight.work)
        end = flight.finished or self.clock.now()
        lane = "measuring" if flight.op.measures else "comm"
        if self.shaper.active:
            began, own, end = self.shaper.finish(flight.load, self._last_arrival)
            if lane == "comm":
                self.record.span(flight.step, "port", flight.what, began, began, own, 0)
            end = max(end, self.clock.now())
        self.sent += flight.load.sent
        self.record.span(flight.step, lane, flight.what, flight.asked, flight.arrived, end, flight.load.sent)
        self.busy = ""
        return self._finish(flight)

    def _last_arrival(self) -> float:
        """The last arrival by asking everybody, where ranks share no file."""
        assert self.wire is not None
        mine = torch.tensor([self.shaper.naps.clock.now()], dtype=torch.float64)
        self.wire.wait(self.wire.all_reduce(mine, "max"))
        return float(mine[0])

    def _load(self, op: Op) -> Load:
        """What the ports have to carry."""
        x = op.args[0]
        if op.verb == "all_to_allv":
            return uneven(op.args[1], x[0].element_size(), self.rank)
        return even(op.verb, x.numel() * x.element_size(), self.size)

    def _all_reduce(self, op: Op) -> tuple[Any, Any]:
        x, how, _ = op.args
        return self.wire.all_reduce(x, how), x

    def _broadcast(self, op: Op) -> tuple[Any, Any]:
        x, source, _ = op.args
        return self.wire.broadcast(x, source), x

    def _all_gather(self, op: Op) -> tuple[Any, Any]:
        x = _wire_view(op.args[0])
        out = x.new_empty(self.size * x.numel())
        return self.wire.all_gather(out, x), out

    def _all_to_all(self, op: Op) -> tuple[Any, Any]:
        x = _wire_view(op.args[0])
        out = torch.empty_like(x)
        return self.wire.all_to_all(out, x), out

    def _all_to_allv(self, op: Op) -> tuple[Any, Any]:
        rows, lengths, _ = op.args
        width = rows[0].element_size()
        gives = [width * n for n in lengths[self.rank]]
        takes = [width * row[self.rank] for row in lengths]
        x = torch.cat([row.reshape(-1) for row in rows]).view(torch.uint8)
        out = x.new_empty(sum(takes))
        return self.wire.all_to_all(out, x, takes, gives), out.split(takes)

    def _reduce_scatter(self, op: Op) -> tuple[Any, Any]:
        """gloo's own moves a whole all-reduce's bytes; an all-to-all and a local sum do not."""
        x = op.args[0].contiguous()
        out = torch.empty_like(x)
        return self.wire.all_to_all(out, x), out

    def _finish(self, flight: Flight) -> Any:
        like: Any = flight.op.args[0]
        match flight.op.verb:
            case "all_to_allv":
                return [row.view(like[0].dtype) for row in flight.hold]
            case "all_gather":
                return flight.hold.view(like.dtype).view(self.size, *like.shape)
            case "all_to_all":
                return flight.hold.view(like.dtype).view(like.shape)
            case "reduce_scatter":
                return flight.hold.view(self.size, -1).sum(0)
        return flight.hold


def _alone(op: Op) -> Any:
    """With one rank every collective is the identity; a Sample has no answer."""
    if op.verb == "sample":
        return None
    x = op.args[0]
    return x.unsqueeze(0) if op.verb == "all_gather" else x


def _wire_view(x: Tensor) -> Tensor:
    """`x` as contiguous bytes where gloo cannot carry its dtype in a collective."""
    x = x.contiguous()
    narrow = x.dtype in (torch.int16, torch.uint16) or "float8" in str(x.dtype)
    return x.view(torch.uint8) if narrow else x
