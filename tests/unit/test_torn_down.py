"""Tests that a rank gives everything back if an opening, a wait or a part of its end fails."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks import experiment, live
from tests.waiting import until
from workbench.engine.collectives.wire import Aborted, LeaveEvent, Wire, connect_store, host_store
from workbench.engine.control.peers import WireOpening
from workbench.engine.device.nccl import NcclGroup
from workbench.engine.rank.training import RankTraining

pytestmark = pytest.mark.ranks


class Made:
    """Stands for a wire, and counts how often it is closed."""

    def __init__(self) -> None:
        self.closed = 0

    def close(self) -> None:
        self.closed += 1


def leave() -> None:
    raise Aborted("told to leave")


def test_a_wire_that_opens_while_its_rank_leaves_is_closed_once() -> None:
    go, made = threading.Event(), Made()

    def leave_as_it_opens() -> None:
        go.set()
        opening._thread.join(5)
        leave()

    opening = WireOpening(lambda: go.wait(5) and made, "opening")  # type: ignore[arg-type, return-value]
    with pytest.raises(Aborted):
        opening.wait(leave_as_it_opens)
    assert made.closed == 1


def test_a_wire_that_opens_after_its_rank_has_left_is_closed_once() -> None:
    go, made = threading.Event(), Made()
    opening = WireOpening(lambda: go.wait(5) and made, "opening")  # type: ignore[arg-type, return-value]
    with pytest.raises(Aborted):
        opening.wait(leave)
    go.set()
    assert until(lambda: made.closed)
    opening._thread.join(5)
    assert made.closed == 1


@pytest.mark.parametrize("verb", ["wait", "wait_on_host"])
def test_a_wire_does_not_wait_any_more_once_its_wait_has_failed(verb: str) -> None:
    kept, host, port = host_store()
    wire = Wire(connect_store(host, port, "alone"), 0, 1, "control", LeaveEvent())

    def fail(*_: Any) -> None:
        raise ConnectionError("Connection closed by peer")

    setattr(wire.backend, verb, fail)
    with pytest.raises(ConnectionError):
        getattr(wire, verb)(wire.all_reduce(torch.ones(1)))
    assert not wire.is_waiting
    wire.close()
    del kept


def test_nccl_watches_a_collective_whose_predecessor_failed() -> None:
    def fail() -> None:
        raise RuntimeError("NCCL error")

    backend = SimpleNamespace(abort=lambda: None, shutdown=lambda: None)
    line = NcclGroup(None, 0, 2, device="cuda", is_peer_gone=lambda: False, made=lambda *_: (None, backend))
    line.note_issued(SimpleNamespace(is_completed=lambda: False, wait=fail))
    line._open[0].is_completed = lambda: True
    with pytest.raises(RuntimeError, match="NCCL error"):
        line.note_issued(SimpleNamespace(is_completed=lambda: False, wait=fail))
    assert line._has_open_work()
    line.close()


def test_a_rank_whose_training_cannot_be_closed_closes_its_wires_and_removes_its_files(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: RankTraining) -> None:
        raise RuntimeError("a thread does not end")

    closed: list[Wire] = []
    close = Wire.close
    monkeypatch.setattr(RankTraining, "close", fail)
    monkeypatch.setattr(Wire, "close", lambda self: (closed.append(self), close(self)))
    sessions = live(experiment(2, 2))
    for s in sessions:
        assert s.join(60) and s.phase == "done"
        assert set(s.wires) <= set(closed)
        assert "a thread does not end" in s.record.noted("log")[0][3]
        s.training.mailbox.close()
    assert sessions[0].files and not any(path.exists() for path in sessions[0].files)
