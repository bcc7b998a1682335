"""Receives what all engines publish, on one thread, and decodes it a few times a second."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable

import zmq

from workbench.cluster.processes.supervised_thread import SupervisedThread
from workbench.cluster.transport.curve_keys import CurveKeys
from workbench.cluster.transport.row_encoding import RowBatch, decode_batches
from workbench.settings.describe_error import said

DRAIN_INTERVAL = 0.2  # seconds: fast enough for the eye


class RowSubscriber:
    """Subscribes to a lab's engines; its thread calls `take(batch)` for each batch."""

    def __init__(self, addresses: Iterable[str], keys: CurveKeys, take: Callable[[RowBatch], None]) -> None:
        self.take = take
        self.seconds = 0.0  # CPU time
        self.errors: list[str] = []
        self._keys, self._coming = keys, queue.SimpleQueue[tuple[bool, str]]()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.rcvhwm = 20_000
        self._socket.subscribe(b"")
        for address in addresses:
            self.connect_engine(address)
        self._update_connections()
        self._closing = threading.Event()
        thread = SupervisedThread("relay", self._receive_once, self._closing, self._note_error, self._close_socket)
        self._thread = thread.start()

    def connect_engine(self, address: str) -> None:
        self._coming.put((True, address))

    def disconnect_engine(self, address: str) -> None:
        """Another process may get an ended engine's port."""
        self._coming.put((False, address))

    def _update_connections(self) -> None:
        """Updates the socket on the thread that owns it."""
        while not self._coming.empty():
            connect, address = self._coming.get()
            if connect:
                self._keys.connect_socket(self._socket, address)
            else:
                self._socket.disconnect(address.split()[0])

    def _receive_once(self) -> None:
        self._update_connections()
        if self._socket.poll(250):
            self._drain_socket()
            self.seconds = time.thread_time()
            self._closing.wait(DRAIN_INTERVAL)

    def _note_error(self, error: BaseException) -> None:
        self.errors.append(said(error))
        del self.errors[:-20]

    def _drain_socket(self) -> None:
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                for batch in decode_batches(frames):
                    self.take(batch)
            except Exception as error:
                self._note_error(error)

    def _close_socket(self) -> None:
        """Closes socket and context on their reading thread: no other thread may."""
        self._context.destroy(0)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(10.0)
