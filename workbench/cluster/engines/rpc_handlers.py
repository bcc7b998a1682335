"""Answers the kernel's questions to an engine, while its rank trains and between runs.

The line's thread calls the handler of a request. An answer that is not bytes travels as JSON.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import cloudpickle

from workbench.cluster.engines import process_restart
from workbench.cluster.observe import links
from workbench.cluster.processes.stacks import stacks
from workbench.cluster.transport import spool

OWN = ("rank", "device", "joins", "ours", "store", "kind", "loopback")  # fields of a job that only one rank gets


class RpcHandlers:
    """The part of `engine_server.EngineServer` that answers: one method for each question."""

    session: Any
    job: dict[str, Any]
    blob: bytes
    secret: str
    where: Path
    sent: dict[str, int]
    learned: list[type]
    trouble: str
    told_over: bool
    owner: list[float] | None
    home: str

    @property
    @abstractmethod
    def is_busy(self) -> bool: ...

    def on_status(self, blob: bytes) -> dict[str, Any]:
        """Returns the session's status, its run and rank, whether it is over, and how many rows it has sent.

        runs: the kinds of run that this process has had, see `anew`
        """
        runs = process_restart.list_runs()  # first, so that a loop that begins now does not look like one that is over
        over = self.told_over = not self.is_busy  # before the status, which then is the last one
        status = self.session.status() if self.session else {"state": "idle", "step": 0, "busy": "", "error": None}
        who = {"generation": self.job.get("generation", ""), "as": self.job.get("rank")}
        return {**status, **who, "over": over, "sent": self.sent, "trouble": self.trouble,
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
        """Prepares for the eviction of a rank, or calls it off (`so` is False).

        Returns why this rank cannot go on, or "".
        """
        if self.session is None:
            return "its engine has no run"
        said: str = self.session.set_outliving(so)
        return said

    def on_without(self, blob: bytes, members: list[int]) -> None:
        """Makes this rank go on without `members`, which are out of reach and cannot be ended."""
        if self.is_busy:
            self.session.leave_behind(members)

    def on_note(self, blob: bytes, name: str, detail: dict[str, Any]) -> None:
        """Records a mark that the lab asks for."""
        if self.is_busy:
            self.session.mark(name, detail)

    def on_stacks(self, blob: bytes) -> str:
        """Returns the stacks of this process's threads."""
        return stacks()

    def on_profile(self, blob: bytes, steps: int) -> str | None:
        """Profiles the next steps. Returns the path of the trace, or None if no run is under way."""
        return str(self.session.profiler.request_profile(steps)) if self.is_busy else None

    def on_wires(self, blob: bytes) -> list[list[Any]]:
        """Returns the system's data on this process's connections. See links.py."""
        return links.list_connections()

    def on_trust(self, blob: bytes, secret: str) -> None:
        """Takes the secret of the next run, as hexadecimal digits."""
        self.secret = secret

    def on_learn(self, blob: bytes) -> None:
        """Loads classes from the notebook, before a change names them."""
        self.learned.append(cloudpickle.loads(blob))

    def on_experiment(self, blob: bytes) -> bytes:
        """Returns the pickled experiment that this run began with, to a kernel that attaches."""
        return self.blob

    def on_job(self, blob: bytes) -> dict[str, Any]:
        """Returns the part of the job that all ranks share, and their secret, to a kernel that attaches."""
        return {name: x for name, x in self.job.items() if name not in OWN} | {"secret": self.secret}

    def on_own(self, blob: bytes, owner: list[float] | None, home: str) -> None:
        """Sets the owner of the lab; None after `detach`."""
        self.owner, self.home = owner, home

    def on_settle(self, blob: bytes) -> bool:
        """Returns once the rows sent so far are on disk, so that a kernel that attaches can read them."""
        return bool(self.session is None or self.session.record.settle_rows())

    def on_rows(self, blob: bytes, kind: str, start: int) -> bytes:
        """Returns the rank's rows of `kind` from row `start` on, from its own disk."""
        rank = self.job["rank"]
        return spool.pack_pieces(spool.read_pieces(self.where, kind, rank, start), kind, rank)

    def on_files(self, blob: bytes) -> list[list[Any]]:
        """Returns [name, bytes] of each file that this rank spooled."""
        return spool.list_files(self.where, self.job["rank"])

    def on_file(self, blob: bytes, name: str, start: int) -> bytes:
        """Returns a part of one such file."""
        return spool.read_chunk(self.where, name, start)

    def handle_request(self, what: str, blob: bytes, rest: dict[str, Any]) -> Any:
        """Answers the request `what`. rest: the handler's own arguments"""
        if what not in self.HANDLERS:
            raise RuntimeError(f"this engine has no handler for {what!r}: its workbench is of another version")
        return self.HANDLERS[what](self, blob=blob, **rest)

    HANDLERS: ClassVar[dict[str, Callable[..., Any]]] = {  # of the lab's requests, by name
        "status": on_status, "request": on_request, "hurry": on_hurry, "abort": on_abort, "outlive": on_outlive,
        "without": on_without, "note": on_note, "stacks": on_stacks, "profile": on_profile, "wires": on_wires,
        "trust": on_trust, "learn": on_learn, "experiment": on_experiment, "job": on_job, "own": on_own,
        "settle": on_settle, "rows": on_rows, "files": on_files, "file": on_file,
    }  # fmt: skip
