"""Interrupts a resize at every line: no new rank may wait for an invitation that never comes."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.engines import engine_admission
from workbench.cluster.processes import uninterruptible
from workbench.cluster.run import command_queue, run_resize
from workbench.cluster.run.command_queue import CommandQueue
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_ending import RunEnding
from workbench.experiment import Experiment

TRACED = {module.__file__ for module in (engine_admission, command_queue, run_resize, uninterruptible)}
MOST = 1000  # lines, more than there are


def interrupted(call: Callable[[], Any], line: int) -> bool:
    """Calls `call` and interrupts it before the numbered line of the traced modules; returns whether it got that
    far.
    """
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in TRACED:
            return None
        if event == "line":
            count += 1
            if count == line:
                os.kill(os.getpid(), signal.SIGINT)
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


class Engines:
    """Engines without processes that answer like a worker, and record sessions, starts and ends."""

    def __init__(self, count: int) -> None:
        self.engines = [SimpleNamespace(rank=r, id=r, process_key=100 + r) for r in range(count)]
        self.jobs: dict[int, tuple[str, int]] = {}  # by process: (run id, rank) of its last session
        self.waits: dict[int, bool] = {}  # by process: whether that session waits for an invitation
        self.rpc, self.start_lock, self.devices = self, nullcontext(), ["cpu"] * count
        self.health, self.processes, self.is_guest = SimpleNamespace(describe_controller_death=lambda: ""), None, False

    def describe_death(self, rank: int) -> None:
        return None

    def connect_rank(self, rank: int, address: str) -> None: ...

    def save_engines(self) -> None: ...

    def ask_all(self, what: str, ranks: Any, timeout: float, of: Any = None) -> dict[int, Any]:
        return {rank: self._said(what, self.engines[rank].process_key, of) for rank in ranks}

    def _said(self, what: str, process: int, of: Any) -> Any:
        run_id, rank = self.jobs.get(process, ("", None))
        if what == "abort" and run_id == of[0] and rank in of[1]:
            self.waits[process] = False
        waits = self.waits.get(process, False)
        return {"over": not waits, "as": rank, "run_id": run_id, "sent": {},
                "state": "waiting" if waits else "stopped"}  # fmt: skip


class Training:
    """The kernel's view of a run with two training ranks on four engines."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cluster, self.run_id, self.state, self.step = Engines(4), "g", "running", 7
        self.changes = Changes(Experiment(ranks=2).checked(), [])
        self.members, self.used_ranks, self.successor_ranks = (0, 1), {0, 1}, dict[int, int]()
        self.ending, self.preempted = RunEnding(range(2)), dict[int, float | None]()
        self.commands = CommandQueue(self)  # type: ignore[arg-type]
        self.queue_command, self.over = self.commands.put_command, SimpleNamespace(is_set=lambda: False)
        self.resize_lock = nullcontext()
        self.session_arguments, self.pickled_experiment, self.secret, self.spool_folders = {}, b"", "", dict[int, str]()
        self.cluster.jobs |= {100: ("g", 0), 101: ("g", 1)}
        self.cluster.waits |= {100: True, 101: True}  # that is: busy
        patch.setattr(run_resize, "begin_sessions", self.begin)
        patch.setattr(run_resize.last_rows, "fetch_departed_rows", lambda *rest: None)
        patch.setattr(
            engine_admission, "replace", lambda e, rank: SimpleNamespace(**{**vars(e), "rank": rank, "rpc_address": ""})
        )
        for engine in self.cluster.engines:
            engine.rpc_address = ""

    def admit_ranks(self, new: list[int]) -> None:
        self.used_ranks |= set(new)
        self.ending.admit_ranks(new)

    def begin(self, cluster: Any, job: Any, blob: bytes, new: list[int], secret: str) -> dict[int, str]:
        for process in (cluster.engines[rank].process_key for rank in new):
            cluster.waits[process] = True
        cluster.jobs |= {cluster.engines[rank].process_key: ("g", rank) for rank in new}
        return {}

    def note_error(self, failure: BaseException) -> None:
        raise failure

    def carried(self) -> list[list[int]]:
        """Carries all orders; returns the members of each resize among them."""
        asked = []
        while not self.commands._queue.empty():
            what, everyone, to, rest = self.commands._queue.get()
            if what == "request":
                asked.append(rest["pending"].request["members"])
            else:
                self.commands._send_command(what, everyone, to, rest)
        return asked

    @property
    def waiting(self) -> set[int]:
        """Returns the ranks that wait for an invitation."""
        return {self.cluster.jobs[p][1] for p, waits in self.cluster.waits.items() if waits} - set(self.members)


@pytest.fixture(autouse=True)
def _heard() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_new_ranks_are_invited_or_dismissed_at_any_interrupt_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    came = {True: 0, False: 0}
    for line in range(1, MOST):
        live = Training(monkeypatch)
        broken = interrupted(lambda live=live: run_resize.resize_run(live, 4), line)  # type: ignore[arg-type, misc]
        asked = live.carried()
        came[bool(asked)] += 1
        assert asked in ([], [[0, 1, 2, 3]]), line
        assert live.waiting == ({2, 3} if asked else set()), line
        pending = [one for one in live.changes.history if one.refused is None]
        assert len(pending) == len(asked) and live.ending.ranks - {0, 1} == live.waiting, line
        if not asked:  # all is as before: all engines are still available
            run_resize.resize_run(live, 4)  # type: ignore[arg-type]
            (members,) = live.carried()
            assert live.waiting == set(members) - {0, 1} and len(members) == 4, line
        if not broken:
            break
    assert not broken and min(came.values()) > 3, came


def test_starting_engines_join_the_lab_or_end_at_any_interrupt_of_the_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_admission, "time_work", lambda work: nullcontext(SimpleNamespace(tell=lambda: None)))
    monkeypatch.setattr(engine_admission, "wait_for_engines", lambda *rest: None)
    for line in range(1, MOST):
        cluster, up = Engines(2), set[int]()
        cluster.row_subscriber = SimpleNamespace(connect_engine=lambda address: None)  # type: ignore[attr-defined]
        cluster.processes = SimpleNamespace(next_engine=2, start_engine=up.add, dismiss_engine=up.discard)  # type: ignore[attr-defined]
        found = [SimpleNamespace(rank=r, id=r, process_key=100 + r, rpc_address="", rows_address="") for r in (2, 3)]
        monkeypatch.setattr(engine_admission, "admit_engines", lambda cluster, numbers, found=found: found)
        broken = interrupted(lambda c=cluster: engine_admission.start_more_engines(c, 2), line)  # type: ignore[misc, arg-type]
        assert {e.rank for e in cluster.engines} - {0, 1} == up, line
        if not broken:
            break
    assert not broken and up == {2, 3}


def test_two_requests_at_once_take_different_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Training(monkeypatch)
    live.resize_lock = threading.RLock()
    invite, threads = run_resize._begin_sessions, []

    def invites(run: Any, new: list[int]) -> None:
        if not threads:  # a second request comes after the first one has chosen its engine
            threads.append(threading.Thread(target=run_resize.resize_run, args=(live, 3)))
            threads[0].start()
            threads[0].join(0.2)
        invite(run, new)

    monkeypatch.setattr(run_resize, "_begin_sessions", invites)
    run_resize.resize_run(live, 3)  # type: ignore[arg-type]
    threads[0].join(60)
    assert sorted(live.carried()) == [[0, 1, 2], [0, 1, 3]]


def test_a_rank_that_dies_before_it_waits_is_missed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    live = Training(monkeypatch)
    live.cluster.describe_death = lambda rank: "ended with signal SIGKILL" if rank == 2 else None  # type: ignore[method-assign]
    monkeypatch.setattr(run_resize, "list_idle", lambda live: [2, 3])
    live.begin = lambda *rest, **more: {}  # type: ignore[method-assign]
    monkeypatch.setattr(run_resize, "begin_sessions", live.begin)
    with pytest.raises(
        run_resize.RankNotBegun, match="ranks 2, 3 did not join: the engine of rank 2 ended with signal"
    ):
        run_resize.resize_run(live, 4)  # type: ignore[arg-type]
    assert live.ending.ranks == {0, 1} and live.commands.dismissed == {2, 3}
