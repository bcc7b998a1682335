"""A rank's door: the listening socket for other ranks, which strangers cannot pass.

The number of callers without a proof is limited, and each costs 68 bytes of memory. The rank reads only their greeting.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Callable
from typing import Any

from workbench.engine.p2p.sockets import ReceiverEnd

MAX_UNPROVEN = 32  # callers without a proof at a time, in addition to one per rank


class RankListener:
    """The door of one rank's Mailbox. It runs on the mailbox's thread.

    address:   its address, as "host port"
    strangers: the number of callers that did not prove to be ranks of this run
    """

    def __init__(self, mailbox: Any) -> None:
        self.mailbox, self.most = mailbox, mailbox.size + MAX_UNPROVEN
        self.socket = socket.create_server(("127.0.0.1" if mailbox.local else "", 0), backlog=self.most)
        self.socket.setblocking(False)
        here = "127.0.0.1" if mailbox.local else find_own_address(mailbox.store_address)
        self.address = f"{here} {self.socket.getsockname()[1]}"
        self.strangers = 0
        self._unknown: dict[ReceiverEnd, None] = {}  # oldest first
        mailbox.selector.register(self.socket, selectors.EVENT_READ, self.accept_caller)

    def accept_caller(self) -> None:
        """Accepts a caller. If too many have no proof yet, drops the oldest: a real rank calls again."""
        try:
            s, _ = self.socket.accept()
        except BlockingIOError:
            return
        except OSError:  # no file descriptor is left
            return self._drop_oldest()
        if len(self._unknown) >= self.most:
            self._drop_oldest()
        s.setblocking(False)
        try:
            caller = ReceiverEnd(self.mailbox, s)
        except OSError:  # gone already
            return s.close()
        self._unknown[caller] = None
        self.mailbox.selector.register(s, selectors.EVENT_READ, caller.read_frames)

    def _drop_oldest(self) -> None:
        if self._unknown:
            next(iter(self._unknown)).end()
        else:
            time.sleep(0.01)  # other code took the descriptors: do not retry at once

    def register_caller(self, caller: ReceiverEnd) -> None:
        self._unknown.pop(caller, None)
        self.mailbox.heard_from.add(caller.source)

    def remove_caller(self, caller: ReceiverEnd, why: str) -> None:
        self._unknown.pop(caller, None)
        if caller.source < 0:
            self.strangers += 1
        else:
            self.mailbox.heard_from.discard(caller.source)
            self.mailbox.mark_gone(caller.source, why)


def await_address(store: Any, key: str, look: Callable[[], object], patience: float = 60.0) -> str:
    """Waits for the address of a door under `key`. Raises ConnectionError after `patience` seconds."""
    until = time.monotonic() + patience
    while not store.check([key]):
        look()
        if time.monotonic() > until:
            raise ConnectionError(f"no listener is open under {key}")
        time.sleep(0.005)
    return str(store.get(key).decode())


def find_own_address(store: tuple[str, int]) -> str:
    """Returns this machine's address as the store's host sees it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(store)
        return str(s.getsockname()[0])
