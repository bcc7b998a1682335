"""Requests on their way from rank 0 to all: none is lost where a connection is, while they are under way."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.engine.control.ticket import Flag, Tickets
from workbench.engine.rank.training import Training
from workbench.strategies import ZeRO1


class Broken:
    """A wire that takes what is given to it, and has lost a peer when somebody waits for the n-th of it."""

    def __init__(self, lost: int) -> None:
        self.lost = lost

    def broadcast(self, what: Any, root: int) -> None:
        return None

    def wait(self, work: Any) -> None:
        self.lost -= 1
        if self.lost == 0:
            raise ConnectionError("Connection closed by peer")


def of(wire: Any, *requests: dict[str, Any], rank: int = 0, flag: Flag | None = None) -> Tickets:
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for request in requests:
        inbox.put(request)
    return Tickets(wire, rank, inbox, flag)


CHANGE, STOP = {"kind": "change", "id": "change 1"}, {"kind": "stop", "id": "stop"}


@pytest.mark.parametrize("lost", [1, 2], ids=["before the length was heard", "before the words were"])
def test_what_was_on_its_way_when_a_connection_was_lost_is_still_to_be_heard(lost: int) -> None:
    tickets = of(Broken(lost), CHANGE, STOP)
    tickets.ask()
    assert tickets.unheard == [CHANGE, STOP] and tickets.inbox.empty()
    with pytest.raises(ConnectionError):
        tickets.take()
    assert tickets.unheard == [CHANGE, STOP]
    asked: Any = SimpleNamespace(asked=[{"id": "a"}], pocket=[{"id": "b"}], tickets=tickets)
    assert Training.unheeded.fget(asked) == [{"id": "a"}, {"id": "b"}, CHANGE, STOP]  # type: ignore[attr-defined]


def test_what_all_have_heard_is_no_longer_on_its_way() -> None:
    for tickets in (of(Broken(0), CHANGE), of(None, CHANGE)):
        tickets.ask()
        tickets.ask()
        assert tickets.take() == [CHANGE] and tickets.unheard == [] and tickets.waiting == 1
        assert tickets.take() == [] and tickets.waiting == 0
    other = of(Broken(1), rank=1)
    other.ask()
    with pytest.raises(ConnectionError):
        other.take()
    assert other.unheard == [], "only the first rank knows what is said"


def test_a_rank_that_looks_late_still_sees_what_the_first_has_raised_before_it_raised_again(tmp_path: Path) -> None:
    """The first looks after child 2 and asks, is asked for more, and begins child 3 before the other has looked."""
    wire: Any = SimpleNamespace(size=2, broadcast=lambda what, root: None)
    first, other = (of(wire, rank=rank, flag=Flag(tmp_path / "flag")) for rank in (0, 1))
    for tickets in (first, other):
        tickets.enter(ZeRO1(), SimpleNamespace(), flat=True)  # type: ignore[arg-type]
    for child in range(1, 40, 2):
        first.inbox.put(CHANGE)
        first.ring(child)
        assert first.raised(child)
        first.ask()
        first.inbox.put(STOP)
        first.ring(child + 1)
        assert other.raised(child) and not other.raised(child), "both ask after the same child, and once"
        assert first.raised(child + 1) and other.raised(child + 1)
        first.ask()
        assert not first.raised(child + 1) and not other.raised(child + 1)
    for tickets in (first, other):
        tickets.close()
