"""Faults that tests inject into a training lab: in engines, connections, controller and kernel.

Each fault is a function that takes a `Patient`, injects the fault, and returns a text for the log. Faults touch only
the lab's own engines, by their pids.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.waiting import until
from workbench.cluster.processes.lab_place import ClusterError
from workbench.lab import Lab
from workbench.settings import KnobError

LIMIT = 60.0  # seconds within which all ranks left must make steps; a hang takes longer, a busy machine does not
STEPS = 2  # that each rank has to make
MOST = 5  # ranks: more of them only slow down a machine with two cores

Harm = Callable[["Patient"], str]


class Stuck(Exception):
    """The run made no progress within the limit, or ended unexpectedly."""


@dataclass
class Patient:
    """A lab with a live run, and the random numbers that choose its faults.

    dead: ranks that were killed; controller: whether it runs; noticed: seconds until a note appeared, by kind of fault
    recovered: seconds from a death until all ranks made steps again; last: the last fault
    """

    lab: Lab
    rng: random.Random
    dead: set[int] = field(default_factory=set)
    controller: bool = True
    noticed: dict[str, list[float]] = field(default_factory=dict)
    recovered: dict[str, list[float]] = field(default_factory=dict)
    last: str = "start"
    struck: float | None = None  # when, until all ranks have gone on

    @property
    def live(self) -> Any:
        assert self.lab._live is not None
        return self.lab._live

    @property
    def members(self) -> list[int]:
        """Returns the ranks that train, without ranks that were just killed."""
        return [rank for rank in self.live.members if rank not in self.dead]

    def pid(self, rank: int) -> int:
        return next(int(row["pid"]) for row in self.lab.status if row["rank"] == rank)

    def seen(self, kind: str, said: Callable[[], Any], limit: float) -> bool:
        """Returns whether `said` became true within `limit` seconds, and notes how long that took."""
        self.struck = time.monotonic()
        if found := until(said, limit):
            self.noticed.setdefault(kind, []).append(time.monotonic() - self.struck)
        return found

    def steps(self) -> dict[int, int]:
        """Returns how many steps each rank has on the record."""
        rows = self.live.run.timeline.spans.rows()
        mine = rows[rows.equal("lane", "step")].rank.tolist()
        return {rank: mine.count(rank) for rank in self.live.used_ranks}

    def goes_on(self, kind: str) -> None:
        """Waits until every member has made `STEPS` more steps; raises Stuck if not."""
        began, before = self.struck or time.monotonic(), self.steps()
        self.struck = None
        while (took := time.monotonic() - began) < LIMIT:
            if not self.lab.live:
                raise Stuck(f"after {kind}: the run is over, {self.lab.state}: {self.lab.notes[-3:]}")
            now = self.steps()
            if all(now.get(rank, 0) >= before.get(rank, 0) + STEPS for rank in self.members):
                self.recovered.setdefault(kind, []).append(took)
                return
            time.sleep(0.02)
        raise Stuck(f"after {kind}: no progress in {LIMIT:g} s; {self.live.describe_ranks()}; {self.lab.notes[-4:]}")


# -- engines


def kill(p: Patient) -> str:
    """Kills a member."""
    if len(p.members) < 2:
        return "none to kill"
    victim = p.rng.choice(p.members)
    p.dead.add(victim)
    os.kill(p.pid(victim), signal.SIGKILL)
    p.seen("kill", lambda: any(n.startswith(f"rank {victim} is lost") for n in p.lab.notes) or not p.lab.live, LIMIT)
    if not until(lambda: victim not in p.live.members or not p.lab.live, LIMIT):
        raise Stuck(f"after kill of rank {victim}: the others went on with it; {p.lab.notes[-4:]}")
    return f"killed rank {victim}"


def freeze(p: Patient) -> str:
    """Stops a member's process for up to 3 s."""
    victim, seconds = p.rng.choice(p.members), p.rng.uniform(0.1, 3.0)
    pid = p.pid(victim)
    os.kill(pid, signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
    return f"froze rank {victim} for {seconds:.1f} s"


def join(p: Patient) -> str:
    """Adds an engine that was never in the run."""
    return _resized(p, len(p.members) + 1)


def leave(p: Patient) -> str:
    """Removes the last rank."""
    return _resized(p, len(p.members) - 1) if len(p.members) > 1 else "none to leave"


def _resized(p: Patient, ranks: int) -> str:
    try:
        asked = p.lab.resize(ranks).wait(LIMIT)
    except KnobError as refusal:
        return f"refused {ranks} ranks: {refusal}"
    return f"{ranks} ranks from step {asked.applied_at}"


# -- wires


def cut(p: Patient) -> str:
    """Shuts down every connection between two ranks, at one end."""
    if len(p.members) < 2 or not p.controller:
        return "none to cut"
    one, other = p.rng.sample(p.members, 2)
    theirs = [(tuple(c.raddr), tuple(c.laddr)) for c in psutil.Process(p.pid(other)).net_connections("tcp") if c.raddr]
    engine = next(e.id for e in p.lab.cluster.engines if e.rank == one)
    ends = p.lab.cluster.call(engine, shut, theirs, timeout=LIMIT)
    return f"cut {ends} connections between ranks {one} and {other}"


def shut(wires: list[Any]) -> int:
    """Shuts down this engine's sockets between these addresses. Runs next to the training thread."""
    import contextlib
    import os
    import socket

    import psutil

    ends = 0
    for here in psutil.Process().net_connections("tcp"):
        if here.raddr and (tuple(here.laddr), tuple(here.raddr)) in wires:
            # the socket may close by itself
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(here.fd)) as wire:
                wire.shutdown(socket.SHUT_RDWR)
                ends += 1
    return ends


def deaf(wire: Any, so: bool = True) -> None:
    """Makes the system drop everything that arrives at this socket, like a dead link. so=False ends this."""
    import ctypes
    import socket
    import struct

    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter of one line: keep 0 bytes
    program = struct.pack("HL", 1, ctypes.addressof(nothing))
    attach, detach = 26, 27  # Linux's SO_ATTACH_FILTER and SO_DETACH_FILTER
    wire.setsockopt(socket.SOL_SOCKET, attach if so else detach, program)


def kill_link(p: Patient, one: int, other: int) -> int:
    """Blocks every connection between these ranks in both directions. Returns the number of ends."""
    ends = 0
    for here, there in ((one, other), (other, one)):
        of = psutil.Process(p.pid(there)).net_connections("tcp")
        theirs = [(tuple(c.raddr), tuple(c.laddr)) for c in of if c.raddr]
        engine = next(e.id for e in p.lab.cluster.engines if e.rank == here)
        ends += p.lab.cluster.call(engine, silenced, theirs, timeout=LIMIT)
    return ends


def silenced(wires: list[Any]) -> int:
    """Makes this engine's sockets between these addresses deaf. Runs next to the training thread."""
    import os
    import socket

    import psutil

    ends = 0
    for here in psutil.Process().net_connections("tcp"):
        if here.raddr and (tuple(here.laddr), tuple(here.raddr)) in wires:
            with socket.socket(fileno=os.dup(here.fd)) as wire:
                deaf(wire)
                ends += 1
    return ends


# -- controller and kernel


def end_controller(p: Patient) -> str:
    """Kills the controller. The run must go on, and a note must report the death."""
    if not p.controller:
        return "none there"
    p.controller = False
    os.kill(p.lab.cluster.processes.started["controller"].pid, signal.SIGKILL)
    if not p.seen("end_controller", lambda: any("controller" in note for note in p.lab.notes), 20):
        raise Stuck("nobody said that the controller is gone")
    return "killed the controller"


def interrupt(p: Patient) -> str:
    """Interrupts the kernel in the middle of a call. The lab must stay usable."""
    calls: dict[str, Callable[[], Any]] = {
        "set": lambda: p.lab.set("lr", 10 ** p.rng.uniform(-4, -2.5)).wait(LIMIT),
        "status": lambda: [p.lab.status for _ in range(50)],
        "spans": lambda: p.live.run.spans,
        "pause": lambda: (p.lab.pause(), time.sleep(0.2)),
        "resize": lambda: join(p) if p.rng.random() < 0.5 else leave(p),
        "repr": lambda: [repr(p.lab) for _ in range(50)],
    }
    name = p.rng.choice(list(calls))
    said = "after" if not interrupted(calls[name], p.rng.uniform(0.0, 0.3)) else "in the middle of"
    if name == "pause":
        p.lab.resume()
    return f"interrupted {said} {name}"


def interrupted(call: Callable[[], Any], after: float) -> bool:
    """Calls, and interrupts this thread (the main one) after `after` seconds. Returns whether the call broke off."""
    timer = threading.Timer(after, os.kill, (os.getpid(), signal.SIGINT))
    done = False
    timer.start()
    try:
        call()
        done = True
        while timer.is_alive():
            time.sleep(0.01)
        time.sleep(0.01)
    except KeyboardInterrupt:
        pass
    except (KnobError, ClusterError):  # the call is invalid at the moment; the interrupt is still to come
        done = True
        timer.join()
    return not done


FAULTS: dict[Harm, int] = {kill: 3, freeze: 3, join: 5, leave: 2, cut: 2, interrupt: 3}


def planned(rng: random.Random, count: int) -> list[Harm]:
    """Draws `count` faults. The controller dies late if at all: later ranks cannot join, and connections not be cut."""
    drawn = rng.choices(list(FAULTS), list(FAULTS.values()), k=count)
    if rng.random() < 0.5:
        drawn[rng.randrange(count * 3 // 4, count)] = end_controller
    return drawn


def possible(p: Patient, fault: Harm) -> Harm:
    """Returns `fault`, or join or leave if the number of ranks does not allow it."""
    if len(p.members) < 2 and fault in (kill, leave, cut):
        return join
    return leave if len(p.members) >= MOST and fault is join else fault


# -- what is left behind


def left(pid: int) -> dict[str, int]:
    """Counts the threads, descriptors and children of a process, and the machine's shared memory files."""
    me = psutil.Process(pid)
    shared = len(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else 0
    return {"threads": me.num_threads(), "descriptors": me.num_fds(), "children": len(me.children(recursive=True)),
            "shared": shared}  # fmt: skip
