"""Requests on their way from rank 0 to all: none is lost where a connection is, while they are under way."""

from __future__ import annotations

import queue
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.engine.ticket import Tickets
from workbench.engine.training import Training


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


def of(wire: Any, *requests: dict[str, Any], rank: int = 0) -> Tickets:
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for request in requests:
        inbox.put(request)
    return Tickets(wire, rank, inbox, None)


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
