"""Tests that ranks on several hosts agree on one time, even if one rank answers late."""

from __future__ import annotations

import threading
import time
import uuid
from typing import Any

import pytest

from workbench.engine.collectives import clock_offset as clocks
from workbench.engine.collectives.shaping import Clock
from workbench.engine.collectives.wire import LeaveEvent, Wire, connect_store, host_store

pytestmark = pytest.mark.ranks
LATE = 0.3  # seconds: three times as long as one wait over gloo


class Stumbling:
    """A connection that delays a few of its first answers."""

    def __init__(self, wire: Wire) -> None:
        self.wire, self.left = wire, 3

    def __getattr__(self, name: str) -> Any:
        return getattr(self.wire, name)

    def wait(self, work: Any) -> None:
        self.wire.wait(work)
        if self.left:
            self.left -= 1
            time.sleep(LATE)


def agreed(late: int, monkeypatch: pytest.MonkeyPatch) -> dict[int, tuple[bool, float, float]]:
    """Returns by rank, with one of 3 ranks late: (on one host, uncertainty, perf_counter at the run's beginning).

    All ranks read one perf_counter here, but each first assumes another beginning of the run.
    """
    monkeypatch.setattr(clocks.platform, "node", lambda: threading.current_thread().name)
    kept, host, port = host_store()
    generation, wires, found = uuid.uuid4().hex, {}, {}

    def main(rank: int) -> None:
        wire = wires[rank] = Wire(connect_store(host, port, generation), rank, 3, "control", LeaveEvent())
        clock = Clock(time.time() - 10 * rank)
        local, doubt = clocks.agree_on_time(Stumbling(wire) if rank == late else wire, clock)  # type: ignore[arg-type]
        found[rank] = (local, doubt, clock.base)

    threads = [threading.Thread(target=main, args=(r,), name=f"host {r}") for r in range(3)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    for wire in wires.values():
        wire.cut_connections()
        wire.close()
    del kept
    return found


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_others_wait_and_all_have_one_time(late: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = agreed(late, monkeypatch)
    assert sorted(found) == [0, 1, 2], "a rank failed"
    assert not any(local for local, _, _ in found.values())
    for rank in (1, 2):
        _, doubt, began = found[rank]
        assert 0 < doubt < LATE / 2, "the quickest round trip is one in which nobody was late"
        assert abs(began - found[0][2]) <= doubt
