"""Tests strangers that call a rank, and ranks that send impossible messages."""

from __future__ import annotations

import os
import random
import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from tests.waiting import until
from workbench.engine.collectives.lane import StrategyError
from workbench.engine.collectives.shaping import Clock, PacedSleep, Port
from workbench.engine.collectives.wire import LeaveEvent, connect_store, host_store
from workbench.engine.p2p import greeting, sockets
from workbench.engine.p2p import listener as door
from workbench.engine.p2p.mailbox import Mailbox
from workbench.engine.p2p.sockets import FRAME_HEAD
from workbench.rank import Rank

pytestmark = pytest.mark.ranks

SECRET = os.urandom(32)
RUN = "a0b1c2d3e4f5"  # the run's name, which is no secret


@pytest.fixture
def boxes() -> Iterator[list[Mailbox]]:
    """Two ranks' mailboxes with messages of at most 1 MB."""
    store, host, port = host_store()
    made = []
    for r in range(2):
        link, into = Port(r, 2, PacedSleep(Clock(time.time())), 0), connect_store(host, port, RUN)
        made.append(Mailbox(Rank(r, 2), into, (host, port), SECRET, link, LeaveEvent(), lambda *row: None, True, 2**20))
        made[-1].open_door()
    yield made
    for mailbox in made:
        mailbox.close()
    del store


def stranger(mailbox: Mailbox) -> socket.socket:
    """Connects to a rank's mailbox as a stranger."""
    host, port = mailbox.door.address.split()
    return socket.create_connection((host, int(port)), timeout=60)


def is_closed(s: socket.socket) -> bool:
    """Returns whether the other end closes `s`, after any data."""
    try:
        while s.recv(4096):
            pass
    except OSError as error:
        return not isinstance(error, TimeoutError)
    return True


def messages_still_pass(boxes: list[Mailbox]) -> None:
    boxes[1].send(torch.full((2,), 5.0), 0, "x")
    got = boxes[0].recv(torch.empty(2), 1, "x")
    assert got is not None and got[0].tolist() == [5.0, 5.0] and boxes[0].closed_ranks == set()


HUGE = FRAME_HEAD.pack(1, 1, 0, -1, 0.0, 0.0, 2**62)
SAID = {
    "nothing": b"",
    "the run's name": struct.pack("<I", 1) + RUN.encode() + HUGE,
    "a rank that is there": greeting.HELLO_STRUCT.pack(1, bytes(32), bytes(32)) + HUGE,
    "a rank that is not": greeting.HELLO_STRUCT.pack(2**32 - 1, bytes(32), bytes(32)) + HUGE,
    "anything": random.Random(3).randbytes(5000),
}


@pytest.mark.parametrize("said", SAID.values(), ids=SAID)
def test_a_strangers_connection_is_closed_and_counted_and_messages_pass(boxes: list[Mailbox], said: bytes) -> None:
    with stranger(boxes[0]) as s:
        assert len(s.recv(100)) == greeting.NONCE_BYTES, "it is asked for a proof"
        s.sendall(said)
        if len(said) < greeting.HELLO_STRUCT.size:
            s.shutdown(socket.SHUT_WR)
        assert is_closed(s)
    assert until(lambda: boxes[0].stranger_count == 1)
    messages_still_pass(boxes)


def test_a_proof_is_invalid_a_second_time_or_at_another_rank(boxes: list[Mailbox]) -> None:
    mine = os.urandom(greeting.NONCE_BYTES)
    here, there = boxes[0].door.address, boxes[1].door.address
    with stranger(boxes[0]) as s:
        good = greeting.make_proof(SECRET, b"caller", 1, 0, here, s.recv(greeting.NONCE_BYTES), mine)
        s.sendall(greeting.HELLO_STRUCT.pack(1, mine, good))
        assert len(s.recv(greeting.PROOF_BYTES)) == greeting.PROOF_BYTES, "this one is as a rank's"
    for where in (here, there):
        with stranger(boxes[0]) as s:
            theirs = s.recv(greeting.NONCE_BYTES)
            stolen = good if where == here else greeting.make_proof(SECRET, b"caller", 1, 0, where, theirs, mine)
            s.sendall(greeting.HELLO_STRUCT.pack(1, mine, stolen))
            assert is_closed(s)
    assert until(lambda: boxes[0].stranger_count == 2)


def test_a_rank_sends_nothing_to_a_peer_without_proof(boxes: list[Mailbox]) -> None:
    """A stranger that listens at a published address receives a proof, but no part of a message."""
    heard = b""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        boxes[0].store.set("mailbox/1", f"127.0.0.1 {listener.getsockname()[1]}")
        boxes[0].send(torch.full((100,), 7.0), 1, "weights")
        s, _ = listener.accept()
        s.settimeout(60)
        s.sendall(bytes(greeting.NONCE_BYTES))
        heard += s.recv(4096)
        s.sendall(bytes(greeting.PROOF_BYTES))
        while more := s.recv(4096):
            heard += more
        s.close()
    assert len(heard) == greeting.HELLO_STRUCT.size and SECRET not in heard
    with pytest.raises(StrategyError, match="is not rank 1 of this run"):
        boxes[0].recv(None, 1, "answer")


def test_many_strangers_keep_no_rank_out(boxes: list[Mailbox]) -> None:
    crowd = []
    stop = threading.Event()

    def press() -> None:
        while not stop.is_set():
            crowd.append(stranger(boxes[0]))
            if len(crowd) > 300:
                crowd.pop(0).close()

    thread = threading.Thread(target=press)
    thread.start()
    try:
        assert until(lambda: len(crowd) > 3 * (door.MAX_UNPROVEN + 2))
        for _ in range(5):
            messages_still_pass(boxes)
    finally:
        stop.set()
        thread.join()
        for s in crowd:
            s.close()
    assert len(boxes[0].door._unknown) <= door.MAX_UNPROVEN + 2 and boxes[0].stranger_count > 0


def test_an_oversized_announcement_names_the_rank_and_allocates_nothing(boxes: list[Mailbox]) -> None:
    messages_still_pass(boxes)
    boxes[1]._senders[0].queue_frame(HUGE, b"", lambda: None)
    with pytest.raises(StrategyError, match=r"rank 1's line to rank 0 was closed: .* 4611686018427387904 bytes"):
        boxes[0].recv(None, 1, "x")
    with pytest.raises(StrategyError, match="at most 1048576 here"):
        boxes[0].send(torch.zeros(2**20), 1)


@pytest.mark.parametrize("error", [MemoryError(), ValueError("no such text")])
def test_errors_on_the_mail_thread_reach_receivers(
    boxes: list[Mailbox], error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*rest: object) -> None:
        raise error

    messages_still_pass(boxes)
    monkeypatch.setattr(boxes[0], "file_message", fails)
    boxes[1].send(torch.ones(1), 0, "x")
    with pytest.raises(StrategyError, match=type(error).__name__):
        boxes[0].recv(None, 1, "x")
    goes_on = threading.Event()
    boxes[0].run_on_thread(goes_on.set)
    assert goes_on.wait(60), "its thread has not ended"


def test_a_rank_that_is_turned_away_calls_again_while_messages_pass(boxes: list[Mailbox]) -> None:
    turned: list[float] = []
    shut, opened = threading.Event(), threading.Event()

    def admit() -> None:
        if opened.is_set():
            return boxes[0].door.accept_caller()
        turned.append(time.monotonic())
        boxes[0].door.socket.accept()[0].close()

    boxes[0].run_on_thread(lambda: boxes[0].selector.modify(boxes[0].door.socket, selectors.EVENT_READ, admit))
    boxes[0].run_on_thread(shut.set)
    assert shut.wait(60)
    boxes[1].send(torch.full((2,), 5.0), 0, "x")
    assert until(lambda: len(turned) > 2)
    boxes[0].send(torch.ones(2), 1, "y")
    assert boxes[1].recv(torch.empty(2), 0, "y") is not None and not boxes[0].heard_from
    opened.set()
    assert until(lambda: boxes[0].heard_from == {1}) and boxes[1].closed_ranks == set()
    assert boxes[0].recv(torch.empty(2), 1, "x") is not None
    assert min(b - a for a, b in pairwise(turned)) > sockets.FIRST_REDIAL_DELAY, "it does not press"


def test_a_rank_that_is_always_turned_away_gives_up(boxes: list[Mailbox], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "MAX_DIALS", 5)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        boxes[0].store.set("mailbox/1", f"127.0.0.1 {listener.getsockname()[1]}")
        boxes[0].send(torch.ones(1), 1, "x")
        for _ in range(5):
            listener.accept()[0].close()
        assert until(lambda: boxes[0].closed_ranks == {1})
    assert sum(sockets.find_retry_delay(k) for k in range(1, 400)) == pytest.approx(20.0, abs=1.0)
