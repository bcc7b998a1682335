"""The engine's end of the line, in this process: nothing that a look meets ends the thread that answers."""

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
from workbench.cluster.engines.health import Health
from workbench.cluster.engines.worker import Bench
from workbench.cluster.processes.place import host
from workbench.cluster.transport.line import Line, Silence
from workbench.engine.rank.session import Session

HOLD = threading.Event()  # while it is clear, a session's start is on its way


class Late:
    """A session whose thread exists and has not been started when others ask for it."""

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
def bench() -> Iterator[tuple[Bench, Line]]:
    with benched(0) as it:
        yield it


def test_a_look_between_a_sessions_making_and_its_start_does_not_end_the_line(
    bench: tuple[Bench, Line], tmp_path: Path
) -> None:
    made, line = bench
    HOLD.clear()
    thread = threading.Thread(target=begin, args=(made, Late, tmp_path))
    thread.start()
    try:
        assert until(lambda: made.trouble), "a look has met it"
    finally:
        HOLD.set()
        thread.join(60)
    status = line.ask(0, "status", timeout=60)[0]
    assert status["generation"] == "g"
    assert "cannot join thread before it is started" in status["trouble"], "what it met is told"
    assert until(lambda: line.ask(0, "status", timeout=60)[0]["over"])


def test_a_session_that_has_not_been_started_has_not_ended() -> None:
    store, name, port = Session.host_store()
    session = Session(experiment(1, 1), rank=0, size=1, store=(name, port), generation="g", secret=b"s",
                      epoch=time.time())  # fmt: skip
    assert not session.join(0)
    with pytest.raises(RuntimeError, match="rank 0 is not set up"):
        session.model.train()
    session.start()
    assert session.join(60) and session.phase == "done", session.error
    assert store


def test_a_session_that_cannot_start_is_not_waited_for(
    bench: tuple[Bench, Line], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, line = bench

    def fails(self: Late) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Late, "start", fails)
    with pytest.raises(RuntimeError, match="can't start"):
        begin(made, Late, tmp_path)
    assert not made.busy and line.ask(0, "status", timeout=60)[0]["over"]


class Interrupted:
    """A lock for which somebody does not want to wait any more."""

    def __enter__(self) -> None:
        raise KeyboardInterrupt

    acquire = __enter__

    def __exit__(self, *_: object) -> None: ...


def test_an_interrupt_while_one_wire_is_waited_for_leaves_no_other_taken() -> None:
    line, lock = Line.__new__(Line), threading.Lock()
    line._wires = {0: SimpleNamespace(lock=lock), 1: SimpleNamespace(lock=Interrupted())}  # type: ignore[dict-item]
    with pytest.raises(KeyboardInterrupt):
        line.ask_all("status")
    assert not lock.locked()


def events() -> int:
    """Descriptors of which zmq has one for each socket; connections come and go beside."""
    each = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    return sum(os.readlink(one) == "anon_inode:[eventfd]" for one in each if os.path.islink(one))


def test_an_engine_that_is_gone_is_left_and_its_socket_with_it() -> None:
    """Else a lab that loses one after the other keeps a descriptor of each."""
    with benched(0, 1, 2) as (made, line):
        there = events()
        line.leave(1, made.line_at)
        line.leave(1, made.line_at)
        assert until(lambda: events() == there - 1)
        with pytest.raises(Silence, match="rank 1 is gone"):
            line.ask(1, "status", timeout=60)
        said = line.ask_all("status", timeout=60)
        assert isinstance(said[1], Silence) and [said[0]["over"], said[2]["over"]] == [True, True]


def test_who_is_being_asked_is_left_at_the_next_look() -> None:
    with benched(0) as (made, line):
        with line._wires[0].lock:
            line.leave(0, made.line_at)
            assert not line._wires[0].socket.closed
        line.leave(0, "where the engine before it was")
        assert not line._wires[0].socket.closed
        line.leave(0, made.line_at)
        assert line._wires[0].socket.closed


def test_only_an_engine_of_this_machine_is_gone_for_good() -> None:
    """One of another machine may have been out of reach for long, and is asked again."""
    left: list[int] = []
    hosts = host(), host(), "another"
    engines = [SimpleNamespace(rank=rank, host=where, line="x") for rank, where in enumerate(hosts)]
    cluster = SimpleNamespace(engines=engines, line=SimpleNamespace(leave=lambda rank, at: left.append(rank)))
    health: Any = SimpleNamespace(cluster=cluster, death=lambda rank: None if rank == 0 else "is gone",
                                  _over=SimpleNamespace(wait=lambda seconds: None))  # fmt: skip
    Health._look(health)
    assert left == [1]
