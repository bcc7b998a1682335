"""The two ends of a line between two ranks: bytes go out of one and come in at the other, never the other way.

Both live on the thread of their Post, which calls them when the system says that bytes can move. They know how a
letter is framed and nothing of who waits for it.
"""

from __future__ import annotations

import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

HEAD = struct.Struct("<HBIqddQ")  # length of the kind, from whom, page, meeting, begun, seconds, length of the data
HELLO = struct.Struct("<I")  # the sender's rank, followed by the run's token
READ = selectors.EVENT_READ
BOTH = selectors.EVENT_READ | selectors.EVENT_WRITE


class Outgoing:
    """The sender's end: what is put is written as fast as the system takes it, in order."""

    def __init__(self, post: Any, to: int, s: socket.socket) -> None:
        self.post, self.to, self.socket = post, to, s
        self._queue: deque[tuple[memoryview, Callable[[], None]]] = deque()
        self._known = False
        s.setblocking(False)

    @property
    def waiting(self) -> bool:
        return bool(self._queue)

    def put(self, head: bytes, data: bytes | bytearray, written: Callable[[], None]) -> None:
        """Queues a frame, from any thread; `written` is called on the post's thread when its last byte is out."""
        self.post.do(lambda: self._queue_up(head, data, written))

    def _queue_up(self, head: bytes, data: bytes | bytearray, written: Callable[[], None]) -> None:
        if self.to in self.post.gone or self.socket.fileno() < 0:
            return
        self._queue.append((memoryview(head), _nothing))
        self._queue.append((memoryview(data), written))
        if not self._known:
            self._known = True
            self.post.selector.register(self.socket, BOTH, self._move)
        self._move()

    def _move(self) -> None:
        try:
            while self._queue:
                left, written = self._queue[0]
                if len(left):
                    left = left[self.socket.send(left):]
                if len(left):
                    self._queue[0] = (left, written)
                else:
                    self._queue.popleft()
                    written()
        except BlockingIOError:
            pass
        except OSError as error:
            return self._lost(error)
        self.post.selector.modify(self.socket, BOTH if self._queue else READ, self._move)
        try:
            if not self.socket.recv(1):  # nobody ever answers here: readable means closed
                self._lost(ConnectionResetError())
        except BlockingIOError:
            pass
        except OSError as error:
            self._lost(error)

    def _lost(self, error: OSError) -> None:
        """The peer is gone once its own line to this rank has ended, too: what it sent last may still be in there."""
        self._queue.clear()
        self.post.selector.unregister(self.socket)
        self.socket.close()
        closed = isinstance(error, ConnectionResetError | BrokenPipeError)
        if not closed or self.to not in self.post.heard_from:
            self.post.lose(self.to)


class Incoming:
    """The receiver's end: puts frames together and hands each over once it is whole."""

    def __init__(self, post: Any, s: socket.socket) -> None:
        self.post, self.socket = post, s
        self.source = -1
        self._left = memoryview(b"")
        self._frames = self._read()
        self._left = next(self._frames)

    def move(self) -> None:
        try:
            for _ in range(64):  # then the other lines have their turn
                n = self.socket.recv_into(self._left)
                if not n:
                    return self._end()
                self._left = self._left[n:]
                while not len(self._left):
                    self._left = next(self._frames)
        except BlockingIOError:
            return
        except (OSError, StopIteration):
            self._end()

    def _read(self) -> Generator[memoryview, None, None]:
        hello = bytearray(HELLO.size + len(self.post.token))
        yield memoryview(hello)
        if hello[HELLO.size:] != self.post.token:
            return  # a stranger
        (self.source,) = HELLO.unpack_from(hello)
        self.post.heard_from.add(self.source)
        head = bytearray(HEAD.size)
        while True:
            yield memoryview(head)
            length, origin, page, meet, begun, seconds, nbytes = HEAD.unpack(head)
            kind, data = bytearray(length), bytearray(nbytes)
            if length:
                yield memoryview(kind)
            if nbytes:
                yield memoryview(data)
            self.post.arrived(self.source, kind.decode(), data, origin, page, meet, begun, seconds)

    def _end(self) -> None:
        self.post.selector.unregister(self.socket)
        self.socket.close()
        if self.source >= 0:
            self.post.heard_from.discard(self.source)
            self.post.lose(self.source)


def dial(store: Any, key: str, given_up: Callable[[], bool], patience: float = 60.0) -> socket.socket:
    """Connects to whoever said under `key` where its door is. Raises ConnectionError when nobody does."""
    until = time.monotonic() + patience
    while not store.check([key]):
        if given_up() or time.monotonic() > until:
            raise ConnectionError(f"no door was opened under {key}")
        time.sleep(0.005)
    host, port = store.get(key).decode().rsplit(" ", 1)
    s = socket.create_connection((host, int(port)), timeout=patience)
    s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return s


def address(store: tuple[str, int]) -> str:
    """This machine's address as seen from where the store is."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        s.connect(store)
        return str(s.getsockname()[0])


def _nothing() -> None:
    """A head that is out is nothing to speak of."""
