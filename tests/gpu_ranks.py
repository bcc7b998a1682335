"""Ranks as lasting processes, for one NCCL run after another.

NCCL takes one GPU for each rank of a host. If fewer GPUs exist, each process claims by NCCL_HOSTID to be a separate
host. Several then share a GPU and connect over sockets. Order, limits and aborts are NCCL's own; the speed is not.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np
import torch

from tests.ranks import Rows
from tests.waiting import until
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.placement.canonical_state import hash_model_state
from workbench.settings import Change


@dataclass(frozen=True)
class Told:
    """A rank's outcome. params: by name, if they are whole; rows, samples, marks: as recorded."""

    phase: str
    error: str
    state: int
    params: dict[str, np.ndarray]
    rows: list[tuple]
    samples: list[tuple]
    marks: list[tuple]
    peak: int

    def noted(self, name: str) -> list[tuple]:
        return [m for m in self.marks if m[1] == name]

    def losses(self) -> list[float]:
        return [v for _, name, _, v in self.samples if name == "loss"]


class Ranks:
    """Processes that are ranks of every run."""

    def __init__(self, size: int) -> None:
        gpus = torch.cuda.device_count()
        self.size = size
        self.devices = [f"cuda:{r % gpus}" if gpus else "cpu" for r in range(size)]
        spawn = get_context("spawn")
        pairs = [spawn.Pipe() for _ in range(size)]
        self.lines: list[Connection] = [ours for ours, _ in pairs]
        shared = size > gpus > 0
        self.processes = [spawn.Process(target=_serve, args=(theirs, r, shared), name=f"rank {r}", daemon=True)
                          for r, (_, theirs) in enumerate(pairs)]  # fmt: skip
        for process in self.processes:
            process.start()
        for _, theirs in pairs:
            theirs.close()
        self._kept: Any = None

    def start(self, e: Experiment, *changes: Change, kind: str = "nccl") -> None:
        self._kept, *where = Session.host_store()
        job = {"store": tuple(where), "run_id": uuid.uuid4().hex, "secret": b"ours", "epoch": time.time(),
               "changes": changes, "kind": kind, "size": e.ranks}  # fmt: skip
        for line, device in zip(self.lines, self.devices, strict=True):
            line.send_bytes(cloudpickle.dumps(("start", (e, {**job, "device": device}))))

    def ask(self, rank: int, what: str) -> Any:
        """ "step": returns the current step; "abort": leaves at once, as a person requests."""
        self.lines[rank].send_bytes(cloudpickle.dumps((what, None)))
        return cloudpickle.loads(self.lines[rank].recv_bytes())

    def at(self, step: int, within: float = 60.0) -> None:
        """Waits until rank 0 has reached this step."""
        assert until(lambda: self.ask(0, "step") >= step, within)

    def ended(self, within: float = 60.0, of: Sequence[int] = ()) -> list[Told]:
        """Returns the outcome of each rank, or of the given ranks only."""
        until_then, found = time.monotonic() + within, []
        for rank in of or range(self.size):
            while (told := self.ask(rank, "told")) is None or isinstance(told, str):
                assert time.monotonic() < until_then, f"rank {rank} hangs: {told}"
                time.sleep(0.02)
            found.append(told)
        return found

    def run(self, e: Experiment, *changes: Change, within: float = 60.0, kind: str = "nccl") -> list[Told]:
        """Runs to the end, which each rank must reach without an error."""
        self.start(e, *changes, kind=kind)
        found = self.ended(within)
        for rank, told in enumerate(found):
            assert not told.error, f"rank {rank}: {told.error}"
        return found

    def kill(self, rank: int) -> None:
        self.processes[rank].kill()
        self.processes[rank].join(10)

    def idle(self) -> bool:
        """Returns whether all processes are alive and no run is under way."""
        try:
            return all(p.is_alive() for p in self.processes) and not any(
                isinstance(self.ask(r, "told"), str) for r in range(self.size)
            )
        except (EOFError, OSError):
            return False

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join(10)


def share_a_gpu(rank: int) -> None:
    """Presents this process to NCCL as a separate host. Must run before any call of NCCL."""
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")


def _serve(line: Connection, rank: int, shared: bool) -> None:
    """Serves requests until the connection closes."""
    torch.set_num_threads(1)
    if shared:
        share_a_gpu(rank)
    session: Any = None
    while True:
        try:
            what, given = cloudpickle.loads(line.recv_bytes())
        except EOFError:
            return
        answer: Any = None
        match what:
            case "start":
                e, job = given
                session = Session(e, rank=rank, **job)
                session.record.close()
                session.record = Rows()
                session.start()
                continue
            case "step":
                answer = session.status()["step"] if session else -1
            case "abort":
                session.abort(asked=True)
            case "told":
                answer = _told(session) if session.join(0.0) else str(session.status())
        line.send_bytes(cloudpickle.dumps(answer))


def _told(session: Any) -> Told:
    error = (session.error or {}).get("traceback", "")
    if session.training is None or session.training.unsharder.sharded:  # no rank has a whole parameter
        state, params = 0, {}
    else:
        state = hash_model_state(session.layout)
        params = {p.name: p.param.detach().float().cpu().numpy() for p in session.layout.order}
    peak = torch.cuda.max_memory_allocated(session.device) if session.device != "cpu" else 0
    record = session.record
    return Told(session.phase, error, state, params, list(record), record.samples, record.marks, peak)
