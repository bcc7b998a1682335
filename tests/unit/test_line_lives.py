"""Tests an engine's end of the line in this process: no failing look ends the answering thread."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benched import begin, benched
from tests.ranks import experiment
from tests.waiting import until
from workbench.cluster.engines.engine_server import EngineServer
from workbench.cluster.engines.process_health import ProcessHealth
from workbench.cluster.processes.lab_place import host_name
from workbench.cluster.transport.rpc_client import NoAnswer, RpcClient
from workbench.engine.rank.session import Session

HOLD = threading.Event()  # while it is clear, a session is starting


class Late:
    """A session with a thread that has not been started when a look comes."""

    def __init__(self, experiment: Any, **rest: Any) -> None:
        self.thread = threading.Thread(target=time.sleep, args=(0.3,), daemon=True)

    def start(self) -> None:
        HOLD.wait(60)
        self.thread.start()

    def join(self, timeout: float | None = None) -> bool:
        self.thread.join(timeout)
        return not self.thread.is_alive()

    def status(self) -> dict[str, Any]:
        return {"state": "starting", "step": 0, "busy": "", "error": None}

    def mark(self, name: str, detail: dict[str, Any]) -> None: ...

    def abort(self, asked: bool = False) -> None: ...


@pytest.fixture
def bench() -> Iterator[tuple[EngineServer, RpcClient]]:
    with benched(0) as it:
        yield it


def test_a_look_before_a_session_starts_does_not_end_the_line(
    bench: tuple[EngineServer, RpcClient], tmp_path: Path
) -> None:
    made, line = bench
    HOLD.clear()
    thread = threading.Thread(target=begin, args=(made, Late, tmp_path))
    thread.start()
    try:
        assert until(lambda: made.last_error), "a look has met it"
    finally:
        HOLD.set()
        thread.join(60)
    status = line.ask_rank(0, "status", timeout=60)[0]
    assert status["run_id"] == "g"
    assert "cannot join thread before it is started" in status["trouble"], "what it met is told"
    assert until(lambda: line.ask_rank(0, "status", timeout=60)[0]["over"])


def test_a_session_that_has_not_been_started_has_not_ended() -> None:
    store, name, port = Session.host_store()
    session = Session(experiment(1, 1), rank=0, size=1, store=(name, port), run_id="g", secret=b"s",
                      epoch=time.time())  # fmt: skip
    assert not session.join(0)
    with pytest.raises(RuntimeError, match="rank 0 is not set up"):
        session.model.train()
    session.start()
    assert session.join(60) and session.phase == "done", session.error
    assert store


def test_no_call_waits_for_a_session_that_cannot_start(
    bench: tuple[EngineServer, RpcClient], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, line = bench

    def fails(self: Late) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Late, "start", fails)
    with pytest.raises(RuntimeError, match="can't start"):
        begin(made, Late, tmp_path)
    assert not made.is_busy and line.ask_rank(0, "status", timeout=60)[0]["over"]


class Interrupted:
    """A lock with an interrupt while it waits."""

    def __enter__(self) -> None:
        raise KeyboardInterrupt

    acquire = __enter__

    def __exit__(self, *_: object) -> None: ...


def test_an_interrupt_while_waiting_for_one_wire_releases_the_other_wires() -> None:
    line, lock = RpcClient.__new__(RpcClient), threading.Lock()
    line._wires = {0: SimpleNamespace(lock=lock), 1: SimpleNamespace(lock=Interrupted())}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        line.ask_all("status")
    assert not lock.locked()


def events() -> int:
    """Counts eventfds: zmq has one for each socket, while connections come and go."""
    each = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one) == "anon_inode:[eventfd]" for one in each if os.path.islink(one))


def test_leaving_a_dead_engine_closes_its_socket() -> None:
    """Otherwise a lab would keep a descriptor for each lost engine."""
    with benched(0, 1, 2) as (made, line):
        there = events()
        line.disconnect_rank(1, made.rpc_address)
        line.disconnect_rank(1, made.rpc_address)
        assert until(lambda: events() == there - 1)
        with pytest.raises(NoAnswer, match="rank 1 is gone"):
            line.ask_rank(1, "status", timeout=60)
        said = line.ask_all("status", timeout=60)
        assert isinstance(said[1], NoAnswer) and [said[0]["over"], said[2]["over"]] == [True, True]


def test_a_busy_wire_is_left_at_the_next_look() -> None:
    with benched(0) as (made, line):
        with line._wires[0].lock:
            line.disconnect_rank(0, made.rpc_address)
            assert not line._wires[0].socket.closed
        line.disconnect_rank(0, "where the engine before it was")
        assert not line._wires[0].socket.closed
        line.disconnect_rank(0, made.rpc_address)
        assert line._wires[0].socket.closed


def test_only_engines_on_this_machine_are_left_for_good() -> None:
    """An engine on another machine may be unreachable for long, so the lab asks again."""
    left: list[int] = []
    hosts = host_name(), host_name(), "another"
    engines = [SimpleNamespace(rank=rank, host=where, rpc_address="x") for rank, where in enumerate(hosts)]
    cluster = SimpleNamespace(engines=engines, rpc=SimpleNamespace(disconnect_rank=lambda rank, at: left.append(rank)))
    health: Any = SimpleNamespace(cluster=cluster, describe_death=lambda rank: None if rank == 0 else "is gone",
                                  _over=SimpleNamespace(wait=lambda seconds: None))  # fmt: skip
    ProcessHealth._disconnect_dead_engines(health)
    assert left == [1]
