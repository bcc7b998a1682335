"""A rank's door: where the other ranks call, and strangers may, who get no further than the greeting.

A caller is nobody until it has proved whose it is. What callers without a proof can take from a run is bounded: so
many stand at the door at a time, each with 68 bytes of memory, and nothing that they say is looked at.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from workbench.engine.p2p.sockets import Incoming

PENDING = 32  # callers beyond one per rank that may stand at the door at a time


class Door:
    """Where one rank's Mailbox is called; lives on the mailbox's thread.

    where:      its address, as "host port"
    strangers:  callers so far that were no ranks of this run, or gave up before they had proved it
    """

    def __init__(self, mailbox: Any) -> None:
        self.mailbox, self.most = mailbox, mailbox.size + PENDING
        self.socket = socket.create_server(("127.0.0.1" if mailbox.local else "", 0), backlog=self.most)
        self.socket.setblocking(False)
        here = "127.0.0.1" if mailbox.local else address(mailbox.where)
        self.where = f"{here} {self.socket.getsockname()[1]}"
        self.strangers = 0
        self._unknown: dict[Incoming, None] = {}  # the oldest first
        mailbox.selector.register(self.socket, selectors.EVENT_READ, self.admit)

    def admit(self) -> None:
        """Lets a caller in. Where too many are not known yet the oldest goes: a rank would call again."""
        try:
            s, _ = self.socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no descriptor is left
            return self._turn_away()
        if len(self._unknown) >= self.most:
            self._turn_away()
        s.setblocking(False)
        try:
            caller = Incoming(self.mailbox, s)
        except OSError:  # gone already
            return s.close()
        self._unknown[caller] = None
        self.mailbox.selector.register(s, selectors.EVENT_READ, caller.move)

    def _turn_away(self) -> None:
        if self._unknown:
            next(iter(self._unknown)).end()
        else:
            time.sleep(0.01)  # whatever took the descriptors is no caller: not to be asked again at once

    def known(self, caller: Incoming) -> None:
        """A caller has proved to be a rank of this run."""
        self._unknown.pop(caller, None)
        self.mailbox.heard_from.add(caller.source)

    def left(self, caller: Incoming, why: str) -> None:
        """A caller's line is closed."""
        self._unknown.pop(caller, None)
        if caller.source < 0:
            self.strangers += 1
        else:
            self.mailbox.heard_from.discard(caller.source)
            self.mailbox.lose(caller.source, why)


def found(store: Any, key: str, look: Callable[[], object], patience: float = 60.0) -> str:
    """The door's address that was said under `key`. Raises ConnectionError when nobody says one, and as `look` does."""
    until = time.monotonic() + patience
    while not store.check([key]):
        look()
        if time.monotonic() > until:
            raise ConnectionError(f"no door was opened under {key}")
        time.sleep(0.005)
    return str(store.get(key).decode())


def address(store: tuple[str, int]) -> str:
    """This machine's address as seen from where the store is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(store)
        return str(s.getsockname()[0])
