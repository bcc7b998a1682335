"""Tracks a lab's processes and how they ended, and ends stuck engines.

It asks the system, never the processes. It signals only what this lab started, checked by pid and create time.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Collection, Iterable

import psutil

from workbench.cluster.engines.cluster_state import ClusterState
from workbench.cluster.engines.engine_probe import Engine
from workbench.cluster.processes.exit_causes import ResourceShortage
from workbench.cluster.processes.fork_server import ForkedEngine
from workbench.cluster.processes.lab_place import alive, host_name
from workbench.cluster.processes.process_logs import describe_exit_code
from workbench.cluster.processes.supervised_thread import SupervisedThread

POLL_INTERVAL = 1.0  # seconds
PROBE_INTERVAL = 2.0  # seconds between attempts to reach a controller without a known process
KILL_TIMEOUT = 2.0  # seconds
TERM_TIMEOUT = 1.0  # seconds
END_POLL_INTERVAL = 0.02  # seconds, for ending engines


class ProcessHealth:
    """The state of one cluster's processes."""

    def __init__(self, cluster: ClusterState) -> None:
        self.cluster = cluster
        self.shortages = ResourceShortage()
        self._probed_at = -PROBE_INTERVAL
        self._controller_answers = True
        self._over = threading.Event()
        self._watch = SupervisedThread("engine watch", self._disconnect_dead_engines, self._over)
        self._unregister_lock, self._unregistered = (
            threading.Lock(),
            set[int](),
        )  # dead engines that the controller knows

    def start_watch(self) -> None:
        self._watch.start()

    def close(self) -> None:
        """Stops the watch, and drops later signals."""
        self._over.set()
        if self._watch.alive:  # it uses sockets that close next
            self._watch.join(POLL_INTERVAL)

    def _disconnect_dead_engines(self) -> None:
        for engine in list(self.cluster.engines):
            if self.describe_death(engine.rank) and engine.host == host_name():  # another machine may be unreachable
                self.cluster.rpc.disconnect_rank(engine.rank, engine.rpc_address)
        self._over.wait(POLL_INTERVAL)

    @property
    def is_intact(self) -> bool:
        return not self.describe_controller_death() and not any(
            self.describe_death(e.rank) or self._has_ended(e) for e in self.cluster.engines
        )

    @staticmethod
    def _has_ended(engine: Engine) -> bool:
        """Whether the engine's process is over, even before its exit code."""
        return engine.host == host_name() and not alive([engine.pid, engine.created])

    @property
    def controller_trouble(self) -> str:
        """Text if only the controller is gone; else empty."""
        if not self.cluster.is_ready or self.cluster.closed or not (how := self.describe_controller_death()):
            return ""
        return f"the controller {how}: a run goes on, %%px cells do not; the next lab.run() starts new engines"

    def describe_death(self, rank: int) -> str | None:
        """Returns how the engine of `rank` ended; None while it lives."""
        engine = self.cluster.engines[rank]
        how = self._describe_death(engine)
        if how and engine.id in self.cluster.client.ids:  # without a nanny, calls would wait for the dead engine
            self.unregister_engine(engine)
        return how

    def unregister_engine(self, engine: Engine) -> None:
        """Reports a dead engine to the controller, once."""
        client = self.cluster.client
        with self._unregister_lock:
            if engine.id not in self._unregistered:
                client._send(client._query_socket, "unregistration_request", content={"id": engine.id})
                self._unregistered.add(engine.id)

    def _describe_death(self, engine: Engine) -> str | None:
        if child := self._find_child(f"engine {engine.id}"):
            if (code := child.poll()) is None:
                return None
            return f"(pid {engine.pid}) ended with {describe_exit_code(code)}{self._explain_death(engine.pid, code)}"
        if engine.host == host_name():
            if alive([engine.pid, engine.created]):
                return None
            return f"(pid {engine.pid}) is gone{self._explain_death(engine.pid)}"
        return None if engine.id in self.cluster.client.ids else f"(pid {engine.pid} on {engine.host}) is gone"

    def _explain_death(self, pid: int, code: int | None = None) -> str:
        words = self.shortages.words(pid, code)
        return f": {words}" if words else ""

    def note_shortages(self) -> None:
        """Reads the system's shortage counts, to explain later deaths."""
        self.shortages.read_counts(engine.pid for engine in self.cluster.engines if engine.host == host_name())

    def describe_controller_death(self) -> str | None:
        """Returns how the controller ended; None while it lives."""
        if child := self._find_child("controller"):
            return (
                None if (code := child.poll()) is None else f"(pid {child.pid}) ended with {describe_exit_code(code)}"
            )
        known = next((p for p in self.cluster.place.state.get("processes", []) if p[2] == "controller"), None)
        if known is None:
            return None if self._probe_controller() else "does not answer any more"
        return None if alive(known[:2]) else f"(pid {int(known[0])}) is gone"

    def _find_child(self, what: str) -> subprocess.Popen[bytes] | ForkedEngine | None:
        """Only this kernel's own processes report how they ended."""
        child = self.cluster.processes.started.get(what) if self.cluster.processes else None
        return None if isinstance(child, ForkedEngine) and child.is_unreported else child

    def _probe_controller(self) -> bool:
        """Whether the controller of another kernel accepts connections. Only a refusal counts as no."""
        if time.monotonic() - self._probed_at > PROBE_INTERVAL:
            self._probed_at = time.monotonic()
            url = str(self.cluster.client._config["registration"])
            address, _, port = url.split("//")[-1].rpartition(":")
            self._controller_answers = True
            with contextlib.suppress(OSError, ValueError):
                try:
                    socket.create_connection((address, int(port)), timeout=0.5).close()
                except ConnectionRefusedError:
                    self._controller_answers = False
        return self._controller_answers

    def give_up_engines(self, ranks: Iterable[int]) -> list[int]:
        """Bars these ranks' engines from further runs, and ends this lab's. Returns the ranks that lost engines."""
        late = list(ranks)
        self.cluster.has_stuck_rank |= bool(late)
        return [rank for rank in late if self._end_engine(self.cluster.engines[rank])]

    def is_own(self, engine: Engine) -> bool:
        """Whether the lab may signal the engine: it lives, and this lab started it here."""
        noted = self.cluster.place.state.get("processes", [])
        own = engine.host == host_name() and any(int(p[0]) == engine.pid for p in noted) and not self.cluster.is_guest
        return own and alive([engine.pid, engine.created])

    def send_signal(self, rank: int, what: int) -> bool:
        """Returns whether it did: only this lab's engines get signals."""
        engine = self.cluster.engines[rank]
        if not self.is_own(engine):
            return False
        with contextlib.suppress(psutil.Error):
            psutil.Process(engine.pid).send_signal(what)
            return True
        return False

    def send_later(self, rank: int, what: int, seconds: float) -> None:
        """Signals the engine after `seconds`, unless the cluster closes."""

        def wait() -> None:
            if not self._over.wait(seconds):
                self.send_signal(rank, what)

        threading.Thread(target=wait, name=f"grace of rank {rank}", daemon=True).start()

    def describe_stop(self, rank: int) -> str:
        """Text if the system has stopped this machine's process of `rank`; else empty."""
        engine = self.cluster.engines[rank]
        if engine.host == host_name():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(engine.pid).status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
                    return f"its process (pid {engine.pid}) is stopped, as by SIGSTOP"
        return ""

    def end_rank(self, rank: int) -> bool:
        """Ends this lab's engine of `rank` and its children. Returns whether it is gone."""
        return self._end_engine(self.cluster.engines[rank])

    def retire_engines(self, engines: Collection[Engine]) -> None:
        """Ends engines without a rank, and their children; kills them after `TERM_TIMEOUT` s."""
        children = []
        for engine in engines:
            with contextlib.suppress(psutil.Error):
                if self.is_own(engine):
                    process = psutil.Process(engine.pid)
                    children += process.children(recursive=True)
                    process.send_signal(signal.SIGTERM)
        until = time.monotonic() + TERM_TIMEOUT
        while time.monotonic() < until and not all(self._describe_death(engine) for engine in engines):
            time.sleep(END_POLL_INTERVAL)
        for child in children:
            with contextlib.suppress(psutil.Error):
                child.kill()
        for engine in engines:
            self._end_engine(engine)
            try:
                self.cluster.place.drop_process(engine.pid)
                self.unregister_engine(engine)
            except OSError:  # a lab that closes meanwhile removes its folder; one that detaches closes only its client
                if not self.cluster.closed:
                    raise

    def _end_engine(self, engine: Engine) -> bool:
        if not self.is_own(engine):
            return False
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(engine.pid)
            every = [process, *process.children(recursive=True)]
            for one in every:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            if child := self._find_child(f"engine {engine.id}"):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    child.wait(KILL_TIMEOUT)  # another waiter would take its exit code
            else:
                process.wait(KILL_TIMEOUT)
        return self._describe_death(engine) is not None
