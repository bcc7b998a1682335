"""Tests messages between two ranks over real sockets in one process: order, senders, end."""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections.abc import Iterator

import pytest
import torch

from workbench.engine.collectives.lane import StrategyError
from workbench.engine.collectives.shaping import Clock, PacedSleep, Port
from workbench.engine.collectives.wire import Aborted, LeaveEvent, connect_store, host_store
from workbench.engine.p2p.mailbox import FROM_BACKGROUND, FROM_HOST, Mailbox
from workbench.fabric import Fabric, Link, Slow
from workbench.rank import Rank

pytestmark = pytest.mark.ranks

Spans = list[tuple]
SECRET = os.urandom(32)


@pytest.fixture(scope="module")
def where() -> Iterator[tuple[str, int]]:
    store, host, port = host_store()
    yield host, port
    del store


@pytest.fixture
def boxes(where: tuple[str, int]) -> Iterator[list[Mailbox]]:
    """Three ranks' mailboxes."""
    host, port = where
    token = uuid.uuid4().hex
    clock = Clock(time.time())
    made = []
    for r in range(3):
        spans: Spans = []
        link = Port(r, 3, PacedSleep(clock), 0)
        mailbox = Mailbox(Rank(r, 3), connect_store(host, port, token), (host, port), SECRET, link, LeaveEvent(),
                    lambda *row, into=spans: into.append(row), local=True)  # fmt: skip
        mailbox.spans = spans  # type: ignore[attr-defined]
        made.append(mailbox)
    before = threading.active_count()
    for mailbox in made:
        mailbox.open_door()
    yield made
    for mailbox in made:
        mailbox.close()
    assert threading.active_count() <= before, "a thread was left behind"


def test_messages_of_one_sender_come_in_order_and_kinds_do_not_mix(boxes: list[Mailbox]) -> None:
    for k in range(50):
        boxes[1].send(torch.full((3,), float(k)), 0, "a" if k % 2 else "b")
    got = [boxes[0].recv(torch.empty(3), None, "a") for _ in range(25)]
    assert [float(data[0]) for data, _ in got] == list(range(1, 50, 2)) and {s for _, s in got} == {1}
    assert float(boxes[0].recv(None, 1, "b")[0][0]) == 0.0


def test_a_copy_is_sent_and_the_sender_never_waits(boxes: list[Mailbox]) -> None:
    x = torch.ones(2_000_000)
    for other in (1, 2):  # no rank receives before this loop ends, so a blocking send would deadlock
        boxes[0].send(x, other)
    x.zero_()
    for other in (1, 2):
        data, source = boxes[other].recv(torch.empty(2_000_000), 0, "")
        assert source == 0 and float(data.sum()) == 2_000_000.0


@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(0),
        torch.tensor(3.5),
        torch.arange(6).view(2, 3),
        torch.ones(4).bfloat16(),
        torch.tensor([True, False]),
        torch.arange(8.0)[::2],
    ],
    ids=str,
)
def test_any_shape_and_dtype_arrives_unchanged(boxes: list[Mailbox], x: torch.Tensor) -> None:
    boxes[2].send(x, 1, "x")
    data, source = boxes[1].recv(None, None, "x")
    assert source == 2 and data.shape == x.shape and data.dtype == x.dtype and torch.equal(data, x)
    boxes[2].send(x, 2, "x")
    assert torch.equal(boxes[2].recv(torch.empty_like(x), 2, "x")[0], x), "to itself"


def test_a_wrong_size_is_refused_with_both_shapes(boxes: list[Mailbox]) -> None:
    boxes[0].send(torch.ones(4), 1, "x")
    with pytest.raises(StrategyError, match=r"rank 0 sent float32\[4\] of 'x' to rank 1, .* float32\[5\]"):
        boxes[1].recv(torch.empty(5), None, "x")
    with pytest.raises(StrategyError, match="ranks 0 to 2"):
        boxes[0].send(torch.ones(1), 3)


def test_a_rank_connects_only_to_ranks_that_it_sends_to(boxes: list[Mailbox]) -> None:
    boxes[0].send(torch.ones(1), 1, "x")
    boxes[1].recv(None, 0, "x")
    assert [mailbox.connected_ranks for mailbox in boxes] == [{1}, set(), set()]


def test_a_receiver_notices_an_order_to_leave_and_a_lost_sender(boxes: list[Mailbox]) -> None:
    threading.Timer(0.2, boxes[0].leaving.set).start()
    with pytest.raises(Aborted):
        boxes[0].recv(None, None, "x")
    boxes[2].send(torch.ones(1), 1, "first words")
    boxes[1].recv(None, 2, "first words")
    boxes[2].cut_connections()
    with pytest.raises(ConnectionError, match="rank 2"):
        boxes[1].recv(None, 2, "more")


def test_messages_sent_before_a_rank_left_still_arrive(boxes: list[Mailbox]) -> None:
    """Also if the receiver first notices that it has no one to send to, as at the end of a run."""
    boxes[0].send(torch.ones(1), 1, "first")
    boxes[1].send(torch.ones(1), 0, "first")
    for mailbox in boxes[:2]:
        mailbox.recv(None, None, "first")

    def notices_late() -> None:
        time.sleep(0.3)
        boxes[0]._senders[1]._write_frames()
        time.sleep(0.3)

    boxes[0].run_on_thread(notices_late)
    boxes[1].send(torch.full((2,), 7.0), 0, "last")
    boxes[1].close()
    data, source = boxes[0].recv(torch.empty(2), 1, "last")
    assert source == 1 and data.tolist() == [7.0, 7.0]
    with pytest.raises(ConnectionError, match="rank 1"):
        boxes[0].recv(None, 1, "more")


def test_recv_returns_none_once_all_messages_have_arrived(boxes: list[Mailbox]) -> None:
    expected = 3
    threading.Timer(0.2, lambda: [boxes[0].send(torch.ones(1), 1, "x") for _ in range(expected)]).start()
    got = 0
    while boxes[1].recv(torch.empty(1), None, "x", lambda: boxes[1].received_count >= expected) is not None:
        got += 1
    boxes[2].send(torch.ones(1), 1, "x", FROM_BACKGROUND)
    boxes[2].send(torch.ones(1), 1, "x", FROM_HOST)
    assert got == expected and [box.posted_count for box in boxes] == [expected, 0, 1], "the engine's own do not count"


def test_messages_from_before_a_turned_page_are_dropped(boxes: list[Mailbox]) -> None:
    boxes[0].send(torch.zeros(1), 1, "x")
    boxes[0].send(torch.zeros(1), 1, "y")
    boxes[1].recv(None, 0, "y")
    boxes[1].drop_old_messages()
    boxes[0].drop_old_messages()
    boxes[0].send(torch.ones(1), 1, "x")
    assert float(boxes[1].recv(None, 0, "x")[0]) == 1.0


def test_every_message_announces_a_meeting(boxes: list[Mailbox]) -> None:
    boxes[0].meet = 7
    boxes[0].send(torch.ones(1), 1, "x")
    boxes[1].recv(None, 0, "x")
    boxes[1].send(torch.ones(1), 2, "x")
    boxes[2].recv(None, 1, "x")
    assert [mailbox.meet for mailbox in boxes] == [7, 7, 7]


def test_a_link_delays_messages_and_ports_receive_one_after_the_other(boxes: list[Mailbox]) -> None:
    for mailbox in boxes:
        mailbox.port.fabric = Fabric(link=Link(bandwidth=8.0, latency=10.0))  # 1 MB/s
    for sender in (1, 2):
        for part in range(2):
            boxes[sender].send(torch.zeros(50_000, dtype=torch.uint8), 0, f"part {part}")
    came = []
    for _ in range(4):
        boxes[0].recv(None, None, "part 0" if len(came) < 2 else "part 1")
        came.append(boxes[0].port.now())
    spans = sorted(boxes[1].spans)  # type: ignore[attr-defined]
    assert [row[2] for row in spans] == ["send part 0 to 0", "send part 1 to 0"]
    assert {row[6] for row in spans} == {50_000}
    assert spans[1][4] == pytest.approx(spans[0][5]), "the second message waits for the sender's port"
    assert spans[0][5] - spans[0][4] == pytest.approx(0.06, abs=1e-6)
    assert came[3] - spans[0][4] == pytest.approx(4 * 0.06, rel=0.1), "four messages through one port"


def test_a_slow_port_slows_received_messages(boxes: list[Mailbox]) -> None:
    for mailbox in boxes:
        mailbox.port.fabric = Fabric(link=Link(latency=30.0), faults=(Slow(rank=1, factor=3.0, phase="link"),))
    began = boxes[0].port.now()
    boxes[0].send(torch.ones(1), 1, "x")
    boxes[1].recv(None, 0, "x")
    assert boxes[1].port.now() - began == pytest.approx(0.09, abs=0.03)
