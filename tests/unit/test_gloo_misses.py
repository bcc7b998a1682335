"""Tests that a wait ends with an error if a peer is lost and gloo missed it, and only then."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import pytest
import torch

from tests.waiting import until
from workbench.engine.device import gloo
from workbench.engine.wire.collectives import Aborted, Leaving, Wire, connect_store, host_store

pytestmark = pytest.mark.ranks


class Stuck:
    """A collective that never ends, because gloo has missed its end."""

    def wait(self, limit: object) -> None:
        time.sleep(0.01)
        raise RuntimeError("Timed out waiting 100ms for send operation to complete")


@pytest.fixture
def ends() -> Any:
    """Two ranks' ends of one connection."""
    kept, host, port = host_store()
    generation, found = uuid.uuid4().hex, {}

    def open(rank: int) -> None:
        found[rank] = Wire(connect_store(host, port, generation), rank, 2, "control", Leaving())
        found[rank].wait(found[rank].all_reduce(torch.ones(1)))

    threads = [threading.Thread(target=open, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    yield found[0], found[1]
    for wire in found.values():
        wire.cut()
        wire.close()
    del kept


def test_waiting_for_a_lost_peer_ends_although_gloo_reports_nothing(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "MISSED", 0.3)
    first, second = ends
    first.cut()
    assert until(second.parted)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Connection closed by peer"):
        second.wait(Stuck())
    assert time.monotonic() - began > 0.3


def test_a_long_wait_goes_on_until_this_rank_must_leave(
    ends: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gloo, "MISSED", 0.05)
    first, _ = ends
    timer = threading.Timer(0.5, first.leaving.set)
    timer.start()
    with pytest.raises(Aborted):
        first.wait(Stuck())
    timer.join()
