"""Checks that requests on their way from rank 0 to all ranks survive the loss of a connection."""

from __future__ import annotations

import queue
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.engine.control.control_channel import ControlChannel, RequestFlag
from workbench.engine.rank.training import RankTraining
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


def of(wire: Any, *requests: dict[str, Any], rank: int = 0, flag: RequestFlag | None = None) -> ControlChannel:
    inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    for request in requests:
        inbox.put(request)
    return ControlChannel(wire, rank, inbox, flag)


CHANGE, STOP = {"kind": "change", "id": "change 1"}, {"kind": "stop", "id": "stop"}


@pytest.mark.parametrize("lost", [1, 2], ids=["before the length was heard", "before the words were"])
def test_requests_in_transit_at_the_loss_of_a_connection_are_still_pending(lost: int) -> None:
    tickets = of(Broken(lost), CHANGE, STOP)
    tickets.publish_requests()
    assert tickets.unheard_requests == [CHANGE, STOP] and tickets.inbox.empty()
    with pytest.raises(ConnectionError):
        tickets.take_requests()
    assert tickets.unheard_requests == [CHANGE, STOP]
    pending_requests: Any = SimpleNamespace(
        pending_requests=[{"id": "a"}], early_requests=[{"id": "b"}], control_channel=tickets
    )
    assert RankTraining.unheeded_requests.fget(pending_requests) == [{"id": "a"}, {"id": "b"}, CHANGE, STOP]  # type: ignore[attr-defined]


def test_requests_that_all_ranks_have_received_are_no_longer_in_transit() -> None:
    for tickets in (of(Broken(0), CHANGE), of(None, CHANGE)):
        tickets.publish_requests()
        tickets.publish_requests()
        assert tickets.take_requests() == [CHANGE] and tickets.unheard_requests == [] and tickets.pending_count == 1
        assert tickets.take_requests() == [] and tickets.pending_count == 0
    other = of(Broken(1), rank=1)
    other.publish_requests()
    with pytest.raises(ConnectionError):
        other.take_requests()
    assert other.unheard_requests == [], "only the first rank knows what is said"


def test_a_late_rank_still_sees_an_earlier_raise_of_the_first_ranks_flag(tmp_path: Path) -> None:
    """The first rank looks after child 2, gets another request, and begins child 3 before the other rank has looked."""
    wire: Any = SimpleNamespace(size=2, broadcast=lambda what, root: None)
    first, other = (of(wire, rank=rank, flag=RequestFlag(tmp_path / "flag")) for rank in (0, 1))
    for tickets in (first, other):
        tickets.enter_strategy(ZeRO1(), flat=True)
    for child in range(1, 40, 2):
        first.inbox.put(CHANGE)
        first.notify_ranks(child)
        assert first.is_due(child)
        first.publish_requests()
        first.inbox.put(STOP)
        first.notify_ranks(child + 1)
        assert other.is_due(child) and not other.is_due(child), "both ask after the same child, and once"
        assert first.is_due(child + 1) and other.is_due(child + 1)
        first.publish_requests()
        assert not first.is_due(child + 1) and not other.is_due(child + 1)
    for tickets in (first, other):
        tickets.close()
