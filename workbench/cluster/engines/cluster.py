"""One lab's engines over ipyparallel: which process is which rank, and nothing of training."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq

from workbench.cluster.engines import engine_server
from workbench.cluster.engines.cluster_state import ClusterState
from workbench.cluster.engines.engine_admission import admit_engines
from workbench.cluster.engines.engine_probe import Engine
from workbench.cluster.engines.engine_renewal import EngineRenewal
from workbench.cluster.engines.process_health import ProcessHealth
from workbench.cluster.engines.spare_engines import SpareEngines
from workbench.cluster.processes.duration_history import describe_start, time_work, wait_with_progress
from workbench.cluster.processes.lab_place import (
    ClusterError,
    LabPlace,
    alive,
    check_connection,
    host_name,
    this_process,
)
from workbench.cluster.processes.lab_processes import (
    LabProcesses,
    detach_processes,
    end_processes,
    start_guard,
    wait_for,
)
from workbench.cluster.processes.process_logs import read_log_tail
from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.row_encoding import RowBatch
from workbench.cluster.transport.row_subscriber import RowSubscriber
from workbench.cluster.transport.rpc_client import RpcClient
from workbench.settings.describe_error import text_of

START_TIMEOUT = 120.0  # seconds to come up
FIND_TIMEOUT = 10.0  # seconds to find the engines of an existing cluster


class Cluster(ClusterState):
    """`ranks` engines and `spare` ones.

    connection: the client file of an existing cluster; None to start one here
    """

    def __init__(self, name: str, ranks: int, device: str | int = "auto", connection: Path | str | None = None,
                 spare: int = 0) -> None:  # fmt: skip
        super().__init__(name, ranks, device, connection)
        self.on_batch: Callable[[RowBatch], None] = lambda batch: None
        self.owner: list[float] | None = None
        self.health = ProcessHealth(self)
        self.spares = SpareEngines(self, spare)
        self.renewal = EngineRenewal(self, self.health)
        self.guard: subprocess.Popen[bytes] | None = None
        self._context: zmq.Context[Any] | None = None
        self._ended = False  # closing is complete

    def start_or_connect(self) -> Cluster:
        """On a thread: starts controller and engines, or connects to an existing cluster. `wait` waits for them."""
        self.place, self.keys = LabPlace.make_place(self.name), CurveKeys.make_pair()
        self.guard = start_guard(self.place)
        self.processes = LabProcesses(self.place) if self.connection is None else None
        threading.Thread(target=self._finish_start, name="cluster start", daemon=True).start()
        return self

    def _finish_start(self) -> None:
        try:
            with time_work(describe_start(self.ranks)):
                if self.connection is None:
                    self._start_new_engines()
                else:
                    self._find_existing_engines(self.connection)
                self._admit_engines()
            self.progress = "ready"
            self.spares.start_watch()
        except BaseException as error:
            if not self.closed:
                self.error, self.progress = error, f"failed: {text_of(error)}"
            self._end_processes()
        finally:
            self._ready.set()

    def wait_settled(self, timeout: float) -> bool:
        return self._ready.wait(timeout)

    def wait(self, timeout: float | None = None) -> Cluster:
        """Raises ClusterError with the reason if the engines fail, or are not up in time."""
        if not wait_with_progress(self._ready, timeout, describe_start(self.ranks)):
            raise ClusterError(f"the engines are not up after {timeout:g} s: {self.progress}")
        if self.error:
            raise self.error
        if self.closed:
            raise ClusterError(f"lab {self.name!r} is closed")
        return self

    # -- coming up

    def _start_new_engines(self) -> None:
        assert self.processes
        self.processes.start_lab(self.ranks)
        file = self.place.path / "security" / "ipcontroller-client.json"
        self._wait_until(self.processes.introduce_controller)
        self.progress = "loading torch"
        self.client = self._connect_client(file)
        self._wait_until(self._count_engines)
        self.processes.note_children()

    def _count_engines(self) -> bool:
        if up := len(self.client.ids):
            self.progress = f"{up} of {self.ranks} engines up"
        return up >= self.ranks

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        assert self.processes
        deadline = time.monotonic() + START_TIMEOUT
        while not condition():
            self.processes.check_children()
            if self.closed:
                raise ClusterError("the lab was closed while it came up")
            if time.monotonic() > deadline:
                raise ClusterError(self._describe_missing())
            time.sleep(0.05)

    def _describe_missing(self) -> str:
        late = ["controller"]
        if self.client is not None:
            late = [f"engine {r}" for r in range(self.ranks) if r not in self.client.ids]
        return f"not up within {START_TIMEOUT:g} s: {', '.join(late)}.{read_log_tail(self.place, late[0])}"

    def _connect_client(self, connection: Path | str) -> Any:
        import ipyparallel

        by_file = {"connection_info": str(connection)}
        how = {"profile": str(connection)[8:]} if str(connection).startswith("profile:") else by_file
        # some sockets of the client have no linger; unsent messages would keep their descriptors
        self._context = self._context or zmq.Context()
        self._context.linger = 0
        return ipyparallel.Client(**how, timeout=FIND_TIMEOUT, context=self._context)

    def _find_existing_engines(self, connection: Path | str) -> None:
        self.progress = "looking for the engines"
        by_profile = str(connection).startswith("profile:")
        if not by_profile:
            check_connection(Path(connection))
        try:
            self.client = self._connect_client(connection)
        except (TimeoutError, OSError) as error:
            raise _explain_silence(connection, error) from None
        if not wait_for(lambda: len(self.client.ids) >= self.ranks, FIND_TIMEOUT):
            there = len(self.client.ids)
            raise ClusterError(
                f"ranks={self.ranks}: the cluster has {there} engine{'s' * (there != 1)}; "
                f"start {self.ranks - there} more (ipengine), or ask for ranks={there or 1}"
            )

    def _admit_engines(self) -> None:
        self.engines = admit_engines(self, list(self.client.ids)[: self.ranks])
        self._open_sockets()
        self.save_engines()
        self._activate_magic()

    def _open_sockets(self) -> None:
        self._rpc = RpcClient({e.rank: e.rpc_address for e in self.engines}, self.keys)
        self.row_subscriber = RowSubscriber(
            [e.rows_address for e in self.engines], self.keys, lambda batch: self.on_batch(batch)
        )
        self.health.start_watch()

    def _activate_magic(self) -> None:
        shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
        if shell is not None:
            self.view.activate()

    def list_ranks(self, status_of_ranks: dict[int, dict[str, Any]]) -> list[dict[str, Any]]:
        """Returns each rank's process and last status."""
        keys = ("state", "step", "busy")
        last = {e.process_key: e for e in self.engines}.values()  # newest rank of each process
        return [{"rank": e.rank, "engine": e.id, "host": e.host, "pid": e.pid, "device": self.devices[e.rank],
                 **{k: status_of_ranks.get(e.rank, {}).get(k) for k in keys}} for e in last]  # fmt: skip

    @property
    def view(self) -> Any:
        """The ipyparallel view of all living ranks, in order."""
        view = self.client.direct_view(list(dict.fromkeys(e.id for e in self.engines if e.id in self.client.ids)))
        view.block = True
        return view

    def describe_death(self, rank: int) -> str | None:
        return self.health.describe_death(rank)

    def describe_controller_death(self) -> str | None:
        return self.health.describe_controller_death()

    @property
    def is_usable(self) -> bool:
        return not self.closed and self.error is None

    @property
    def is_healthy(self) -> bool:
        return self.is_ready and self.is_usable and not self.has_stuck_rank and self.health.is_intact

    # -- the end

    def detach(self) -> None:
        """Engines and controller stay for good.

        If this kernel dies before it writes the file, its guard ends the lab, and no other kernel owns it yet.
        """
        if self.row_subscriber:
            self.row_subscriber.close()  # frees a descriptor
        self._send_owner(None)
        try:
            self.place.write_state(owner=None)
        except BaseException:
            self._send_owner(this_process())
            raise
        detach_processes(self.processes)
        self._release_client()

    def _send_owner(self, owner: list[float] | None) -> None:
        self.rpc.ask_all("own", owner=owner, home=host_name())

    def close(self) -> None:
        """Ends what this lab started; in an existing cluster, only its own work there. A second call continues the
        first.
        """
        if self._ended:
            return
        self.closed = True
        if self.is_guest or self.place.state.get("owner") is None:  # another kernel owns it or may attach
            return self._release_client()
        if self.is_ready and not self.place.state.get("here"):
            for engine in self.engines:
                with contextlib.suppress(Exception):  # a silent engine must not block the end
                    if not self.health.describe_controller_death() and not self.describe_death(engine.rank):
                        self.call(engine.id, engine_server.close_server, timeout=10)
        self._end_processes()

    def _end_processes(self) -> None:
        self._close_connections()
        if self.processes:
            self.processes.close()
        end_processes(self.place)
        if self.processes:
            self.processes.reap_children()
        self.place.remove_folder()
        self._release_client()

    def _close_connections(self) -> None:
        """The process may have no descriptors left, so sockets close first."""
        self.closed = True
        self.spares.end_event.set()
        self.renewal.end_event.set()
        for part in (self.health, self.row_subscriber, self._rpc):
            if part:
                part.close()
        if self.client is not None:
            self.client.close(linger=0)
        if self._context is not None:
            self._context.destroy(0)

    def _release_client(self) -> None:
        self._close_connections()
        if self.guard and self.guard.stdin:
            self.guard.stdin.close()
            self.guard.wait(5)
        self._ended = True

    @classmethod
    def attach_to(cls, place: LabPlace) -> Cluster:
        """Returns the cluster of a detached lab or, as a guest, of another kernel's lab.

        Raises ClusterError if the lab has ended, or if another kernel attaches to the detached lab first.
        """
        if not (state := place.read_state()):
            raise place.explain_end()
        self = cls(state["name"], state["ranks"], state["device"], None if state["here"] else state["connection"])
        self.place, self.keys = place, CurveKeys(*state["keys"])
        self.is_guest, self.owner = alive(state["owner"]), state["owner"]
        self.engines = [Engine(**e) for e in state["engines"]]
        self.devices, self.backend = state["devices"], state["kind"]
        try:
            self.client = self._connect_client(state["connection"])
        except (TimeoutError, OSError) as error:
            self._release_client()
            raise _explain_silence(state["connection"], error) if place.read_state() else place.explain_end() from None
        self._open_sockets()
        if not self.is_guest:
            try:
                place.claim_ownership()
            except BaseException:
                self._release_client()
                raise
            self.guard = start_guard(place)
            self.processes = LabProcesses(place) if state["here"] else None  # for later engines
            self._send_owner(this_process())
        self._activate_magic()
        self.progress = "ready"
        self._ready.set()
        return self


def _explain_silence(connection: Path | str, error: Exception) -> ClusterError:
    return ClusterError(f"{connection}: no controller answers there ({error})")
