"""Checks that requests on their way from rank 0 to all ranks survive the loss of a connection."""

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
    """A wire that accepts everything and loses a peer at the n-th wait."""

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
def test_requests_in_transit_at_the_loss_of_a_connection_are_still_pending(lost: int) -> None:
    tickets = of(Broken(lost), CHANGE, STOP)
    tickets.ask()
    assert tickets.unheard == [CHANGE, STOP] and tickets.inbox.empty()
    with pytest.raises(ConnectionError):
        tickets.take()
    assert tickets.unheard == [CHANGE, STOP]
    asked: Any = SimpleNamespace(asked=[{"id": "a"}], pocket=[{"id": "b"}], tickets=tickets)
    assert Training.unheeded.fget(asked) == [{"id": "a"}, {"id": "b"}, CHANGE, STOP]  # type: ignore[attr-defined]


def test_requests_that_all_ranks_have_received_are_no_longer_in_transit() -> None:
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


def test_a_late_rank_still_sees_an_earlier_raise_of_the_first_ranks_flag(tmp_path: Path) -> None:
    """The first rank looks after child 2, gets another request, and begins child 3 before the other rank has looked."""
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
