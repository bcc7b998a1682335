"""Slows real work down: collectives to an emulated Link, compute to a pace and its faults.

A shaped operation really happens first. Its ranks then sleep until the Link would have ended it. That time counts from
the last rank's arrival, because early ranks would otherwise transfer for free. Ranks exchange arrivals through a small
shared file on one host, and by collectives between hosts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from workbench.engine.collectives.mapped_file import map_file
from workbench.fabric import Fabric, Fault, Load
from workbench.fabric.load import choke, comes, leaves, message_seconds, port_seconds, stretch
from workbench.fabric.pace import SHARES, Kept, lasts
from workbench.rank import Group

TABLE_OPERATIONS = 256  # with arrivals in the table; ranks are at most one collective apart


class Clock:
    """Seconds since the run began. base: this rank's `perf_counter` at that time"""

    def __init__(self, epoch: float) -> None:
        self.base = time.perf_counter() - (time.time() - epoch)

    def now(self) -> float:
        return time.perf_counter() - self.base

    def move_base(self, base: float) -> None:
        self.base = base


class PacedSleep:
    """Sleeps that end early after a stop (`hurried`)."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.hurried = False
        self._end = 0.0  # of the longest sleep so far

    def hurry(self) -> None:
        """Ends all sleeps, also later ones."""
        self.hurried = True

    @property
    def is_asleep(self) -> bool:
        """Whether this rank sleeps because of its settings."""
        return not self.hurried and self.clock.now() < self._end

    def sleep_until(self, t: float) -> None:
        self._end = max(self._end, t)
        while not self.hurried:
            left = t - self.clock.now()
            if left <= 0:
                return
            time.sleep(min(left, 0.05))


class ArrivalTable:
    """A shared file of one host: when each rank was ready for an operation."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        nbytes = TABLE_OPERATIONS * size * 8
        self._map = map_file(path, nbytes)
        self._cells = np.frombuffer(self._map, dtype=np.float64).reshape(TABLE_OPERATIONS, size)
        self.rank = rank

    def post_arrival(self, number: int, ready: float) -> None:
        self._cells[number % TABLE_OPERATIONS, self.rank] = ready

    def last_arrival(self, number: int) -> float:
        """Valid after the operation, when all ranks have posted."""
        return float(self._cells[number % TABLE_OPERATIONS].max())

    def close(self) -> None:
        self._cells = np.zeros((TABLE_OPERATIONS, 1))
        self._map.close()


class Port:
    """This rank's port on the emulated Link. All its wires and messages queue here.

    The port is full duplex. A message leaves when the sender's port is free, and arrives when the receiver's port has
    taken it in. Both ends take as long as the slower port needs.
    """

    def __init__(self, rank: int, size: int, paced_sleep: PacedSleep, seed: int) -> None:
        self.rank, self.size, self.paced_sleep, self.seed = rank, size, paced_sleep, seed
        self.fabric = Fabric()
        self.free = 0.0  # when the port can send again
        self._receive_free_at = 0.0  # when it can receive again
        self._messages = 0
        self._last: LinkShaper | None = None  # the wire of the last collective
        self._lock = threading.Lock()

    @property
    def is_active(self) -> bool:
        return self.size > 1 and self.fabric.shaped

    def reserve_time(self, wire: LinkShaper, ready: float, seconds: float) -> tuple[float, float]:
        """Returns when a collective of `wire` takes the port, and when it ends.

        ready: when the last rank was ready. Another wire may have taken the port since.
        """
        with self._lock:
            began = ready if self._last is wire else max(ready, self.free)
            self._last, self.free = wire, max(self.free, began + seconds)
        return began, began + seconds

    def free_now(self, now: float) -> None:
        with self._lock:
            self.free = min(self.free, now)

    def find_end(self, end: float) -> float:
        """The Link would end the operation at `end`; a stop ends it now."""
        return min(end, self.now()) if self.paced_sleep.hurried else end

    def now(self) -> float:
        return self.paced_sleep.clock.now()

    def send_message(self, nbytes: int, to: int) -> tuple[float, float, float]:
        """Returns (when it begins, seconds on a healthy port, when the port is free again)."""
        now = self.now()
        if not self.is_active:
            return now, 0.0, now
        with self._lock:
            self._messages += 1
            seconds = message_seconds(self.fabric, nbytes, self.size, self.seed, self.rank, to, self._messages)
            begun, self.free = leaves(now, self.free, seconds * choke(self.fabric.faults, self.rank))
            return begun, seconds, self.free

    def receive_message(self, source: int, begun: float, seconds: float) -> float:
        """Returns when the Link has delivered a message that began at `begun`."""
        if not seconds:
            return 0.0
        with self._lock:
            slower = max(choke(self.fabric.faults, source), choke(self.fabric.faults, self.rank))
            self._receive_free_at = comes(begun, self._receive_free_at, seconds * slower)
            return self._receive_free_at


class LinkShaper:
    """One wire's collectives on this rank's port, one at a time. group: of the wire; None: all ranks"""

    def __init__(self, port: Port, table: ArrivalTable | None, group: Group | None = None) -> None:
        self.port, self.table, self.paced_sleep, self.group = port, table, port.paced_sleep, group
        self.ranks: Sequence[int] = group.ranks if group else range(port.size)
        self.number = 0
        self._ended = self._woke = 0.0  # the planned and the real end of the last sleep

    @property
    def is_active(self) -> bool:
        return self.port.is_active and self.port.fabric.path(self.ranks).shaped

    def post_ready(self, arrived: float, asked: float) -> float:
        """Returns and posts when this rank and its port are ready for the next operation.

        A sleep ends a little late. A real port has no such pause, so a child that had `asked` by then counts as on
        time.
        """
        self.number += 1
        arrived -= max(self._woke - max(asked, self._ended), 0.0)
        ready = max(arrived, self.port.free)
        if self.table:
            self.table.post_arrival(self.number, ready)
        return ready

    def await_end(self, load: Load, last: Callable[[], float]) -> tuple[float, float, float]:
        """Sleeps until the operation would have ended, or until a stop. Returns (began, own port's end, common end)."""
        mine, slowest = self.measure_load(load)
        noise = self.port.fabric.path(self.ranks).noise(self.port.seed, self.number)
        began, end = self.port.reserve_time(
            self, self.table.last_arrival(self.number) if self.table else last(), slowest * noise
        )
        own, self._ended = began + mine * noise, max(end, self.paced_sleep.clock.now())
        self.paced_sleep.sleep_until(end)
        self._woke = self.paced_sleep.clock.now()
        if self.paced_sleep.hurried:  # after a stop the operation ended when the rank went on
            self.port.free_now(self._woke)
            began, own, end, self._ended = (min(t, self._woke) for t in (began, own, end, self._ended))
        return began, own, end

    def measure_load(self, load: Load) -> tuple[float, float]:
        """Returns the busy seconds of this rank's port and of the slowest port."""
        fabric = self.port.fabric
        plain = port_seconds(fabric.path(self.ranks), fabric.shared, load, self.group.parallel if self.group else 1)
        return plain * choke(fabric.faults, self.port.rank), plain * max(choke(fabric.faults, r) for r in self.ranks)


class ComputePace:
    """Stretches this rank's compute to its pace, and by its faults. See `workbench.fabric.pace`.

    A step's compute of `pace` milliseconds is divided 3 : 6 : 1 between forward, backward and update. Within backward
    time passes in proportion to the gradients that are ready.
    """

    shares: ClassVar[dict[str, float]] = SHARES

    def __init__(self, rank: int, paced_sleep: PacedSleep) -> None:
        self.rank, self.paced_sleep = rank, paced_sleep
        self.seconds = 0.0
        self.faults: tuple[Fault, ...] = ()
        self._kept = Kept()
        self._began = self._slept = 0.0
        self._stretch = 1.0
        self._asked_seconds = self._fault_free_seconds = 0.0  # seconds of this phase: as asked, and without faults
        self._step = [0.0, 0.0]  # these sums for the step's earlier phases

    @property
    def is_active(self) -> bool:
        return bool(self.seconds or self.faults)

    def set_pace(self, seconds: float, faults: tuple[Fault, ...]) -> None:
        """seconds: of a step's compute; 0: as fast as it goes"""
        self.seconds, self.faults = seconds, faults

    def begin_phase(self, phase: str, step: int, share: float = 1.0, again: float = 0.0) -> None:
        """share: the part of a whole phase. again: the part of the forward that it recomputes"""
        if not self.is_active:
            return
        self._add_phase()
        self._began, self._slept = self.paced_sleep.clock.now(), 0.0
        self._stretch = stretch(self.faults, self.rank, step, phase)
        self._asked_seconds = self.seconds * (self.shares[phase] + again * self.shares["forward"]) * share

    def exclude_wait(self, seconds: float) -> None:
        """Excludes time in which the strategy ran and this rank computed nothing."""
        self._began += seconds

    @contextmanager
    def pause_phase(self) -> Iterator[None]:
        """Pauses this phase for another one inside it, such as an update in a forward."""
        kept = self._slept, self._stretch, self._asked_seconds, self._fault_free_seconds
        since = self.paced_sleep.clock.now()
        began, self._asked_seconds, self._fault_free_seconds = self._began, 0.0, 0.0
        yield
        self._add_phase()
        self._slept, self._stretch, self._asked_seconds, self._fault_free_seconds = kept
        self._began = began + self.paced_sleep.clock.now() - since

    def reach_fraction(self, fraction: float) -> None:
        """Sleeps until `fraction` of the phase's time is over."""
        if not self.is_active:
            return
        now = self.paced_sleep.clock.now()
        computed = now - self._began - self._slept
        until = self._began + lasts(self._asked_seconds * fraction, computed, self._stretch)
        if until > now:
            self.paced_sleep.sleep_until(until)
            self._slept += self.paced_sleep.clock.now() - now
        self._fault_free_seconds = (self.paced_sleep.clock.now() - self._began) / self._stretch

    def end_step(self) -> dict[str, Any] | None:
        """Returns a report if the rank begins or ceases to miss its pace, else None."""
        self._add_phase()
        (asked, took), self._step = self._step, [0.0, 0.0]
        return self._kept.step(self.seconds, asked, took)

    def _add_phase(self) -> None:
        self._step[0] += self._asked_seconds
        self._step[1] += self._fault_free_seconds
        self._asked_seconds = self._fault_free_seconds = 0.0
