"""Code that lists the sockets of a process leaves them as their owners made them."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

import pytest

from workbench.cluster.observe import dead_links
from workbench.engine.device import gloo


@pytest.mark.parametrize("list_sockets", [gloo._list_sockets, dead_links.list_connections])
def test_a_listed_socket_still_blocks_if_a_default_timeout_is_set(list_sockets: Callable[[], object]) -> None:
    """Libraries that download files call `socket.setdefaulttimeout`."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        before = socket.getdefaulttimeout()
        socket.setdefaulttimeout(5.0)
        try:
            list_sockets()
            assert socket.getdefaulttimeout() == 5.0
        finally:
            socket.setdefaulttimeout(before)
        assert os.get_blocking(server.fileno()) and os.get_blocking(client.fileno())
