"""Messages between two ranks: the sender posts at once, the receiver waits for them.

A rank connects to another rank when it first sends to it. One thread moves all bytes. gloo's send and recv do not
suffice: a timeout closes the sockets for good, so a receiver cannot wait in slices. gloo also connects all ranks at the
start.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from workbench.engine.collectives.shaping import Port
from workbench.engine.collectives.wire import Aborted, LeaveEvent
from workbench.engine.device import Chip
from workbench.engine.p2p.listener import RankListener, await_address
from workbench.engine.p2p.sockets import FRAME_HEAD, SenderEnd
from workbench.rank import Rank, StrategyError, message_name

WAIT_SLICE = 0.1  # seconds between 2 checks whether this rank must leave
FROM_HOST, FROM_STEP, FROM_BACKGROUND = range(3)  # the sender: the engine, or a strategy's step or background
ALWAYS_VALID_PAGE = 2**32 - 1  # of the engine's own messages, which a new strategy does not drop


class Message(NamedTuple):
    """A received message."""

    source: int
    what: str  # dtype and shape
    data: bytearray
    ready: float  # when the emulated Link has delivered the last byte


class Mailbox:
    """One rank's messages. Any thread may call `send` and `recv`.

    page:           grows when a strategy takes over. The mailbox drops messages of earlier pages.
    meet:           the step of the latest planned meeting of all ranks that this rank knows. Every message carries it.
    received_count: how many messages of strategies this rank has received; posted_count: how many it has sent
    secret:         known to the ranks of this run only
    limit:          the most bytes of one message
    """

    def __init__(
        self,
        rank: Rank,
        store: Any,
        store_address: tuple[str, int],
        secret: bytes,
        port: Port,
        leaving: LeaveEvent,
        span: Callable[..., None],
        local: bool,
        limit: int = 2**30,
        *,
        chip: Chip | None = None,
        step: Callable[[], int] | None = None,
        report_strangers: Callable[[int], None] = lambda count: None,
        check_peers: Callable[[], object] = lambda: None,
    ) -> None:
        """check_peers: raises if this rank must leave or a peer is gone"""
        self.number = rank.number
        self.rank, self.size, self.secret = rank.id, rank.size, secret
        self.store, self.store_address = store, store_address
        self.limit = limit
        self.door: RankListener | None = None
        self.step = step or (lambda: rank.step)
        self.chip = chip or Chip()
        self.port, self.leaving, self.span, self.local = port, leaving, span, local
        self.report_strangers, self.check_peers = report_strangers, check_peers
        self.page, self.meet, self.received_count, self.posted_count = 0, -1, 0, 0
        self.closed_ranks: set[int] = set()  # that have closed their end
        self.heard_from: set[int] = set()  # with an open line to this one
        self._drop_reasons: dict[int, str] = {}  # why this rank dropped a rank, if it did
        self._trouble: Exception | None = None  # an error of the mailbox's thread
        self._boxes: dict[tuple[int, str], deque[Message]] = {}  # (page, kind) -> messages by arrival
        self._news = threading.Condition()
        self._senders: dict[int, SenderEnd] = {}
        self._dialling = threading.Lock()
        self._todo: deque[Callable[[], None]] = deque()
        self._thread: threading.Thread | None = None
        self._closing = False

    # -- any thread --

    def open_door(self) -> None:
        """Opens this rank's door, if it is not open, and publishes its address."""
        with self._dialling:
            if self._thread is not None or self.size == 1:
                return
            self.selector = selectors.DefaultSelector()
            self._bell, self._wake = socket.socketpair()
            self._bell.setblocking(False)
            self.selector.register(self._bell, selectors.EVENT_READ, self._clear_wake)
            self.door = RankListener(self)
            self.store.set(f"mailbox/{self.rank}", self.door.address)
            self._thread = threading.Thread(target=self._run_thread, name=f"rank {self.rank} mailbox", daemon=True)
            self._thread.start()

    def plan_meeting(self, step: int) -> None:
        self.meet = step

    @property
    def stranger_count(self) -> int:
        return self.door.strangers if self.door else 0

    @property
    def connected_ranks(self) -> set[int]:
        return set(self._senders)

    def send(
        self,
        tensor: Tensor,
        to: int,
        kind: str = "",
        origin: int = FROM_STEP,
        lane: str = "comm",
        step: int | None = None,
    ) -> None:
        """Posts a copy of `tensor` (any shape) to rank `to`. Raises StrategyError if the rank does not exist."""
        if not 0 <= to < self.size:
            raise StrategyError(f"a message to rank {to}: there are ranks 0 to {self.size - 1}")
        data = bytearray(_view_bytes(self.chip.copy_to_host(tensor)).numpy().tobytes())
        if len(data) > self.limit:
            raise StrategyError(f"a message of {len(data)} bytes: must be at most {self.limit} here; send it in parts")
        what, page = (
            f"{str(tensor.dtype)[6:]}{list(tensor.shape)}",
            ALWAYS_VALID_PAGE if origin == FROM_HOST else self.page,
        )
        with self._news:  # both a step's thread and the background's count
            self.posted_count += origin != FROM_HOST
        if to == self.rank:
            return self.file_message(to, f"{kind}\n{what}", data, origin, page, self.meet, 0.0, 0.0)
        asked = self.port.now()
        begun, plain, end = self.port.send_message(len(data), to) if origin != FROM_HOST else (asked, 0.0, asked)
        text = f"{kind}\n{what}".encode()
        head = FRAME_HEAD.pack(len(text), origin, page, self.meet, begun, plain, len(data))
        step, name = self.step() if step is None else step, message_name("send", kind, to=to)

        def posted() -> None:
            if origin != FROM_HOST:
                over = self.port.find_end(end) if plain else self.port.now()
                self.span(step, lane, name, asked, min(begun, over), over, len(data))

        self._connect_rank(to).queue_frame(head + text, data, posted)

    def recv(
        self, into: Tensor | None, source: int | None, kind: str, over: Callable[[], bool] = lambda: False
    ) -> tuple[Tensor, int] | None:
        """Waits for a message of `kind` and copies it into `into` (None: a new tensor). Returns None once `over`.

        Returns (tensor, source). Raises StrategyError if the message does not fit into `into`.
        """
        message = self.take_message(source, kind, over)
        if message is None:
            return None
        self.port.paced_sleep.sleep_until(message.ready)
        dtype, shape = message.what[:-1].split("[")
        sizes = [int(n) for n in shape.split(",") if n]
        sent = torch.empty(sizes, dtype=getattr(torch, dtype))
        if message.data:
            sent = torch.frombuffer(message.data, dtype=sent.dtype).view(sizes)
        if into is None:
            return sent, message.source
        if into.numel() != sent.numel() or into.dtype != sent.dtype:
            raise StrategyError(
                f"rank {self.number(message.source)} sent {message.what} of {kind!r} to rank {self.number(self.rank)}, "
                f"which has room for "
                f"{str(into.dtype)[6:]}{list(into.shape)}: both ends must agree"
            )
        self.chip.copy_from_host(into, sent.view(into.shape))
        return into, message.source

    def take_message(self, source: int | None, kind: str, over: Callable[[], bool] = lambda: False) -> Message | None:
        """Waits for the next message of `kind`, until `over`.

        Raises Aborted if this rank must leave, ConnectionError if the sender is gone, and StrategyError if this rank
        closed the sender's line for a reason.
        """
        self.open_door()
        with self._news:
            while True:
                message = self._pick_message(self.page, source, kind)
                if message is not None or over():
                    return message
                if self.leaving.is_set():
                    raise Aborted(f"left while waiting for {kind!r}")
                if self._trouble is not None:
                    text = f"rank {self.number(self.rank)}'s messages failed: {self._trouble!r}"
                    raise RuntimeError(text) from self._trouble
                if self.closed_ranks and (source is None or source in self.closed_ranks):
                    gone = source if source is not None else min(self.closed_ranks)
                    if gone in self._drop_reasons:
                        line = f"rank {self.number(gone)}'s line to rank {self.number(self.rank)}"
                        raise StrategyError(f"{line} was closed: {self._drop_reasons[gone]}")
                    who = f"rank {self.number(gone)}, of which {kind!r} was awaited"
                    raise ConnectionError(f"Connection closed by peer: {who}")
                self._news.wait(WAIT_SLICE)

    def take_numbers(self, kind: str) -> list[tuple[int, int]]:
        """Removes the numbers sent under `kind` by other ranks' engines. Returns (rank, number) each."""
        with self._news:
            said = self._boxes.pop((ALWAYS_VALID_PAGE, kind), ())
        return [(message.source, int.from_bytes(message.data, "little")) for message in said]

    def send_number(self, number: int, to: int, kind: str) -> None:
        """Sends a number to another rank's engine, outside the Link and without a span."""
        self.send(torch.tensor([number]), to, kind, FROM_HOST)

    def await_news(self, seconds: float) -> None:
        with self._news:
            self._news.wait(seconds)

    def drop_old_messages(self) -> None:
        """Drops messages of the last strategy."""
        with self._news:
            self.page += 1
            self._boxes = {key: box for key, box in self._boxes.items() if key[0] >= self.page}

    def wake_waiters(self) -> None:
        with self._news:
            self._news.notify_all()

    def connect_ranks(self, ranks: Iterable[int]) -> None:
        """Connects before the first message, so that each end notices when the other is gone."""
        for other in ranks:
            self._connect_rank(other)

    def cut_connections(self) -> None:
        self._begin_close(hurry=True)

    def close(self) -> None:
        """Sends all posted messages, then closes all lines and joins the thread."""
        self._begin_close(hurry=False)
        if self._thread is not None:
            self._thread.join(5.0)
        if self.stranger_count:
            self.report_strangers(self.stranger_count)
        self.store = None

    # -- inside --

    def _pick_message(self, page: int, source: int | None, kind: str) -> Message | None:
        box = self._boxes.get((page, kind), deque())
        for at, message in enumerate(box):
            if source is None or message.source == source:
                del box[at]
                return message
        return None

    def file_message(
        self, source: int, text: str, data: bytearray, origin: int, page: int, meet: int, begun: float, plain: float
    ) -> None:
        """Files a complete message, on the mailbox's thread or on the thread of a rank that sends to itself."""
        kind, what = text.rsplit("\n", 1)
        ready = self.port.receive_message(source, begun, plain)
        with self._news:
            self.received_count += origin != FROM_HOST
            self.meet = max(self.meet, meet)
            if page >= self.page:
                self._boxes.setdefault((page, kind), deque()).append(Message(source, what, data, ready))
            self._news.notify_all()

    def _connect_rank(self, to: int) -> SenderEnd:
        self.open_door()
        with self._dialling:
            if to not in self._senders:
                self._senders[to] = SenderEnd(self, to, await_address(self.store, f"mailbox/{to}", self.check_peers))
            return self._senders[to]

    def run_on_thread(self, what: Callable[[], None]) -> None:
        self._todo.append(what)
        with contextlib.suppress(OSError):
            self._wake.send(b"!")

    def mark_gone(self, rank: int, why: str = "") -> None:
        """why: the reason, if this rank closed the line"""
        with self._news:
            self.closed_ranks.add(rank)
            if why:
                self._drop_reasons[rank] = why
            self._news.notify_all()

    def _begin_close(self, hurry: bool) -> None:
        with self._dialling:
            if self._thread is None or self._closing:
                return
            self._closing = True
        self._hurry = hurry
        self.run_on_thread(lambda: None)

    # -- the mailbox's own thread --

    def _run_thread(self) -> None:
        until = float("inf")
        while True:
            lines = list(self._senders.values())
            for key, _ in self.selector.select(min([WAIT_SLICE, *(line.retry_delay for line in lines)])):
                self._run_guarded(key.data)
            for line in lines:
                self._run_guarded(line.retry_if_due)
            while self._todo:
                self._run_guarded(self._todo.popleft())
            if self._closing:
                until = min(until, time.monotonic() + (0.0 if self._hurry else 2.0))
                if time.monotonic() >= until or not any(line.has_frames for line in self._senders.values()):
                    break
        for key in list(self.selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for line in self._senders.values():
            line.socket.close()
        self._wake.close()
        self.selector.close()

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._bell.recv(4096)

    def _run_guarded(self, what: Callable[[], None]) -> None:
        try:
            what()
        except Exception as error:  # `take_message` raises it; without this thread receivers would wait for ever
            self._trouble = error
            self.wake_waiters()


def _view_bytes(x: Tensor) -> Tensor:
    """Returns the bytes of `x`: (n,) uint8, a view if possible."""
    return x.contiguous().reshape(-1).view(torch.uint8)
