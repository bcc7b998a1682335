"""CurveZMQ keys for one lab: only its kernels may listen to its engines or command them.

Only public halves travel over ipyparallel, which a lab's own cluster encrypts.
"""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator


class CurveKeys(NamedTuple):
    """One pair: an engine's, as a server, or the lab's, whose kernels are clients."""

    public: str
    secret: str

    @classmethod
    def make_pair(cls) -> CurveKeys:
        return cls(*(k.decode() for k in zmq.curve_keypair()))

    def lock_socket(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a server with these keys. `admit_client` sets its clients."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()

    def connect_socket(self, socket: zmq.Socket[bytes], where: str) -> None:
        """where: "address public-key" of an engine that has the secret key"""
        address, server = where.split()
        socket.curve_serverkey = server.encode()
        socket.curve_publickey, socket.curve_secretkey = self.public.encode(), self.secret.encode()
        socket.connect(address)


def admit_client(client: str, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
    """Admits only `client`, a public key, on the sockets of `context`. Stop the result to end it."""
    doorkeeper = ThreadAuthenticator(context)
    doorkeeper.start()
    doorkeeper.configure_curve_callback(credentials_provider=_OneClient(client))
    return doorkeeper


class _OneClient:
    def __init__(self, client: str) -> None:
        self.client = client.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client
