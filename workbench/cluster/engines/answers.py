"""What an engine answers on its line, while its rank trains and between runs: one method for each question.

Called by name on the line's thread; a value that is no bytes goes as JSON.
"""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path
from typing import Any

import cloudpickle

from workbench.cluster.engines import anew
from workbench.cluster.observe import links
from workbench.cluster.processes.stacks import stacks
from workbench.cluster.transport import spool

OWN = ("rank", "device", "joins", "ours", "store", "kind", "loopback")  # of a job, what is said to one rank only


class Answers:
    """The part of an engine's bench that answers. See `worker.Bench` for what it has."""

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
    def busy(self) -> bool: ...

    def on_status(self, blob: bytes) -> dict[str, Any]:
        """Where this rank is: the session's own words, which run, as which rank, is it over, rows sent so far.

        runs: what this process has run, see `anew`
        """
        runs = anew.runs()  # asked first: who has run a loop and is over has nothing to do any more
        over = self.told_over = not self.busy  # asked first: who is over then tells its last state
        status = self.session.status() if self.session else {"state": "idle", "step": 0, "busy": "", "error": None}
        who = {"generation": self.job.get("generation", ""), "as": self.job.get("rank")}
        return {**status, **who, "over": over, "sent": self.sent, "trouble": self.trouble,
                "runs": runs}  # fmt: skip

    def on_request(self, blob: bytes, request: dict[str, Any]) -> None:
        self.session.request(request)

    def on_hurry(self, blob: bytes) -> None:
        if self.busy:
            self.session.hurry()

    def on_abort(self, blob: bytes, asked: bool = False) -> None:
        if self.busy:
            self.session.abort(asked)

    def on_outlive(self, blob: bytes, so: bool = True) -> str:
        """A rank is about to be put out, or (`so` is false) is not; why this one could not go on without it, or ""."""
        said: str = self.session.outlive(so)
        return said

    def on_without(self, blob: bytes, members: list[int]) -> None:
        """These are out of reach and cannot be ended: this rank goes on without them."""
        if self.busy:
            self.session.leave_behind(members)

    def on_note(self, blob: bytes, name: str, detail: dict[str, Any]) -> None:
        """Writes a mark of what the lab did, or saw, into the record."""
        if self.busy:
            self.session.mark(name, detail)

    def on_stacks(self, blob: bytes) -> str:
        """What each thread of this process is in."""
        return stacks()

    def on_profile(self, blob: bytes, steps: int) -> str | None:
        """The next steps are profiled; where the trace will be, None where no run is under way."""
        return str(self.session.profiler.ask(steps)) if self.busy else None

    def on_wires(self, blob: bytes) -> list[list[Any]]:
        """What the system knows of this process's connections. See links.py."""
        return links.wires()

    def on_trust(self, blob: bytes, secret: str) -> None:
        """What only the ranks of the run to come know, as hexadecimal digits."""
        self.secret = secret

    def on_learn(self, blob: bytes) -> None:
        """Takes in classes defined in the notebook, before a change names them."""
        self.learned.append(cloudpickle.loads(blob))

    def on_experiment(self, blob: bytes) -> bytes:
        """The pickled experiment that this run began with, for a kernel that attaches."""
        return self.blob

    def on_job(self, blob: bytes) -> dict[str, Any]:
        """What was said of this run to all its ranks, and what only they know: for a kernel that attaches."""
        return {name: x for name, x in self.job.items() if name not in OWN} | {"secret": self.secret}

    def on_own(self, blob: bytes, owner: list[float] | None, home: str) -> None:
        """Who owns the lab from now on; None after `detach`."""
        self.owner, self.home = owner, home

    def on_settle(self, blob: bytes) -> bool:
        """Rows that were sent so far are on disk now, if it answers: for a kernel that attaches, which missed them."""
        return bool(self.session is None or self.session.record.settle())

    def on_rows(self, blob: bytes, kind: str, start: int) -> bytes:
        """The rank's rows of `kind` from row `start` on, from its own disk."""
        rank = self.job["rank"]
        return spool.pack(spool.pieces(self.where, kind, rank, start), kind, rank)

    def on_files(self, blob: bytes) -> list[list[Any]]:
        """[name, bytes] of each file that this rank spooled."""
        return spool.files(self.where, self.job["rank"])

    def on_file(self, blob: bytes, name: str, start: int) -> bytes:
        """A part of one such file."""
        return spool.chunk(self.where, name, start)
