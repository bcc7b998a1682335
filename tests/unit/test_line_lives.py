"""The engine's end of the line, in this process: nothing that a look meets ends the thread that answers."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest

from tests.ranks import experiment
from tests.waiting import until
from workbench.cluster.keys import Keys
from workbench.cluster.line import Line
from workbench.cluster.place import host, this_process
from workbench.cluster.worker import Bench
from workbench.engine.session import Session

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
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Bench, Line]]:
    monkeypatch.setitem(sys.modules, "late_session", type(sys)("late_session"))
    monkeypatch.setattr(sys.modules["late_session"], "Late", Late, raising=False)
    keys = Keys.new()
    made = Bench({
        "lab": "x", "client": keys.public, "owner": this_process(), "host": host(), "spans_hosts": False,
        "reach": "127.0.0.1", "paths": [], "place": "",
    })  # fmt: skip
    line = Line({0: made.line_at}, keys)
    yield made, line
    line.close()
    made.close()


def begin(bench: Bench, path: Path) -> threading.Thread:
    (path / "run.json").write_text("{}")
    job = {"session": "late_session:Late", "generation": "g", "run_dir": str(path), "rank": 0, "size": 1, "epoch": 0.0,
           "store": ("x", 0), "device": "cpu", "kind": "gloo", "loopback": True}  # fmt: skip
    thread = threading.Thread(target=bench.begin, args=(job, cloudpickle.dumps((None, (), []))))
    thread.start()
    return thread


def test_a_look_between_a_sessions_making_and_its_start_does_not_end_the_line(
    bench: tuple[Bench, Line], tmp_path: Path
) -> None:
    made, line = bench
    HOLD.clear()
    thread = begin(made, tmp_path)
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
    (tmp_path / "run.json").write_text("{}")
    job = {"session": "late_session:Late", "generation": "g", "run_dir": str(tmp_path), "rank": 0, "size": 1,
           "epoch": 0.0, "store": ("x", 0), "device": "cpu", "kind": "gloo", "loopback": True}  # fmt: skip
    with pytest.raises(RuntimeError, match="can't start"):
        made.begin(job, cloudpickle.dumps((None, (), [])))
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
