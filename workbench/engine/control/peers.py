"""Connects one rank to its peers: wires, a common time, and files that the ranks of one host share."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from workbench.engine.control import membership
from workbench.engine.control.hands import Hands
from workbench.engine.control.ticket import Flag
from workbench.engine.p2p.door import address
from workbench.engine.wire.clocks import agree_on_time
from workbench.engine.wire.collectives import LOOPBACK, Aborted, Wire, connect_store
from workbench.engine.wire.shaping import ArrivalTable

if TYPE_CHECKING:
    from workbench.engine.rank.session import Session

LOOK = 0.02  # seconds between two looks
GRACE = 3.0  # seconds in which a message may still arrive after its sender has left


class Peers:
    """The other ranks, as one rank sees them. All ranks make theirs at once.

    control, data: wires of the training thread and of its lane; None in a run of one rank
    arrivals:      the wire on which ranks without a common file report when they were ready; None as above
    local, doubt:  whether all ranks are on one host; the error of this rank's clock, in seconds
    offset:        seconds by which this host's clock was ahead of rank 0's
    """

    def __init__(self, session: Session) -> None:
        self.session, self.rank, self.leaving = session, session.rank, session.leaving
        self.store: Any = None
        self.control: Wire | None = None
        self.data: Wire | None = None
        self.arrivals: Wire | None = None
        self.local, self.doubt, self.offset = True, 0.0, 0.0
        self._watching: Any = None  # a second connection to the store
        self._parted: float | None = None  # when a peer was found gone during a wait for a message
        self._folder = Path()
        if self.rank.size > 1:
            self._meet()

    def _meet(self) -> None:
        session, (host, port) = self.session, self.session.where
        self.store = connect_store(host, port, session.generation)
        membership.come(self.store, self.rank.id)
        precise = session.experiment.precise
        self.control = control = self.open("control", precise=precise)
        own = session.clock.base
        self.local, self.doubt = agree_on_time(control, session.clock)
        self.offset = 0.0 if self.local else session.clock.base - own
        if self.local:
            self._folder = Path(host).parent if not port else self._made_by_rank_0(control)
        self.data = self.open("data", precise=precise, kind=session.kind, on=session.device, beside=self.parted)
        self.arrivals = self.data
        if session.kind != "gloo" and not self.local:
            self.arrivals = self.open("arrivals", precise=precise)

    def open(self, tag: str, ranks: Sequence[int] = (), store: Any = None, **how: Any) -> Wire:
        """Opens one more wire among all ranks or `ranks`, all at once. The session cuts and closes it."""
        session, me = self.session, self.rank.id
        index, size = (ranks.index(me), len(ranks)) if ranks else (me, self.rank.size)
        here = LOOPBACK if session.loopback else address(session.where)
        opened = partial(Wire, store or self.store, index, size, tag, self.leaving, here=here, **how)
        alone = how.get("kind", "gloo") != "gloo"  # NCCL opens on the thread that uses it
        wire = opened() if alone else Opening(opened, f"rank {me} opening {tag}").wait(self._look_while_opening)
        session.wires.append(wire)
        return wire

    def _look_while_opening(self) -> None:
        """Raises if this rank must leave or a peer is gone. Uses a second connection, because the first one waits."""
        self.look()
        self._watching = self._watching or connect_store(*self.session.where, self.session.generation)
        membership.require(self._watching, range(self.rank.size), self.rank.members)

    def drop(self, wires: list[Wire]) -> None:
        """Closes wires that are no longer used, before the run ends."""
        for wire in wires:
            wire.close()
            if wire in self.session.wires:  # the wires of an ended generation are closed elsewhere
                self.session.wires.remove(wire)

    def come(self, to: str, until: float) -> None:
        """Reports that this rank has reached `to`, and waits for all others. until: as `time.monotonic`"""
        if self.store is None:  # a run of one rank
            return
        with contextlib.suppress(RuntimeError):  # rank 0's host keeps the store, and may be gone
            self.store.add(to, 1)
            while self.store.add(to, 0) < self.rank.size and time.monotonic() < until:
                time.sleep(LOOK)

    def await_ends(self) -> None:
        """Waits until all ranks have made their last step, this rank must leave, or a peer is gone.

        Replicas of one run may end at different times. If one closes its wires, a rank that still waits for a message
        would take it for lost.
        """
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # rank 0's host keeps the store, and may be gone
            self.store.set(f"ended {self.rank.id}", "1")
            every = [f"ended {place}" for place in range(self.rank.size)]
            while not (self.store.check(every) or self.leaving.is_set() or self.parted()):
                time.sleep(LOOK)

    def parted(self) -> bool:
        """Whether a peer is known to be gone."""
        return self.control is not None and self.control.parted()

    def look(self) -> None:
        """Raises if this rank must leave or a peer is known to be gone; for waits that no wire ends."""
        if self.leaving.is_set():
            raise Aborted("told to leave")
        if self.parted():
            raise ConnectionError("Connection closed by peer")

    def follow(self) -> None:
        """The same as `look` while a message is awaited: it may still arrive after its sender has left."""
        if not self.parted():
            self._parted = None
        elif self._parted is None:
            self._parted = time.monotonic()
        elif time.monotonic() - self._parted > GRACE:
            self.look()

    def arrival_table(self, name: str = "", ranks: Sequence[int] = ()) -> ArrivalTable | None:
        """Returns the table of arrivals at one wire's collectives, for this host's ranks or `ranks`."""
        path = self._shared(f"{name}.arrivals")
        me = self.rank.id
        if path is None:
            return None
        return ArrivalTable(path, ranks.index(me), len(ranks)) if ranks else ArrivalTable(path, me, self.rank.size)

    def flag(self) -> Flag | None:
        """Returns the flag that rank 0 raises when it has requests."""
        path = self._shared(".flag")
        return Flag(path) if path else None

    def hands(self) -> Hands | None:
        """Returns the hands that ranks raise when they left out a parameter; None if they share no memory."""
        path = self._shared(".hands")
        return Hands(path, self.rank.id, self.rank.size) if path else None

    def _shared(self, name: str) -> Path | None:
        """Returns a file that this host's ranks share and rank 0 removes at the end; None if they share none."""
        if not self.local or self.rank.size == 1:
            return None
        self.session.files.append(self.file(name))
        return self.session.files[-1]

    def file(self, name: str) -> Path:
        """Returns the path of a file of this run that all ranks of one host see."""
        return self._folder / f"{self.session.generation}{name}"

    def _made_by_rank_0(self, control: Wire) -> Path:
        """Returns a directory with access for this user only, for ranks whose store is not a file."""
        said = torch.zeros(4096, dtype=torch.uint8)
        if self.rank.id == 0:
            made = tempfile.mkdtemp(prefix="workbench-")
            said[: len(made.encode())] = torch.frombuffer(bytearray(made.encode()), dtype=torch.uint8)
            self.session.files.append(Path(made))
        control.wait(control.broadcast(said, 0))
        return Path(bytes(said.numpy()).rstrip(b"\0").decode())


class Opening:
    """Opens a wire on a thread of its own, because torch cannot be interrupted while it opens one."""

    def __init__(self, make: Callable[[], Wire], name: str) -> None:
        self._make = make
        self._made: list[Wire | BaseException] = []
        self._left = False
        self._lock = threading.Lock()  # of the two above: one of both threads closes a wire that nobody takes
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        made: Wire | BaseException
        try:
            made = self._make()
        except BaseException as error:
            made = error
        with self._lock:
            self._made.append(made)
            left = self._left
        if left:
            self._close()

    def wait(self, look: Callable[[], None]) -> Wire:
        """Returns the open wire. Raises what `look` raises; then the wire is closed once it is open."""
        try:
            while self._thread.is_alive():
                self._thread.join(LOOK)
                if self._thread.is_alive():
                    look()
        except BaseException:
            with self._lock:
                self._left, made = True, bool(self._made)
            if made:
                self._close()
            raise
        wire = self._made.pop()
        if isinstance(wire, BaseException):
            raise wire
        return wire

    def _close(self) -> None:
        (made,) = self._made
        if not isinstance(made, BaseException):
            made.close()


def removed(files: list[Path]) -> None:
    """Removes files and directories; missing ones are ignored."""
    for path in files:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
