"""CurveZMQ for one lab: who may listen to its engines and who may command them.

Each engine and the lab have a pair of keys of their own. Only the public halves travel over ipyparallel, whose channels
are encrypted in a cluster that a lab starts, and in another one as whoever started it wished.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator


class Keys(NamedTuple):
    """One pair: an engine's, which is a server, or the lab's, with which each of its kernels is a client."""

    public: str
    secret: str

    @classmethod
    def new(cls) -> Keys:
        return cls(*(k.decode() for k in zmq.curve_keypair()))

    def lock(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a server with these keys (see `admit` for whom it talks to)."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()

    def reach(self, socket: zmq.Socket[bytes], where: str) -> None:
        """Connects `socket` to the engine at `where`, "address public-key", and to nobody who has not its secret."""
        address, server = where.split()
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()
        socket.connect(address)


def admit(client: str, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    """Refuses all but the `client` with this public key on the sockets of `context`; stop the answer to end it."""
    doorkeeper = ThreadAuthenticator(context)
    doorkeeper.start()
    doorkeeper.configure_curve_callback(credentials_provider=_Only(client))
    return doorkeeper


class _Only:
    def __init__(self, client: str) -> None:
        self.client = client.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client
