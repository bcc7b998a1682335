"""Asks engines short questions, which they answer even during `%%px`.

Question and answer are JSON and at most one blob, over the engine's own socket. rpc_handlers.py is the engine's side.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

import zmq

from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.processes.uninterruptible import without_interrupts
from workbench.cluster.transport.curve_keys import CurveKeys


class NoAnswer(ClusterError):
    """An engine did not answer in time."""


class _Channel:
    """One engine's connection: one question at a time; late answers are dropped."""

    def __init__(self, socket: zmq.Socket[bytes], address: str) -> None:
        self.socket, self.address = socket, address
        self.lock = threading.Lock()
        self.numbers = itertools.count()
        self.expects = -1


class RpcClient:
    """Talks to each rank's engine, from any thread."""

    def __init__(self, addresses: Mapping[int, str], keys: CurveKeys) -> None:
        self._context, self._keys = zmq.Context(), keys
        self._wires: dict[int, _Channel] = {}
        for rank, address in addresses.items():
            self.connect_rank(rank, address)

    def connect_rank(self, rank: int, address: str) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.linger = 0
        self._keys.connect_socket(socket, address)
        before = self._wires.get(rank)
        self._wires = {**self._wires, rank: _Channel(socket, address)}
        if before is not None:
            with before.lock:
                before.socket.close(0)

    def disconnect_rank(self, rank: int, address: str) -> None:
        """Questions to `rank` then fail at once, because its engine is gone. Does nothing during a question."""
        wire = self._wires[rank]
        if wire.address == address and wire.lock.acquire(blocking=False):
            try:
                wire.socket.close(0)
            finally:
                wire.lock.release()

    def ask_rank(self, rank: int, what: str, blob: bytes = b"", timeout: float = 3.0, **rest: Any) -> tuple[Any, bytes]:
        """Returns (plain value, blob). Raises NoAnswer or ClusterError."""
        wire = self._wires[rank]
        with wire.lock:
            self._send_question(wire, what, blob, rest)
            return self._receive_answer(rank, wire, what, timeout)

    def ask_all(
        self, what: str, blob: bytes = b"", timeout: float = 3.0, ranks: Collection[int] | None = None, **rest: Any
    ) -> dict[int, Any]:
        """Asks all engines, or those of `ranks`, at once. Returns {rank: plain answer or error}."""
        with without_interrupts(), contextlib.ExitStack() as locks:  # an interrupt must not leave a lock taken
            wires = [(rank, wire) for rank, wire in sorted(self._wires.items()) if ranks is None or rank in ranks]
            for _, wire in wires:
                locks.enter_context(wire.lock)
            for _, wire in wires:
                self._send_question(wire, what, blob, rest)
            until = time.monotonic() + timeout
            return {rank: self._answer_or_error(rank, wire, what, until) for rank, wire in wires}

    def _answer_or_error(self, rank: int, wire: _Channel, what: str, until: float) -> Any:
        try:
            return self._receive_answer(rank, wire, what, max(until - time.monotonic(), 0.01))[0]
        except ClusterError as error:
            return error

    def _send_question(self, wire: _Channel, what: str, blob: bytes, rest: dict[str, Any]) -> None:
        if wire.socket.closed:
            return
        wire.expects = next(wire.numbers)
        message = [json.dumps({"number": wire.expects, "what": what, **rest}).encode(), blob]
        with contextlib.suppress(zmq.Again):  # a silent engine will not answer
            wire.socket.send_multipart(message, zmq.NOBLOCK)

    def _receive_answer(self, rank: int, wire: _Channel, what: str, timeout: float) -> tuple[Any, bytes]:
        if wire.socket.closed:
            raise NoAnswer(f"rank {rank} is gone and cannot answer '{what}'")
        while wire.socket.poll(int(timeout * 1000)):
            head, blob = wire.socket.recv_multipart()
            answer = json.loads(head)
            if answer["number"] != wire.expects:
                continue
            if "error" in answer:
                raise ClusterError(f"rank {rank}: {answer['error']}")
            return answer.get("value"), blob
        raise NoAnswer(f"rank {rank} did not answer '{what}' within {timeout:g} s")

    def close(self) -> None:
        for wire in self._wires.values():
            with wire.lock:
                wire.socket.close(0)
        self._context.destroy(0)
