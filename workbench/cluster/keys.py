"""CurveZMQ for one lab: who may listen to its engines and who may command them. Keys travel over ipyparallel."""

from __future__ import annotations

from typing import NamedTuple

import zmq
from zmq.auth.thread import ThreadAuthenticator


class Keys(NamedTuple):
    """One lab's keys: the engines are servers and share a pair, every kernel of the lab is the one client."""

    server: str
    server_secret: str
    client: str
    client_secret: str

    @classmethod
    def new(cls) -> Keys:
        return cls(*(k.decode() for k in (*zmq.curve_keypair(), *zmq.curve_keypair())))

    def lock(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a server that only this lab's client can talk to (see `admit`)."""
        socket.curve_server = True
        socket.curve_publickey, socket.curve_secretkey = self.server.encode(), self.server_secret.encode()

    def unlock(self, socket: zmq.Socket[bytes]) -> None:
        """Makes `socket` a client of this lab's engines."""
        socket.curve_serverkey = self.server.encode()
        socket.curve_publickey, socket.curve_secretkey = self.client.encode(), self.client_secret.encode()

    def admit(self, context: zmq.Context[zmq.Socket[bytes]]) -> ThreadAuthenticator:
        """Refuses every other client on the sockets of `context`; stop the answer to end it."""
        doorkeeper = ThreadAuthenticator(context)
        doorkeeper.start()
        doorkeeper.configure_curve_callback(credentials_provider=_Only(self.client))
        return doorkeeper


class _Only:
    def __init__(self, client: str) -> None:
        self.client = client.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self.client
