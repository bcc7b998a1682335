"""Replaces engines whose earlier runs would change a later run.

A custom loop (a script or a function) needs unused engines, so the lab replaces engines before and after it. For
engines that this lab did not start see process_restart.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Sequence
from typing import Any, Protocol

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.cluster_state import ClusterState
from workbench.cluster.engines.engine_admission import (
    START_TIMEOUT,
    find_start_obstacle,
    replace_engines,
    wait_for_engines,
)
from workbench.cluster.engines.engine_probe import Engine, probe_engines
from workbench.cluster.engines.process_health import ProcessHealth
from workbench.cluster.processes.duration_history import describe_start, time_work
from workbench.cluster.processes.lab_place import ClusterError
from workbench.settings.describe_error import text_of

PAUSE_AFTER_RUN = 0.3  # seconds after a run: the lab may close first
POLL_INTERVAL = 0.05  # seconds
ANSWER_TIMEOUT = 10.0  # seconds


class RunView(Protocol):
    """over: set at the run's end"""

    @property
    def step(self) -> int: ...
    @property
    def ranks(self) -> Sequence[int]: ...
    @property
    def over(self) -> threading.Event: ...


class EngineRenewal:
    """Replaces engines of a cluster.

    starts_ahead: whether to start engines during a custom loop; False if no run follows
    trouble:      why engines were not replaced, or ""
    """

    def __init__(self, cluster: ClusterState, health: ProcessHealth) -> None:
        self.cluster, self._health = cluster, health
        self.starts_ahead, self.trouble = True, ""
        self.end_event = threading.Event()
        self._unranked: list[int] = []  # ipyparallel ids of engines without a rank
        self._lock = threading.Lock()

    def follow_run(self, live: RunView) -> None:
        """On a thread: replaces the engines of a custom loop when it ends."""
        if not self.cluster.is_guest:
            threading.Thread(target=self._follow_run, args=(live,), name="engine renewal", daemon=True).start()

    def _follow_run(self, live: RunView) -> None:
        try:
            while not (live.step or live.over.wait(POLL_INTERVAL)):  # its first step ends its imports
                continue
            if self.starts_ahead and self.cluster.processes is not None and not live.over.is_set():
                with self._lock:
                    self._start_engines(len(live.ranks))
            live.over.wait()
            if not self.end_event.wait(PAUSE_AFTER_RUN):
                self.replace_used(live.ranks, leads=False)
        except Exception as error:
            if not self.end_event.is_set():
                self.trouble = f"engines that have run a script or a loop are not replaced yet: {text_of(error)}"

    def replace_used(self, ranks: Sequence[int], leads: bool) -> None:
        """Replaces engines of `ranks` that the next run cannot use. Raises ClusterError if it cannot.

        leads: whether the next run is a custom loop, which needs unused processes
        """
        with self._lock:
            if used := self._list_used(ranks, leads):
                self._replace_engines(used)
            self.trouble = ""

    def _list_used(self, ranks: Sequence[int], leads: bool) -> list[int]:
        """Returns the free ranks that the next run cannot use."""
        status, silent, until = dict[int, dict[str, Any]](), set(ranks), time.monotonic() + ANSWER_TIMEOUT
        while silent and time.monotonic() < until:
            answers = self.cluster.rpc.ask_all("status", timeout=1.0, ranks=silent)
            status |= {rank: answer for rank, answer in answers.items() if isinstance(answer, dict)}
            silent = {rank for rank in ranks if rank not in status and not self.cluster.describe_death(rank)}
        free = {rank: answer["runs"] for rank, answer in sorted(status.items()) if answer["over"]}
        return [rank for rank, runs in free.items() if "loop" in runs or (leads and runs)]

    def _replace_engines(self, ranks: list[int]) -> None:
        cluster = self.cluster
        if cluster.is_guest:
            raise ClusterError(
                f"the engines of ranks {ranks} have run a training loop before, and only the kernel that owns lab "
                f"{cluster.name!r} can replace them; run there, or create another lab: Lab(name='mine')"
            )
        with cluster.start_lock:
            if cluster.processes is None:
                with cluster.hold_waits():
                    replace_engines(cluster, dict(zip(ranks, self._restart_engines(ranks), strict=True)))
                return
            self._start_engines(len(ranks))
            old = replace_engines(cluster, dict(zip(ranks, self._unranked[: len(ranks)], strict=True)))
            del self._unranked[: len(ranks)]
        threading.Thread(target=self._health.retire_engines, args=(old,), name="engine end", daemon=True).start()

    def _start_engines(self, count: int) -> None:
        """Starts engines until `count` without a rank are up."""
        cluster, owned = self.cluster, self.cluster.processes
        assert owned is not None
        self._unranked = [number for number in self._unranked if owned.started[f"engine {number}"].poll() is None]
        if (missing := count - len(self._unranked)) <= 0:
            return
        if why := find_start_obstacle(cluster, 0):
            raise ClusterError(f"engines cannot be replaced: {why}")
        first = owned.next_engine
        numbers = list(range(first, first + missing))
        try:
            with time_work(describe_start(missing, " more")) as work:
                for number in numbers:
                    owned.start_engine(number)
                wait_for_engines(cluster, numbers, work.tell)
        except BaseException:
            for number in numbers:
                owned.dismiss_engine(number)
            raise
        self._unranked += numbers

    def _restart_engines(self, ranks: Collection[int]) -> list[int]:
        """Restarts engines that this lab did not start. Returns their new ipyparallel ids, in the order of `ranks`."""
        cluster = self.cluster
        old, known = [cluster.engines[rank] for rank in ranks], set(cluster.client.ids)
        with time_work(describe_start(len(old), " more")) as work:
            for engine in old:
                cluster.call(engine.id, engine_server.restart_engine, cluster.place.path.name, timeout=10)
                self._health.unregister_engine(engine)
            admitted, until = dict[tuple[str, int], int](), time.monotonic() + START_TIMEOUT
            while not all((engine.host, engine.pid) in admitted for engine in old):
                if self.end_event.wait(POLL_INTERVAL) or time.monotonic() > until:
                    raise ClusterError(_describe_late([e for e in old if (e.host, e.pid) not in admitted]))
                for number in set(cluster.client.ids) - known:
                    known.add(number)
                    (came,) = probe_engines(
                        cluster.client, [number], cluster.find_controller_address(), timeout=START_TIMEOUT
                    )
                    admitted[came.host, came.pid] = number
                work.tell()
        return [admitted[engine.host, engine.pid] for engine in old]


def _describe_late(late: Sequence[Engine]) -> str:
    named = ", ".join(map(str, late))
    return (f"{named} had to restart after a training loop and was not up within {START_TIMEOUT:g} s; see its log, "
    f"or start the engines and create the lab again")  # fmt: skip
