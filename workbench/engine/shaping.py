"""Slowing real work down to a description: the Link on the wire, the pace and the faults on compute.

User space only. A shaped operation really happens first; its ranks then sleep until the time at which it would
have ended on the Link. That time counts from the arrival of the last participant, or early ranks would
transfer for free; arrivals are exchanged through a small shared file, or over the wire between hosts.
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import numpy as np

from workbench.fabric import Fabric, Load
from workbench.fabric.load import SHARES, choke, port_seconds, stretch

RING = 256  # operations whose arrivals are kept; ranks are never more than one collective apart


class Clock:
    """Seconds since the run began. `base` is what `perf_counter` showed then, on this rank."""

    def __init__(self, epoch: float) -> None:
        self.base = time.perf_counter() - (time.time() - epoch)

    def now(self) -> float:
        return time.perf_counter() - self.base


class Naps:
    """Sleeping that ends early when a stop is asked."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hurried = False

    def until(self, t: float) -> None:
        while not self.hurried:
            left = t - self.clock.now()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))


class Board:
    """A small file shared by the ranks of one host, in which each writes when it was ready for an operation."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        nbytes = RING * size * 8
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.ftruncate(fd, nbytes)
            self._map = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._cells = np.frombuffer(self._map, dtype=np.float64).reshape(RING, size)
        self.rank = rank

    def post(self, number: int, ready: float) -> None:
        self._cells[number % RING, self.rank] = ready

    def last(self, number: int) -> float:
        """The last arrival; call it once the operation itself has completed, so that all have posted."""
        return float(self._cells[number % RING].max())

    def close(self) -> None:
        """Gives the file's descriptor back."""
        self._cells = np.zeros((RING, 1))
        self._map.close()


class Port:
    """This rank's port on the emulated Link, shared by all its wires and messages: what is sent queues here.

    In and out do not disturb each other (full duplex). A message leaves when the sender's port is free, and has
    come once the receiver's has taken it in; both take as long as the slower of the two ports needs.
    """

    def __init__(self, rank: int, size: int, naps: Naps, seed: int) -> None:
        self.rank, self.size, self.naps, self.seed = rank, size, naps, seed
        self.fabric = Fabric()
        self.free = 0.0  # when the port is free again to send
        self._taken = 0.0  # and to take in
        self._letters = 0
        self._lock = threading.Lock()

    @property
    def active(self) -> bool:
        return self.size > 1 and self.fabric.link.shaped

    def now(self) -> float:
        return self.naps.clock.now()

    def post(self, nbytes: int) -> tuple[float, float, float]:
        """A message goes out: (when it begins, seconds on a healthy port, when the port is free again)."""
        now = self.now()
        if not self.active:
            return now, 0.0, now
        with self._lock:
            self._letters += 1
            seconds = self.fabric.link.seconds(nbytes * (self.size if self.fabric.shared else 1), 1)
            seconds *= self.fabric.link.noise(self.seed + self.rank, self._letters)
            begun = max(now, self.free)
            self.free = begun + seconds * choke(self.fabric.faults, self.rank)
            return begun, seconds, self.free

    def take(self, source: int, begun: float, seconds: float) -> float:
        """A message comes in that began to be sent at `begun`: when it has come, on the Link."""
        if not seconds:
            return 0.0
        with self._lock:
            slower = max(choke(self.fabric.faults, source), choke(self.fabric.faults, self.rank))
            self._taken = max(begun, self._taken) + seconds * slower
            return self._taken


class Shaper:
    """One wire's use of this rank's port. One collective at a time, in the order asked."""

    def __init__(self, port: Port, board: Board | None) -> None:
        self.port, self.board, self.naps, self.size = port, board, port.naps, port.size
        self.number = 0
        self._ended = self._woke = 0.0  # until when the last operation slept, and when it really awoke

    @property
    def active(self) -> bool:
        return self.port.active

    def ready(self, arrived: float, asked: float) -> float:
        """Posts when this rank and its port are ready for the next operation, whose child was `asked` for then.

        A sleep ends a little late. A child that was there by then counts as begun on time: a real port would not
        have paused between two operations.
        """
        self.number += 1
        arrived -= max(self._woke - max(asked, self._ended), 0.0)
        ready = max(arrived, self.port.free)
        if self.board:
            self.board.post(self.number, ready)
        return ready

    def finish(self, load: Load, last: Callable[[], float]) -> tuple[float, float, float]:
        """Sleeps until the operation would have ended: (began, own port's end, end for everybody)."""
        began = self.board.last(self.number) if self.board else last()
        mine, slowest = self.cost(load)
        noise = self.port.fabric.link.noise(self.port.seed, self.number)
        end = began + slowest * noise
        self.port.free = max(self.port.free, end)
        self._ended = max(end, self.naps.clock.now())
        self.naps.until(end)
        self._woke = self.naps.clock.now()
        return began, began + mine * noise, end

    def cost(self, load: Load) -> tuple[float, float]:
        """Seconds that this rank's port, and the slowest port, would be busy."""
        fabric = self.port.fabric
        plain = port_seconds(fabric, load)
        chokes = [choke(fabric.faults, r) for r in range(self.size)]
        return plain * chokes[self.port.rank], plain * max(chokes)


class Pace:
    """Stretches this rank's compute to a stated duration, and by its faults.

    A step's compute of `pace` milliseconds is divided 3 : 6 : 1 between forward, backward and update. Within
    backward the slices end in proportion to the gradients that are ready.
    """

    shares: ClassVar[dict[str, float]] = SHARES

    def __init__(self, rank: int, naps: Naps) -> None:
        self.rank, self.naps = rank, naps
        self.seconds = 0.0
        self.faults: tuple = ()
        self._began = self._slept = 0.0
        self._phase, self._stretch = "", 1.0
        self._target = 0.0

    @property
    def active(self) -> bool:
        return bool(self.seconds or self.faults)

    def begin(self, phase: str, step: int, share: float = 1.0) -> None:
        """A phase begins; `share` is the part of its time that falls to this call (micro-batches)."""
        if not self.active:
            return
        self._phase, self._began, self._slept = phase, self.naps.clock.now(), 0.0
        self._stretch = stretch(self.faults, self.rank, step, phase)
        self._target = self.seconds * self.shares[phase] * share * self._stretch

    def put_off(self, seconds: float) -> None:
        """The strategy stood in the way for so long: nothing was computed meanwhile, so it does not count."""
        self._began += seconds

    def reach(self, fraction: float) -> None:
        """`fraction` of the phase is computed: sleep until as much of its time is over."""
        if not self.active:
            return
        now = self.naps.clock.now()
        if self.seconds:
            until = self._began + self._target * fraction
        else:
            until = self._began + (now - self._began - self._slept) * self._stretch
        if until > now:
            self.naps.until(until)
            self._slept += self.naps.clock.now() - now
