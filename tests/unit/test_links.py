"""Tests dead links: found from the system's view of real sockets, named by their two ranks."""

from __future__ import annotations

import fcntl
import resource
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.harm import deaf
from tests.waiting import until
from workbench.cluster.observe.dead_links import find_dead_links, list_connections, name_dead_link, read_silence
from workbench.cluster.observe.hang_diagnosis import StallVerdict

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what was acknowledged")


@pytest.fixture
def lines() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Two connections with both of their ends."""
    with ExitStack() as stack:
        door = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        yield [(stack.enter_context(socket.create_connection(door.getsockname())),
                stack.enter_context(door.accept()[0])) for _ in range(2)]  # fmt: skip


def test_unacknowledged_data_is_reported_but_unread_data_is_not(
    lines: list[tuple[socket.socket, socket.socket]],
) -> None:
    (full, _), (one, other) = lines
    full.setblocking(False)
    with pytest.raises(BlockingIOError):
        while True:
            full.send(bytes(2**20))  # not read, as if a process is stopped
    deaf(other)
    one.sendall(b"never")
    assert until(lambda: read_silence(one) > 3.0) and read_silence(full) == read_silence(other) == 0.0
    ends = {tuple(mine): seconds for mine, _, seconds in list_connections()}
    assert ends[one.getsockname()] > 3.0 and ends[full.getsockname()] == 0.0
    deaf(other, so=False)
    assert until(lambda: read_silence(one) == 0.0), "the link is there again"


def test_a_connection_with_any_descriptor_counts(lines: list[tuple[socket.socket, socket.socket]]) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 4096), hard))
    try:
        high = socket.socket(fileno=fcntl.fcntl(lines[0][0], fcntl.F_DUPFD, 2048))
        lines[0][0].close()  # the descriptor of an engine with many ranks exceeds 1,024
        with high:
            assert high.getsockname() in [tuple(mine) for mine, _, _ in list_connections()]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_dead_link_is_named_by_both_ends_from_either_ends_report() -> None:
    def end(port: int, to: int, seconds: float = 0.0) -> list[object]:
        return [["127.0.0.1", port], ["127.0.0.1", to], seconds]

    told = {0: [end(1, 2), end(9, 1000, 30.0)], 1: [end(2, 1), end(3, 4, 12.0)], 2: [end(4, 3, 11.0)], 3: OSError()}
    assert find_dead_links(told) == {(1, 2): 12.0}, "nor is what leads to no rank any of theirs"
    found = name_dead_link(
        StallVerdict("all ranks have waited in all_reduce of step 5 for 13 s", (0, 1, 2, 3), 13.0), told
    )
    assert found.stalled_ranks == (1, 2) and not found.is_certain
    assert found.text == ("rank 1 waits for rank 2, and rank 2 for rank 1: no data has crossed the link between them "
                          "for 12 s; all ranks have waited in all_reduce of step 5 for 13 s")  # fmt: skip
    assert name_dead_link(found, {0: [end(1, 2)], 1: [end(2, 1)]}) == found
