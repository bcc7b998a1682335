"""The emulated Link's arithmetic on a clock that is turned by hand."""

from __future__ import annotations

import pytest

from workbench.engine.shaping import Port, Shaper
from workbench.fabric import Fabric, Link, even


class HandClock:
    """A clock and its naps in one: every sleep ends `late` seconds after it should."""

    hurried = False

    def __init__(self, late: float) -> None:
        self.t, self.late = 0.0, late
        self.clock = self

    def now(self) -> float:
        return self.t

    def until(self, t: float) -> None:
        if t > self.t:
            self.t = t + self.late


def shaper(late: float) -> Shaper:
    """Rank 0 of two on 8 Mbit/s: an all-reduce of 10,000 bytes takes 10 ms."""
    port = Port(0, 2, HandClock(late), 0)
    port.fabric = Fabric(link=Link(bandwidth=8))
    return Shaper(port, None)


def operation(s: Shaper, asked: float, codec: float = 0.0, transfer: float = 1e-3) -> float:
    """One all-reduce: encoded for `codec` seconds, really moved in `transfer`; when it ended on the Link."""
    clock = s.naps.clock
    clock.t = max(clock.t, asked) + codec
    ready = s.ready(clock.t, asked)
    clock.t += transfer
    return s.finish(even("all_reduce", 10_000, 2), lambda: ready)[2]


@pytest.mark.parametrize("late", [0.0, 2e-3])
def test_operations_that_queue_take_no_longer_because_each_sleep_ends_late(late: float) -> None:
    s = shaper(late)
    ends = [operation(s, asked=0.0) for _ in range(10)]
    assert ends == pytest.approx([0.01 * (k + 1) for k in range(10)])


@pytest.mark.parametrize("late", [0.0, 2e-3])
def test_encoding_between_two_operations_takes_its_time(late: float) -> None:
    s = shaper(late)
    ends = [operation(s, asked=0.0, codec=5e-3) for _ in range(4)]
    assert ends == pytest.approx([0.015 * (k + 1) for k in range(4)])


@pytest.mark.parametrize(("asked", "end"), [(0.0105, 0.0205), (0.030, 0.040)])
def test_an_operation_that_is_asked_for_later_begins_then(asked: float, end: float) -> None:
    s = shaper(2e-3)
    operation(s, asked=0.0)
    assert operation(s, asked=asked) == pytest.approx(end)


def test_a_transfer_that_is_slower_than_the_link_is_not_credited() -> None:
    s = shaper(0.0)
    ends = [operation(s, asked=0.0, transfer=0.025) for _ in range(3)]
    assert ends == pytest.approx([0.010, 0.035, 0.060])
