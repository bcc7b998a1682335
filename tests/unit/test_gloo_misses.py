"""A group knows its own sockets, and so notices a lost peer that gloo has missed."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.waiting import until
from workbench.engine.collectives.wire import Aborted, LeaveEvent, Wire, connect_store, host_store
from workbench.engine.device import gloo

pytestmark = pytest.mark.ranks


class Stuck:
    """A collective that never ends, because gloo has missed its end."""

    def wait(self, limit: object) -> None:
        time.sleep(0.01)
        raise RuntimeError("Timed out waiting 100ms for send operation to complete")


def opened(precise: bool = False) -> Iterator[tuple[Wire, Wire]]:
    """Yields two ranks' ends of one wire."""
    kept, host, port = host_store()
    generation, found = uuid.uuid4().hex, {}

    def open(rank: int) -> None:
        store = connect_store(host, port, generation)
        found[rank] = Wire(store, rank, 2, "control", LeaveEvent(), precise=precise)
        found[rank].wait(found[rank].all_reduce(torch.ones(1)))

    threads = [threading.Thread(target=open, args=(r,)) for r in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    yield found[0], found[1]
    for wire in found.values():
        wire.cut_connections()
        wire.close()
    del kept


@pytest.fixture
def ends() -> Any:
    yield from opened()


@pytest.fixture
def foreign(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A connection that other code of the process opens while the group is made."""
    made: list[socket.socket] = []

    def making(*args: Any) -> Any:
        # the lock keeps the server apart from the other rank's listener, which a process with one rank does not have
        with gloo._opening, socket.create_server(("127.0.0.1", 0)) as server:
            made.append(socket.create_connection(server.getsockname()))
            made.append(server.accept()[0])
        return original(*args)

    original = gloo.GlooGroup._make_group
    monkeypatch.setattr(gloo.GlooGroup, "_make_group", staticmethod(making))
    yield made
    for s in made:
        s.close()


def test_a_group_takes_no_socket_of_other_code(foreign: list[socket.socket], ends: Any) -> None:
    client, server = foreign[:2]
    ends[0].cut_connections()
    client.send(b"still open")
    server.settimeout(5)
    assert server.recv(10) == b"still open"


def test_a_closed_socket_of_other_code_is_no_lost_peer(foreign: list[socket.socket], ends: Any) -> None:
    for s in foreign:
        s.close()
    assert not any(end.has_lost_peer() for end in ends)


def test_a_rank_without_a_known_listener_makes_no_foreign_socket_the_groups() -> None:
    class Store:
        def get(self, key: str) -> bytes:
            return b"" if key == "listener 0" else b"127.0.0.1 5"

    with socket.socket() as unconnected:
        taken = {fd for fd, _ in gloo._find_group_sockets(Store(), 0, 2, set())}
        assert unconnected.fileno() not in taken


@pytest.mark.parametrize("precise", [False, True], ids=["plain", "precise"])
def test_a_cut_ends_the_wait_of_the_peer_if_descriptors_are_above_1024(precise: bool) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    kept = [os.open(os.devnull, os.O_RDONLY) for _ in range(1024)]
    try:
        for first, second in opened(precise):
            failed: list[RuntimeError] = []

            def reduce(wire: Wire = second, failed: list[RuntimeError] = failed) -> None:
                try:
                    wire.wait(wire.all_reduce(torch.ones(1)))
                except RuntimeError as error:
                    failed.append(error)

            thread = threading.Thread(target=reduce, daemon=True)
            thread.start()
            thread.join(0.3)
            assert thread.is_alive()
            first.cut_connections()
            thread.join(20)
            assert failed
    finally:
        for fd in kept:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_waiting_for_a_lost_peer_ends_although_gloo_reports_nothing(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "GONE_PEER_TIMEOUT", 0.3)
    first, second = ends
    first.cut_connections()
    assert until(second.has_lost_peer)
    began = time.monotonic()
    with pytest.raises(ConnectionError, match="Connection closed by peer"):
        second.wait(Stuck())
    assert time.monotonic() - began > 0.3


def test_a_long_wait_goes_on_until_this_rank_must_leave(ends: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gloo, "GONE_PEER_TIMEOUT", 0.05)
    first, _ = ends
    timer = threading.Timer(0.5, first.leaving.set)
    timer.start()
    with pytest.raises(Aborted):
        first.wait(Stuck())
    timer.join()
