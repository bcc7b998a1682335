"""The two ends of a one-way line between two ranks.

Both ends run on the thread of their Mailbox, which calls them when a socket is ready. First both ends greet each other,
see greeting.py.
"""

from __future__ import annotations

import errno
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

from workbench.engine.p2p import greeting

FRAME_HEAD = struct.Struct("<HBIqddQ")  # bytes of the kind, origin, page, meeting, begun, seconds, bytes of the data
READ_EVENT = selectors.EVENT_READ
READ_WRITE_EVENTS = selectors.EVENT_READ | selectors.EVENT_WRITE
MAX_DIALS = 400  # failed calls before a rank gives up: strangers may fill the other door
FIRST_REDIAL_DELAY = 0.02  # seconds; a busy rank has 20 s in total to answer
LONGEST_REDIAL_DELAY = 0.05
NEVER_DUE = float("inf")


class SenderEnd:
    """The sender's end. After the greeting it writes frames in order, as fast as the socket takes them."""

    def __init__(self, mailbox: Any, to: int, door: str) -> None:
        self.mailbox, self.to, self.door = mailbox, to, door
        self.socket = socket.socket()
        self._queue: deque[tuple[memoryview, Callable[[], None]]] = deque()
        self._is_proven = self._is_over = False
        self._tries = 0
        self._retry_at = NEVER_DUE
        mailbox.run_on_thread(self._dial_rank)

    @property
    def has_frames(self) -> bool:
        return bool(self._queue)

    @property
    def retry_delay(self) -> float:
        return max(self._retry_at - time.monotonic(), 0.0)

    def retry_if_due(self) -> None:
        if time.monotonic() >= self._retry_at:
            self._retry_at = NEVER_DUE
            self._dial_rank()

    def queue_frame(self, head: bytes, data: bytes | bytearray, written: Callable[[], None]) -> None:
        """From any thread. The mailbox's thread calls `written` after the last byte."""
        self.mailbox.run_on_thread(lambda: self._append_frame(head, data, written))

    def _dial_rank(self) -> None:
        self._tries += 1
        self.socket.close()
        self.socket = s = socket.socket()
        s.setblocking(False)
        s.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._greeting = greeting.greet_as_caller(self.mailbox.secret, self.mailbox.rank, self.to, self.door, s.sendall)
        self._unread_greeting = next(self._greeting)
        host, port = self.door.rsplit(" ", 1)
        failed = s.connect_ex((host, int(port)))
        self.mailbox.selector.register(s, READ_EVENT, self._write_frames)
        if failed not in (0, errno.EINPROGRESS):
            self._handle_loss(OSError(failed, "no connection"))

    def _append_frame(self, head: bytes, data: bytes | bytearray, written: Callable[[], None]) -> None:
        if self.to in self.mailbox.closed_ranks or self._is_over:
            return
        self._queue.append((memoryview(head), _do_nothing))
        self._queue.append((memoryview(data), written))
        if self._is_proven:
            self._write_frames()

    def _write_frames(self) -> None:
        try:
            if not self._is_proven:
                self._greet_rank()
            while self._is_proven and self._queue:
                left, written = self._queue[0]
                if len(left):
                    left = left[self.socket.send(left) :]
                if len(left):
                    self._queue[0] = (left, written)
                else:
                    self._queue.popleft()
                    written()
        except BlockingIOError:
            pass
        except Exception as error:
            return self._handle_loss(error)
        self.mailbox.selector.modify(
            self.socket, READ_WRITE_EVENTS if self._is_proven and self._queue else READ_EVENT, self._write_frames
        )
        try:
            if self._is_proven and not self.socket.recv(1):  # the peer sends nothing here now: readable means closed
                self._handle_loss(ConnectionResetError())
        except BlockingIOError:
            pass
        except OSError as error:
            self._handle_loss(error)

    def _greet_rank(self) -> None:
        while not self._is_proven:
            n = self.socket.recv_into(self._unread_greeting)
            if not n:
                raise ConnectionResetError
            self._unread_greeting = self._unread_greeting[n:]
            if not len(self._unread_greeting):
                try:
                    self._unread_greeting = next(self._greeting)
                except StopIteration:
                    self._is_proven = True

    def _handle_loss(self, error: Exception) -> None:
        """Closes this end and calls again, or gives up.

        The peer is gone only when its own line to this rank has ended, because that line may still hold messages.
        """
        self.mailbox.selector.unregister(self.socket)
        self.socket.close()
        closed = isinstance(error, ConnectionResetError | BrokenPipeError)
        if closed and not self._is_proven and self._tries < MAX_DIALS:
            self._retry_at = time.monotonic() + find_retry_delay(self._tries)
            return
        self._is_over = True
        self._queue.clear()
        if not closed or self.to not in self.mailbox.heard_from:
            self.mailbox.mark_gone(self.to, str(error) if isinstance(error, greeting.AuthenticationError) else "")


class ReceiverEnd:
    """The receiver's end: assembles frames and passes each complete message to the mailbox."""

    def __init__(self, mailbox: Any, s: socket.socket) -> None:
        self.mailbox, self.socket = mailbox, s
        self.source = -1  # unknown before the proof
        self._is_over = False
        self._frames = self._parse_frames()
        self._unfilled = next(self._frames)

    def read_frames(self) -> None:
        try:
            for _ in range(64):  # then other lines have their turn
                n = self.socket.recv_into(self._unfilled)
                if not n:
                    return self.end()
                self._unfilled = self._unfilled[n:]
                while not len(self._unfilled):
                    self._unfilled = next(self._frames)
        except BlockingIOError:
            return
        except OSError:
            self.end()
        except Exception as error:  # it must not end the thread of all lines
            self.end(f"{type(error).__name__}: {error}" if str(error) else type(error).__name__)

    def _parse_frames(self) -> Generator[memoryview, None, None]:
        mailbox, tell = self.mailbox, self.socket.sendall
        source = yield from greeting.greet_as_called(
            mailbox.secret, mailbox.rank, mailbox.size, mailbox.door.address, tell
        )
        if source in mailbox.heard_from:
            raise greeting.AuthenticationError(f"rank {mailbox.number(source)} already has a connection to this rank")
        self.source = source
        mailbox.door.register_caller(self)
        head = bytearray(FRAME_HEAD.size)
        while True:
            yield memoryview(head)
            length, origin, page, meet, begun, seconds, nbytes = FRAME_HEAD.unpack(head)
            if nbytes > mailbox.limit:
                raise ValueError(f"a message of {nbytes} bytes was announced; {mailbox.limit} is the most in this run")
            kind, data = bytearray(length), bytearray(nbytes)
            if length:
                yield memoryview(kind)
            if nbytes:
                yield memoryview(data)
            mailbox.file_message(source, kind.decode(), data, origin, page, meet, begun, seconds)

    def end(self, why: str = "") -> None:
        if self._is_over:
            return
        self._is_over = True
        self.mailbox.selector.unregister(self.socket)
        self.socket.close()
        self.mailbox.door.remove_caller(self, why)


def find_retry_delay(tries: int) -> float:
    """Returns the seconds before the next call."""
    return min(FIRST_REDIAL_DELAY + tries * 1e-3, LONGEST_REDIAL_DELAY)


def _do_nothing() -> None:
    """Stands for `written` after a head."""
