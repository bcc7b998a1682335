"""The engines of one lab, and the means to reach them, as a cluster's parts see them."""

from __future__ import annotations

import contextlib
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from workbench.cluster.engines.engine_probe import Engine
from workbench.cluster.processes.lab_place import ClusterError, LabPlace
from workbench.cluster.processes.lab_processes import LabProcesses
from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.row_subscriber import RowSubscriber
from workbench.cluster.transport.rpc_client import RpcClient


class ClusterState(ABC):
    """The state that these parts share.

    connection: the client file of an existing cluster, None if the lab starts one here
    start_lock: for the thread that starts further engines
    """

    place: LabPlace
    keys: CurveKeys

    def __init__(self, name: str, ranks: int, device: str | int, connection: Path | str | None) -> None:
        self.name, self.ranks, self.device, self.connection = name, ranks, device, connection
        self.progress, self.engines = "starting controller", list[Engine]()
        self.devices, self.backend = ["cpu"] * ranks, "gloo"
        self.client: Any = None
        self.error: BaseException | None = None
        self.is_guest = False  # another kernel owns the lab
        self.has_stuck_rank = False  # a rank did not leave its last run
        self.processes: LabProcesses | None = None
        self.start_lock = threading.RLock()
        self.row_subscriber: RowSubscriber | None = None
        self.closed = False  # closing has begun
        self._rpc: RpcClient | None = None
        self._ready = threading.Event()

    @property
    def is_ready(self) -> bool:
        return self._ready.is_set() and self.error is None

    @property
    def rpc(self) -> RpcClient:
        if self._rpc is None:
            raise ClusterError("the engines are not up")
        return self._rpc

    @contextlib.contextmanager
    def hold_waits(self) -> Iterator[None]:
        """Callers of `wait` wait while engines restart inside."""
        self._ready.clear()
        self.progress = "restarting engines"
        try:
            yield
        finally:
            self.progress = "ready"
            self._ready.set()

    def save_engines(self) -> None:
        """Saves the engines for attaching kernels."""
        file = self.connection or self.place.path / "security" / "ipcontroller-client.json"
        self.place.write_state(
            engines=[e.as_dict() for e in self.engines], keys=list(self.keys), connection=str(file), device=self.device,
            ranks=self.ranks, devices=self.devices, kind=self.backend, here=self.connection is None,
        )  # fmt: skip

    def find_controller_address(self) -> str:
        """Returns the controller's address, from which engines find their own address on the route."""
        return str(self.client._config["registration"]).split("//")[-1].rsplit(":", 1)[0]

    def call(self, engine: int, function: Callable[..., Any], *rest: Any, timeout: float = 60.0) -> Any:
        """function: of `engine_server`; engine: ipyparallel's id"""
        return self.client[engine].apply_async(function, *rest).get(timeout)

    @abstractmethod
    def describe_death(self, rank: int) -> str | None:
        """Says how the engine of `rank` ended; None while it lives."""

    @abstractmethod
    def describe_controller_death(self) -> str | None:
        """Says how the controller ended; None while it lives."""
