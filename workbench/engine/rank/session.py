"""One run on one rank: a thread that sets up, trains, and gives everything back.

A session answers requests while it trains. If it fails, it ends with a reason in words. It uses no cluster, socket or
notebook code.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from workbench.engine.collectives.wire import (
    Aborted,
    connect_store,
    host_store,
    is_own_error,
    is_peer_loss,
)
from workbench.engine.compute.activity import current_op, describe_rank
from workbench.engine.control.membership import NotNeeded, report_gone
from workbench.engine.control.peers import remove_files
from workbench.engine.device.gpu_monitor import start_gpu_monitor
from workbench.engine.rank.crashing import crash_rank
from workbench.engine.rank.forming import confirm_formed
from workbench.engine.rank.generations import run_generations
from workbench.engine.rank.preempting import Preempted, PreemptionWatch, announce_preemption, remove_preempted
from workbench.engine.rank.resizing import resize_run
from workbench.engine.rank.session_state import SessionState
from workbench.engine.rank.surviving import explain_refusal
from workbench.engine.record.stall_detector import StallDetector
from workbench.engine.script.loop import NoSteps
from workbench.experiment.compiler_import import put_off_compiler
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.record.run import FINAL
from workbench.settings.describe_error import class_of, text_of, traceback_of


class Session(SessionState):
    """The constructor does no work; `start` returns at once."""

    host_store = staticmethod(host_store)

    def start(self) -> None:
        try:
            put_off_compiler()
            self._thread.start()
        except BaseException:
            self.record.close()  # its thread would stay, and publish rows under the job of another run
            raise

    def hurry(self) -> None:
        """Ends emulated delays before a stop. From now on a lost peer is no failure."""
        self.paced_sleep.hurry()
        self._end_asked.set()

    def set_outliving(self, so: bool) -> str:
        """Sets whether the other ranks go on after one rank is removed. Returns why they cannot, or ""."""
        reason = explain_refusal(self)
        self.outlives_next = so and not reason
        return reason

    def leave_behind(self, members: Sequence[int]) -> None:
        """Goes on without unreachable `members`, as if they had died.

        The vote does not wait for their reports. A member that comes back later leaves the run.
        """
        here = [self.members.index(m) for m in members if m in self.members and m != self.member]
        store = connect_store(*self.store_address, self.voting)
        for place in here:
            report_gone(store, place)
        if here:
            self.cut_connections()

    def preempt(self) -> None:
        """Leaves after the current step, because this rank's machine is about to end."""
        if self.phase == "waiting":  # no rank counts on this one yet
            return self.abort(asked=True)
        announce_preemption(self)

    def join(self, timeout: float | None = None) -> bool:
        """Returns whether the end came; a session that has not started has not ended."""
        if timeout == 0:
            return self._over.is_set()  # takes no lock: a signal handler calls this in any state of its thread
        return self._over.wait(timeout)

    def status(self) -> dict[str, Any]:
        return describe_rank(self)

    # -- read from outside: by a cell, or a test --

    @property
    def model(self) -> nn.Module:
        return self.set_up_already.model

    @property
    def optimizer(self) -> Any:
        return self.set_up_already.optimizer

    @property
    def layout(self) -> ParameterLayout:
        return self.set_up_already.layout

    @property
    def state(self) -> Any:
        return self.set_up_already.state

    def _run_thread(self) -> None:
        pulse = StallDetector(
            lambda found: self.mark("stood still", found), f"rank {self.rank.id} pulse", PreemptionWatch(self)
        )
        read = start_gpu_monitor(
            self.device, lambda name, v: self.record.sample(self.rank.step, name, self.clock.now(), v)
        )
        self.setup_began_at = time.monotonic()
        default = torch.get_default_dtype()
        try:
            with self.children.collect_started():
                run_generations(self)
        except NotNeeded as spare:
            self.set_phase("stopped", str(spare))
        except NoSteps as end:
            if self.rank.id == 0:
                self.mark("warning", {"text": str(end)})
            self.set_phase("done", str(end))
        except Aborted:
            asked = self.stopping or self._end_asked.is_set()
            self.set_phase("stopped" if asked else "failed", f"left in the middle of step {self.rank.step}")
        except BaseException as error:
            self._report_failure(error)
        finally:
            torch.set_default_dtype(default)  # the next run would inherit another default of the task
            pulse.close()
            if read is not None:
                read.close()
            try:
                self.tear_down()
            finally:
                self._over.set()

    def confirm_formed(self) -> None:
        confirm_formed(self)

    def crash_rank(self, mine: bool) -> None:
        crash_rank(self, mine)

    async def resize_run(self, members: tuple[int, ...], number: str) -> None:
        await resize_run(self, members, number)

    async def remove_preempted(self, members: Sequence[int], number: str) -> None:
        await remove_preempted(self, members, number)

    def tear_down(self) -> None:
        """Each part even if another fails. The record's last row states that this rank left."""
        parts = (
            self.profiler.stop_profile,
            self._close_training,
            self._report_gone,
            *(wire.close for wire in self.wires),
            self._remove_files,
            self.children.end,
            self.profiler.close,
            self.before_end,
        )
        for give_back in parts:
            try:
                give_back()
            except Exception:
                self.mark("log", {"stream": "stderr", "text": traceback.format_exc()})
        if self.phase not in FINAL:
            self.set_phase("failed", "its training thread ended without a report")
        self.mark("end", {"rank": self.member, "state": self.phase})
        self.record.close()

    def _close_training(self) -> None:
        if self.training is not None:
            self.training.close()

    def _report_gone(self) -> None:
        if self.rank.size > 1:
            with contextlib.suppress(RuntimeError):  # rank 0's host holds the store and may be gone
                report_gone(connect_store(*self.store_address, self.voting, timeout=1.0), self.rank.id)

    def _remove_files(self) -> None:
        if self.rank.id == 0:
            remove_files(self.files)

    def _report_failure(self, error: BaseException) -> None:
        text, own = text_of(error), is_own_error(error)
        consequence = not own and is_peer_loss(error, text)
        if consequence and not self.stopping:  # the request to leave may follow
            self._end_asked.wait(0.4)
        if (self.stopping and self.paced_sleep.hurried) or (consequence and self._end_asked.is_set()):
            return self.set_phase("stopped", f"left in the middle of step {self.rank.step}")
        self.error = {
            "rank": self.member,
            "step": self.rank.step,
            "op": current_op(self),
            "type": class_of(error),
            "text": text,
            "traceback": traceback_of(error),
            "consequence": consequence,
            "own": own,
        }
        BaseException.with_traceback(error, None)  # a kept traceback keeps the dead group's sockets open
        self.mark("error", self.error)
        self.set_phase("preempted" if isinstance(error, Preempted) else "failed", text)
        if self.training is not None:
            self.training.meeting.retire_rank()
        self.cut_connections()
