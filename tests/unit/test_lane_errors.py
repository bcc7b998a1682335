"""Tests that an error of a chip outside a child reaches every rank that waits for the child."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import Rows
from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.lane_wires import GroupWires
from workbench.engine.collectives.shaping import Clock, LinkShaper, PacedSleep, Port
from workbench.engine.collectives.stopwatch import Stopwatch
from workbench.engine.device import Chip


class Broken(Chip):
    """A chip that runs ahead; one of its calls fails on every thread but the creator's."""

    runs_ahead = True

    def __init__(self, call: str) -> None:
        super().__init__("cuda:0")
        self.call, self.home = call, threading.current_thread()

    def fail(self, call: str) -> None:
        if call == self.call and threading.current_thread() is not self.home:
            raise RuntimeError(f"the chip failed in {call}")

    def bind_thread(self) -> None:
        self.fail("bind")

    def record_event(self) -> Any:
        self.fail("mark")
        return object()

    @contextmanager
    def use_stream(self, stream: Any = None, after: Any = None) -> Iterator[None]:
        self.fail("inside")
        yield
        self.fail("outside")


def lane(call: str) -> Lane:
    clock = Clock(time.time())
    wire: Any = SimpleNamespace(size=2, rank=0)
    port = Port(0, 2, PacedSleep(clock), 0)
    line = GroupWires(wire, LinkShaper(port, None), wire)
    return Lane("comm", port, Stopwatch(clock, Rows()), Broken(call), {None: line}.__getitem__)


async def nothing() -> int:
    return 5


async def wrong() -> None:
    raise ValueError("the child's own")


def heard(lane: Lane, child: Any) -> BaseException | None:
    """Returns the error of waiting for `child`; fails if the wait does not end."""
    handle, raised = lane.start(child, "bucket"), []

    def wait() -> None:
        try:
            lane.wait(handle)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for ever"
    return raised[0] if raised else None


@pytest.mark.parametrize("call", ["bind", "inside", "outside", "mark"])
def test_an_error_of_the_chip_reaches_the_waiter_of_each_child(call: str) -> None:
    broken = lane(call)
    for _ in range(2):
        assert str(heard(broken, nothing())) == f"the chip failed in {call}"
    broken.close()


def test_a_childs_own_error_comes_before_the_chips() -> None:
    broken = lane("mark")
    assert str(heard(broken, wrong())) == "the child's own"
    broken.close()


def test_a_working_chip_raises_nothing() -> None:
    whole = lane("")
    assert heard(whole, nothing()) is None
    whole.close()
