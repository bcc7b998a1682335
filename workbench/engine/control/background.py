"""Runs a strategy's `background` next to its steps, on a thread and a wire of its own.

Between two Ops a coroutine has its rank to itself. So step, background and update never touch the parameters at once,
and no update is lost. rendezvous.py decides when a background ends.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import torch

from workbench.engine.collectives.child_job import LaneCalls
from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import LinkShaper
from workbench.engine.collectives.wire import Aborted, Wire
from workbench.engine.control.canonical import gather_lists
from workbench.engine.control.group_wires import make_opener
from workbench.engine.control.meeting_view import BackgroundView
from workbench.engine.p2p.mailbox import FROM_BACKGROUND, WAIT_SLICE
from workbench.host.core.drive import drive_coroutine
from workbench.rank import Group, Op, StrategyError, message_name

STEP_ONLY_VERBS = ("forward", "backward", "backward_buckets", "update", "grads", "slots", "batch", "client", "narrow")


class Background:
    """One rank's background during one strategy. All ranks make theirs at once; `name` prefixes its wires."""

    def __init__(self, run: BackgroundView, name: str, wire: Wire | None, shaper: LinkShaper) -> None:
        self.run, self.wire, self._name = run, wire, name
        open = make_opener(run.peers, run.port, name, "gloo")
        buffers, whole = run.memory_account.buffers, GroupWires(wire, shaper, wire)
        calls = LaneCalls(
            on_collective=buffers.note_request, on_child_end=buffers.note_end, perform_hop=run.perform_hop
        )
        # eager: its children run on this thread
        self.lane = Lane("background", run.port, run.watch, run.chip, open, whole, calls, eager=True)
        self.error: BaseException | None = None
        self._idle = threading.Event()
        self._news = threading.Event()
        self._done = threading.Event()
        self._done.set()
        self._is_ending = False  # no more messages come: a receiver stops waiting
        self._count_at_last_look = -1  # received messages when this background last found none for it
        self._coros: queue.SimpleQueue[Coroutine[Op, Any, Any] | None] = queue.SimpleQueue()
        self._verbs: dict[str, Callable[..., Any]] = {
            "again": self._next_step,
            "params": run.layout.list_params,
            "clock": run.clock.now,
            "sample": self._record_sample,
            "units": lambda: run.host.parts.submodel.hidden_units,
            "work": lambda of, flops, name: of(),
            "update_rows": run.host.tables.update_rows,
            "send": self._send_message,
            "recv": self._receive_message,
            "wait": self.lane.wait,
            "start": lambda child, lane, name, *_, group=None: self.lane.start(child, name),
        }
        self._thread = threading.Thread(target=self._run_coroutines, name=f"rank {run.rank.id} background", daemon=True)
        self._thread.start()

    # -- called by the training thread --

    def start_coroutine(self, coro: Coroutine[Op, Any, Any]) -> None:
        """Begins the coroutine, or begins it again after a meeting."""
        self._is_ending, self._count_at_last_look = False, -1
        self._idle.clear()
        self._done.clear()
        self._coros.put(coro)

    def note_step(self) -> None:
        """There is something new to exchange."""
        self._news.set()

    def note_idle(self) -> None:
        """The step waits for a meeting, so this rank no longer asks its peers to go on."""
        self._idle.set()
        self._news.set()

    def end_exchanges(self, control: Wire | None) -> None:
        """Ends the backgrounds after their common exchanges, while every rank's step stands still."""
        self.note_idle()
        self._await_quiet(control)
        self._is_ending = True
        while not self._done.wait(WAIT_SLICE):
            self.run.mailbox.wake_waiters()
            if self.run.leaving.is_set():
                raise Aborted("left while the background was ending")
        self.raise_error()

    def _await_quiet(self, control: Wire | None) -> None:
        """Returns on all ranks at once, when no message is under way and each background has ended or waits for one.

        Two looks in a row must find this with equal numbers of messages, because ranks' counts may lag. As in Mattern,
        "Algorithms for distributed termination detection", 1987.
        """
        before, rest = [-1, -1], 1e-3
        while True:
            self.raise_error()
            quiet, posted, came = self._read_state()
            table = gather_lists(control, [quiet, posted, came])
            now = [sum(row[1] for row in table), sum(row[2] for row in table)]
            if all(row[0] for row in table) and now[0] == now[1] and now == before:
                return
            before = now
            self.run.mailbox.await_news(rest)
            rest = min(2 * rest, WAIT_SLICE)

    def _read_state(self) -> tuple[int, int, int]:
        """Returns (whether the background has ended or waits for a message, messages posted, messages received)."""
        done, looked = self._done.is_set(), self._count_at_last_look  # read before `came`: if equal, it still waits
        posted, came = self.run.mailbox.posted_count, self.run.mailbox.received_count
        return done or looked == came, posted, came

    def end_round(self, patience: float = 3.0) -> None:
        """Ends the present round on all ranks, because in a round a rank may miss that a group is cut.

        See [Note: What gloo misses] in engine/device/gloo.py. A round that failed by itself cannot be ended.

        patience: seconds; on a busy machine other ranks may need 1 or 2
        """
        end, self._is_ending = time.monotonic() + patience, True  # a server stops waiting for messages, too
        self.note_idle()
        self.run.mailbox.wake_waiters()
        if self._done.wait(patience):
            self.run.peers.await_point(f"the end of {self._name}", end if self.error is None else 0.0)

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """To close before the end, the caller sets `leaving`."""
        self._coros.put(None)
        self.note_idle()
        self._thread.join(5.0)
        self.lane.close()
        if self.error is not None:
            self.error.__traceback__ = None  # it would keep the group's sockets open
        self.run.peers.close_wires([*self.lane.wires.forget_groups(), *([self.wire] if self.wire is not None else [])])

    # -- on the background's own thread --

    def _run_coroutines(self) -> None:
        torch.set_grad_enabled(False)
        self.run.chip.bind_thread()
        while (coro := self._coros.get()) is not None:
            try:
                drive_coroutine(coro, self._perform_op, self.run.host.alone)
            except BaseException as error:
                self.error = error
                self.run.mailbox.wake_waiters()
            self._done.set()
            self.run.mailbox.wake_waiters()

    def _perform_op(self, op: Op) -> Any:
        self.lane.enter_step(self.run.lane.step)  # between two steps, rows belong to the former
        do = self._verbs.get(op.verb)
        if do is not None:
            return do(*op.args) if op.group is None else do(*op.args, group=op.group)
        if op.verb in STEP_ONLY_VERBS:
            raise StrategyError(f"`{op.verb}` belongs in `step`: a background changes parameters through `params`")

        async def child() -> Any:
            return await op

        return self.lane.wait(self.lane.start(child(), str(op.args[-1] or op.verb)))

    def _next_step(self, rest: float, alone: bool, group: Group | None = None) -> int:
        """Returns the present step (from 1) while any rank of the group trains; 0 after that.

        Rests for `rest` seconds, then waits for a new step. alone: only this rank's step counts
        """
        until = self.run.clock.now() + rest
        while not self._idle.is_set():
            left = until - self.run.clock.now()
            if left > 0:
                self._idle.wait(min(WAIT_SLICE, left))
            elif self._news.wait(WAIT_SLICE):
                break
            if self.run.leaving.is_set():
                raise Aborted("left a background")
        if self.run.mailbox.closed_ranks:  # this rank's step raises an error at its end
            self._idle.set()
        self._news.clear()
        flag = torch.tensor([not self._idle.is_set()], dtype=torch.int32)
        if not alone and (wire := self.lane.wires.for_group(group).aside) is not None:
            wire.wait(wire.all_reduce(flag, "max"))
        step = self.run.lane.step
        self.run.record.sample(step, "again", self.run.clock.now(), float(flag))
        return step + 1 if flag else 0

    def _record_sample(self, name: str, value: float) -> None:
        self.run.record.sample(self.run.lane.step, name, self.run.clock.now(), float(value))

    def _send_message(self, tensor: torch.Tensor, to: int, kind: str) -> None:
        self.run.memory_account.buffers.note_message(tensor)
        self.run.mailbox.send(tensor, to, kind, FROM_BACKGROUND)

    def _receive_message(self, into: torch.Tensor | None, source: int | None, kind: str) -> Any:
        got = self.run.mailbox.recv(into, source, kind, self._expects_nothing)
        if source is None and got is not None:
            self._record_sample(message_name("recv", kind), got[1])
        return got

    def _expects_nothing(self) -> bool:
        """The mailbox asks while it has no such message."""
        self._count_at_last_look = self.run.mailbox.received_count
        return self._is_ending
