"""Lanes: threads that run children next to the step, and the collectives of these children.

A lane has one thread, one wire for all ranks, and one wire for each group that it uses (see lane_wires.py). Children
run one after another, in the order of their start, which is the same on all ranks. For children with priorities see
child_order.py. Encoding runs on the lane's thread, so it overlaps with backward.

On a GPU the lane also has a stream, which keeps the order. See [Note: Order on a GPU] in engine/device/cuda.py. On an
emulated Link the thread waits for the GPU's collective, and sleeps until the Link would have done it. Only then the
stream goes on, so the host's clock gives the times.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from workbench.engine.collectives.child_job import ChildJob, LaneCalls, PendingCollective
from workbench.engine.collectives.child_order import MAX_CHOSEN, ChildQueue
from workbench.engine.collectives.issuing import CollectiveIssuer, make_lone_result
from workbench.engine.collectives.lane_wires import GroupWires, LaneWires
from workbench.engine.collectives.shaping import Port
from workbench.engine.collectives.stopwatch import MIN_CODEC_SECONDS, Stopwatch
from workbench.engine.collectives.wire import Wire
from workbench.engine.device import Chip
from workbench.host.core import all_reduce
from workbench.host.core.drive import LeaveLoop, drive_coroutine
from workbench.rank import Group, Handle, Op, StrategyError, collective


class Lane(CollectiveIssuer):
    """One lane of one rank.

    eager: runs a child on the caller's thread up to its first collective, and the rest in `wait`. This saves a thread
           if the child has nothing to compute and no Link to sleep for.
    """

    def __init__(
        self,
        name: str,
        port: Port,
        watch: Stopwatch,
        chip: Chip,
        open: Callable[[Group | None], GroupWires],
        whole: GroupWires | None = None,
        calls: LaneCalls = LaneCalls(),  # noqa: B008
        eager: bool = False,
        wireless: bool = False,
    ) -> None:
        """wireless: no child of this lane starts a collective"""
        self.name, self.port, self.watch, self.chip = name, port, watch, chip
        self.clock, self.record, self.span = watch.clock, watch.record, watch.write_span
        self.wires = LaneWires(whole, open)
        self.size, self.rank = port.size, port.rank
        self.eager, self.wireless = eager, wireless
        self.now = self._read_now if chip.runs_ahead else self.clock.now
        self.sent = 0  # bytes
        self.step = 0
        self.started = self.completed = 0  # numbers of children
        self.on_child_start, self.on_collective, self.on_child_end = calls[:3]
        self.read_settings, self.perform_hop = calls.read_settings, calls.perform_hop
        self.wireless_verbs = {**calls.wireless, "work": self.run_work} if calls.wireless else {}
        self._turns = ChildQueue(self._broadcast_choice, self.rank == 0)
        self._thread: threading.Thread | None = None
        self._busy = ""
        self._broken: BaseException | None = None  # of a child, or of the thread
        self._stream = chip.make_stream()
        self._aloft: deque[tuple[str, Any]] = deque()  # on a GPU: collectives and the events of their ends
        self._kept: deque[ChildJob] = deque()

    @property
    def current_collective(self) -> str:
        return next((what for what, end in list(self._aloft) if not self.chip.has_reached(end)), self._busy)

    # -- called by the host's thread --

    def run_eagerly(self, so: bool) -> None:
        self.eager = so

    def enter_step(self, step: int) -> None:
        self.step = step

    def restart_count(self) -> None:
        self.started = self.completed = 0

    def start(self, child: Coroutine[Op, Any, Any], name: str, priority: int = 0, share: float = 1.0) -> Handle:
        handle = Handle(name, self.name)
        self.eager = self.eager and not priority  # it must not begin before its turn
        here = (self.eager or self.size == 1) and not self.wireless
        self.started += 1
        self.on_child_start(self.started)
        done = None if here else threading.Event()
        now, by = self.now(), self.read_settings()
        job = handle._state = ChildJob(child, name, now, done, self.step, self.started, by, priority, share)
        if self.chip.runs_ahead:
            self._keep_tensors(job)
        if here:
            self._advance_job(job, finish=False)
        else:
            if self._thread is None:
                self._start_thread()
            self._turns.add_job(job)
        return handle

    def wait(self, handle: Handle) -> Any:
        job: ChildJob = handle._state
        if job.flight is not None:
            self._advance_job(job, finish=True)
        if job.done is not None:
            job.done.wait()
        if job.error is not None:
            raise job.error
        if job.event is not None:
            self.chip.wait_in_stream(job.event, job.value)
        self.completed = max(self.completed, job.number)
        self.on_child_end(job, None)
        return job.value

    def close(self) -> None:
        if self._thread is not None:
            self._turns.add_job(None)
            self._thread.join(5)
            self._thread = None
        self.wires.close()

    def _start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run_children, name=f"rank {self.rank} {self.name}", daemon=True)
        self._thread.start()

    def _keep_tensors(self, job: ChildJob) -> None:
        """See [Note: Memory that crosses] in engine/device/cuda.py."""
        job.keep_arguments(self.chip.record_event(), self.chip.list_arguments(job.child))
        while self._kept and self._kept[0].event is not None and self.chip.has_reached(self._kept[0].event):
            self._kept.popleft()
        self._kept.append(job)

    # -- on the lane's own thread --

    def _read_now(self) -> Any:
        """Returns an event on the stream, or the host's time on an emulated Link."""
        return self.clock.now() if self.port.is_active else self.watch.now()

    def _run_children(self) -> None:
        torch.set_grad_enabled(False)
        try:
            self.chip.bind_thread()
        except BaseException as error:
            self._broken = error
        while (job := self._next_job()) is not None:
            self._advance_job(job, finish=True)

    def _next_job(self) -> ChildJob | None:
        try:
            return self._turns.next_job(agreeing=self._broken is None)
        except BaseException as error:  # a wire is cut: `wait` must raise this error
            self._broken = error
            return self._turns.next_job(agreeing=False)

    def _broadcast_choice(self, chosen: list[int] | None) -> list[int]:
        """Broadcasts rank 0's choice, outside the Link."""
        wire = self.wires.for_group(None).aside
        assert wire is not None
        numbers = torch.tensor(chosen or [0] * MAX_CHOSEN, dtype=torch.int64)
        wire.wait(wire.broadcast(numbers, 0))
        return numbers.tolist()

    def _advance_job(self, job: ChildJob, finish: bool) -> None:
        """Runs the child to its end if `finish`, else until its first collective is under way."""
        failed = self._broken  # ranks may no longer start the same collectives: `wait` must raise this error
        if failed is not None:
            return self._end_job(job, failed)
        try:
            with torch.no_grad(), self.chip.use_stream(self._stream, job.start_event):
                try:
                    self._drive_child(job, finish)
                except BaseException as error:
                    job.fail(error)
                    self._broken = None if isinstance(error, StrategyError) else error  # all ranks raise it
                if self.chip.runs_ahead and job.flight is None:
                    job.event = self.chip.record_event()
        except BaseException as error:  # an error of the chip must not end the thread of all children
            failed = error
        self._end_job(job, failed)

    def _end_job(self, job: ChildJob, failed: BaseException | None) -> None:
        """failed: an error from outside the child, whose own error goes first"""
        if job.flight is None or failed is not None:
            self.on_child_end(job, job.value)
        if failed is not None:
            job.fail(failed)
            with contextlib.suppress(Exception):  # the child may not have begun
                job.child.close()
        if job.done is not None:
            job.done.set()

    def _drive_child(self, job: ChildJob, finish: bool) -> None:
        flight = job.take_flight()
        value = self._complete_collective(flight) if flight is not None else None  # of an eager child
        job.began = self.now()

        def perform(op: Op) -> Any:
            self._write_codec_span(job)
            if (by := all_reduce.choose_algorithm(self.port.fabric, self.size, op)) is not None:
                value = self._sum_in_messages(by, op, job)
                job.resume(self.now())
                return value
            if op.verb in self.wireless_verbs:
                job.measures = op.measures
                value = self.wireless_verbs[op.verb](op, job)
                job.resume(self.now())
                return value
            flight = self._issue_collective(op, job)
            if not finish and flight is not None:
                job.suspend(flight)
                raise LeaveLoop
            value = self._complete_collective(flight) if flight else make_lone_result(op)
            job.resume(self.now())
            return value

        try:
            job.value = drive_coroutine(job.child, perform, value=value)
        except LeaveLoop:
            return
        self._write_codec_span(job)

    def _write_codec_span(self, job: ChildJob) -> None:
        now, began = self.now(), job.began
        if isinstance(now, float) and now - began <= MIN_CODEC_SECONDS:
            return
        self.span(job.step, "measuring" if job.measures else "codec", job.name, began, began, now, 0)

    def run_work(self, op: Op, job: ChildJob) -> Any:
        of, flops, name = op.args
        began = self.now()
        value = of()
        self.span(job.step, "codec", name, began, began, self.now(), 0)
        self.record.sample(job.step, f"flops {name}", self.clock.now(), float(flops))
        return value

    # -- one collective --

    def _issue_collective(self, op: Op, job: ChildJob) -> PendingCollective | None:
        """Returns None for a Sample, or in a group of one rank."""
        if op.verb == "sample":
            name, value = op.args
            return self.record.sample(job.step, name, self.clock.now(), float(value))
        issue = self.ISSUERS.get(op.verb)
        if issue is None:
            raise StrategyError(f"a child requested {op.verb}, which is not a collective: request it in `step`")
        job.measures = op.measures
        self._busy = what = collective(op, job.name)
        wire, shaper, *_ = line = self.wires.for_group(op.group)
        if wire is None:
            self._busy = ""
            return None
        self.on_collective(job, op)
        if shaper.is_active and self.chip.runs_ahead:  # the Link's time starts when the GPU has computed the data
            self.chip.block_until(self.chip.record_event(), wire.check_peers)
        now = self.now()
        if shaper.is_active:
            shaper.post_ready(now, job.asked)
        work, hold = issue(self, wire, op)
        flight = PendingCollective(op, what, line, work, job.resumed, now, self._measure_load(wire, op), hold, job.step)
        if self.eager and not self.chip.runs_ahead:
            work.get_future().add_done_callback(lambda _: setattr(flight, "finished", self.clock.now()))
        return flight

    def _complete_collective(self, flight: PendingCollective) -> Any:
        wire, shaper, aside, _ = flight.line
        assert wire is not None
        if self.chip.runs_ahead and shaper.is_active:
            wire.wait_on_host(flight.work)
        else:
            wire.wait(flight.work)
        end = flight.finished or self.now()
        lane = "measuring" if flight.op.measures else "comm"
        if shaper.is_active:
            began, own, end = shaper.await_end(flight.load, lambda: _find_last_arrival(aside, self.clock.now()))
            if lane == "comm":
                self.record.span(flight.step, "port", flight.what, began, began, own, 0)
            end = max(end, self.clock.now())
        self.sent += flight.load.sent
        self.span(flight.step, lane, flight.what, flight.asked, flight.arrived, end, flight.load.sent)
        self._busy = ""
        if self.chip.runs_ahead:
            while self._aloft and self.chip.has_reached(self._aloft[0][1]):
                self._aloft.popleft()
            self._aloft.append((flight.what, self.chip.record_event()))
        return self._read_result(wire, flight.op, flight.hold)


def _find_last_arrival(aside: Wire | None, now: float) -> float:
    """Returns the last arrival by an all-reduce, for ranks that share no file.

    aside: a gloo wire, because NCCL takes no CPU tensor
    """
    assert aside is not None
    mine = torch.tensor([now], dtype=torch.float64)
    aside.wait(aside.all_reduce(mine, "max"))
    return float(mine[0])
