"""Answers the kernel's questions to an engine, during and between runs.

Handlers run on the thread of the RPC socket. An answer that is not bytes travels as JSON.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from workbench.cluster.engines import process_restart
from workbench.cluster.observe import dead_links
from workbench.cluster.processes.stack_dump import format_stacks
from workbench.cluster.transport import disk_rows

RANK_FIELDS = ("rank", "device", "joins", "owns_process", "store", "kind", "loopback")  # of one rank only


class RpcHandlers:
    """One method for each question to an EngineServer."""

    session: Any
    session_arguments: dict[str, Any]
    pickled_experiment: bytes
    secret: str
    run_folder: Path
    sent_rows: dict[str, int]
    learned_classes: list[type]
    last_error: str
    is_end_reported: bool
    owner: list[float] | None
    owner_host: str

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    def on_status(self, blob: bytes) -> dict[str, Any]:
        """Returns the session's status, run id and rank, whether it is over, and its counts of sent rows.

        runs: this process's kinds of run, see process_restart.py
        """
        runs = process_restart.list_run_kinds()  # first: a loop that begins now must not look finished
        over = self.is_end_reported = not self.is_busy  # before the status, which then is the last
        status = self.session.status() if self.session else {"state": "idle", "step": 0, "busy": "", "error": None}
        who = {"run_id": self.session_arguments.get("run_id", ""), "as": self.session_arguments.get("rank")}
        return {**status, **who, "over": over, "sent": self.sent_rows, "trouble": self.last_error,
                "runs": runs}  # fmt: skip

    def on_request(self, blob: bytes, request: dict[str, Any]) -> None:
        if self.session is not None:
            self.session.request(request)

    def on_hurry(self, blob: bytes) -> None:
        if self.is_busy:
            self.session.hurry()

    def on_abort(self, blob: bytes, asked: bool = False) -> None:
        if self.is_busy:
            self.session.abort(asked)

    def on_outlive(self, blob: bytes, so: bool = True) -> str:
        """Prepares or cancels (`so` is False) a rank's eviction. Returns why this rank cannot continue, or ""."""
        if self.session is None:
            return "its engine has no run"
        reason: str = self.session.set_outliving(so)
        return reason

    def on_without(self, blob: bytes, members: list[int]) -> None:
        """members: unreachable"""
        if self.is_busy:
            self.session.leave_behind(members)

    def on_note(self, blob: bytes, name: str, detail: dict[str, Any]) -> None:
        if self.is_busy:
            self.session.mark(name, detail)

    def on_stacks(self, blob: bytes) -> str:
        return format_stacks()

    def on_profile(self, blob: bytes, steps: int) -> str | None:
        """Returns the trace's path, or None without a run."""
        return str(self.session.profiler.request_profile(steps)) if self.is_busy else None

    def on_wires(self, blob: bytes) -> list[list[Any]]:
        """Returns this process's connections. See dead_links.py."""
        return dead_links.list_connections()

    def on_trust(self, blob: bytes, secret: str) -> None:
        """Takes the next run's secret, in hexadecimal."""
        self.secret = secret

    def on_learn(self, blob: bytes) -> None:
        """Loads a notebook's classes before a change uses them."""
        self.learned_classes.append(cloudpickle.loads(blob))

    def on_experiment(self, blob: bytes) -> bytes:
        """Returns the pickled first experiment to an attaching kernel."""
        return self.pickled_experiment

    def on_job(self, blob: bytes) -> dict[str, Any]:
        """Returns the arguments that all ranks share, and the secret, to an attaching kernel."""
        return {name: x for name, x in self.session_arguments.items() if name not in RANK_FIELDS} | {
            "secret": self.secret
        }

    def on_own(self, blob: bytes, owner: list[float] | None, home: str) -> None:
        """Sets the lab's owner; None after `detach`."""
        self.owner, self.owner_host = owner, home

    def on_settle(self, blob: bytes) -> bool:
        """Returns once all sent rows are on disk."""
        return bool(self.session is None or self.session.record.settle_rows())

    def on_rows(self, blob: bytes, kind: str, start: int) -> bytes:
        """Returns rows of `kind` from row `start` on, from the rank's own disk."""
        rank = self.session_arguments["rank"]
        return disk_rows.pack_pieces(disk_rows.read_pieces(self.run_folder, kind, rank, start), kind, rank)

    def on_files(self, blob: bytes) -> list[list[Any]]:
        """Returns [name, bytes] of each spooled file."""
        return disk_rows.list_files(self.run_folder, self.session_arguments["rank"])

    def on_file(self, blob: bytes, name: str, start: int) -> bytes:
        return disk_rows.read_chunk(self.run_folder, name, start)

    def handle_request(self, what: str, blob: bytes, rest: dict[str, Any]) -> Any:
        """rest: the handler's own arguments"""
        if what not in self.HANDLERS:
            raise RuntimeError(f"this engine has no handler for {what!r}: it has another version of the workbench")
        return self.HANDLERS[what](self, blob=blob, **rest)

    HANDLERS: ClassVar[dict[str, Callable[..., Any]]] = {
        "status": on_status, "request": on_request, "hurry": on_hurry, "abort": on_abort, "outlive": on_outlive,
        "without": on_without, "note": on_note, "stacks": on_stacks, "profile": on_profile, "wires": on_wires,
        "trust": on_trust, "learn": on_learn, "experiment": on_experiment, "job": on_job, "own": on_own,
        "settle": on_settle, "rows": on_rows, "files": on_files, "file": on_file,
    }  # fmt: skip
