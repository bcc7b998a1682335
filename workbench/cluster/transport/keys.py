"""CurveZMQ keys for one lab: only its kernels may listen to its engines or command them.

Each engine and the lab have a pair of keys of their own. Only the public halves travel over ipyparallel. A cluster that
a lab starts encrypts them; another cluster does what its owner chose.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator


class CurveKeys(NamedTuple):
    """One pair: an engine's, which is a server, or the lab's. Each kernel of the lab is a client with it."""

    public: str
    secret: str

    @classmethod
    def make_pair(cls) -> CurveKeys:
        return cls(*(k.decode() for k in zmq.curve_keypair()))

    def lock_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a server with these keys. `admit` sets its clients."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()

    def connect_socket(self, socket: zmq.Socket[bytes], where: str) -> None:
        """Connects `socket` to the engine at `where`, "address public-key", and only if that has the secret key."""
        address, server = where.split()
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()
        socket.connect(address)


def admit_client(client: str, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    """Refuses every client on the sockets of `context` except `client`, a public key. Stop the result to end it."""
    doorkeeper = ThreadAuthenticator(context)
    doorkeeper.start()
    doorkeeper.configure_curve_callback(credentials_provider=_OneClient(client))
    return doorkeeper


class _OneClient:
    def __init__(self, client: str) -> None:
        self.client = client.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client
