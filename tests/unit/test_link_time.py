"""Tests the emulated Link's arithmetic with a manual clock."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.ranks import ended, live
from workbench.engine.collectives.shaping import LinkShaper, Port
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, even
from workbench.strategies import DDP, Gossip


class HandClock:
    """A clock that also naps: every sleep ends `late` seconds too late."""

    hurried = False

    def __init__(self, late: float) -> None:
        self.t, self.late = 0.0, late
        self.clock = self

    def now(self) -> float:
        return self.t

    def sleep_until(self, t: float) -> None:
        if t > self.t and not self.hurried:
            self.t = t + self.late


def shaper(late: float) -> LinkShaper:
    """Returns rank 0 of two on 8 Mbit/s: an all-reduce of 10,000 bytes takes 10 ms."""
    port = Port(0, 2, HandClock(late), 0)
    port.fabric = Fabric(link=Link(bandwidth=8))
    return LinkShaper(port, None)


def operation(s: LinkShaper, asked: float, codec: float = 0.0, transfer: float = 1e-3) -> float:
    """Makes one all-reduce: `codec` seconds of encoding, `transfer` seconds of real transfer. Returns its end on the
    Link.
    """
    clock = s.paced_sleep.clock
    clock.t = max(clock.t, asked) + codec
    ready = s.post_ready(clock.t, asked)
    clock.t += transfer
    return s.await_end(even("all_reduce", 10_000, 2), lambda: ready)[2]


@pytest.mark.parametrize("late", [0.0, 2e-3])
def test_late_sleeps_do_not_lengthen_queued_operations(late: float) -> None:
    s = shaper(late)
    ends = [operation(s, asked=0.0) for _ in range(10)]
    assert ends == pytest.approx([0.01 * (k + 1) for k in range(10)])


@pytest.mark.parametrize("late", [0.0, 2e-3])
def test_encoding_between_two_operations_takes_its_time(late: float) -> None:
    s = shaper(late)
    ends = [operation(s, asked=0.0, codec=5e-3) for _ in range(4)]
    assert ends == pytest.approx([0.015 * (k + 1) for k in range(4)])


@pytest.mark.parametrize(("asked", "end"), [(0.0105, 0.0205), (0.030, 0.040)])
def test_a_later_operation_begins_at_its_request(asked: float, end: float) -> None:
    s = shaper(2e-3)
    operation(s, asked=0.0)
    assert operation(s, asked=asked) == pytest.approx(end)


def test_a_transfer_that_is_slower_than_the_link_is_not_credited() -> None:
    s = shaper(0.0)
    ends = [operation(s, asked=0.0, transfer=0.025) for _ in range(3)]
    assert ends == pytest.approx([0.010, 0.035, 0.060])


def test_operations_cut_short_by_a_stop_end_at_the_stop() -> None:
    s = shaper(0.0)
    operation(s, asked=0.0)
    s.paced_sleep.hurried = True
    ends = [operation(s, asked=0.01) for _ in range(3)]
    assert ends == pytest.approx([0.011, 0.012, 0.013]), "each took what it really takes"
    assert s.port.free == pytest.approx(0.013)


def test_a_stop_in_the_middle_of_a_collective_ends_all_of_it() -> None:
    """Start, this port's end and the common end: none is later than the moment at which the rank went on."""
    s = shaper(0.0)
    s.port.free = 0.5  # earlier messages keep it busy

    def stopped(t: float) -> None:
        s.paced_sleep.t, s.paced_sleep.hurried = 0.02, True

    s.paced_sleep.sleep_until = stopped
    ready = s.post_ready(0.0, 0.0)
    assert s.await_end(even("all_reduce", 10_000, 2), lambda: ready) == pytest.approx((0.02, 0.02, 0.02))


@pytest.mark.ranks
@pytest.mark.parametrize("strategy", [DDP(), Gossip()], ids=str)
def test_no_span_ends_after_the_end_of_a_stopped_run(strategy: Any) -> None:
    """Uses a slow Link. Messages in flight at the stop are excepted: their end was recorded as they left."""
    e = Experiment(ranks=2, steps=0, eval_every=0, pace=20, strategy=strategy, fabric=Fabric(link=Link(bandwidth=8)))
    sessions = live(e)
    while min(len(s.record.losses()) for s in sessions) < 3:
        time.sleep(0.01)
    sessions[0].request({"kind": "stop", "id": "stop"})
    for s in sessions:
        s.hurry()
    stopped = [s.clock.now() for s in sessions]
    ended(sessions)
    for s, since in zip(sessions, stopped, strict=True):
        over = s.clock.now()
        rows = [row for row in s.record if row[3] > since or "send" not in row[2]]
        assert [row for row in rows if row[5] > over] == []
        if strategy.exact:
            updates = {row[0]: row[5] for row in s.record if row[2] == "update"}
            assert [row for row in rows if row[1] in ("comm", "port") and row[5] > updates[row[0]]] == []
