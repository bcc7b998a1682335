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
from typing import Any, Protocol

import torch

from workbench.engine.collectives.clock_offset import agree_on_time
from workbench.engine.collectives.shaping import ArrivalTable, Clock
from workbench.engine.collectives.wire import LOOPBACK, Aborted, LeaveEvent, Wire, connect_store
from workbench.engine.control import membership
from workbench.engine.control.control_channel import RequestFlag
from workbench.engine.control.unused_flags import UnusedFlags
from workbench.engine.p2p.listener import find_own_address
from workbench.experiment import Experiment
from workbench.rank import Rank

POLL_SECONDS = 0.02  # seconds between two looks
LATE_MESSAGE_SECONDS = 3.0  # seconds in which a message may still arrive after its sender has left


class PeeringView(Protocol):
    """where: the address of the store; generation: its name, unlike earlier generations'"""

    @property
    def rank(self) -> Rank: ...
    @property
    def experiment(self) -> Experiment: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def leaving(self) -> LeaveEvent: ...
    @property
    def store_address(self) -> tuple[str, int]: ...
    @property
    def generation(self) -> str: ...
    @property
    def device(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def loopback(self) -> bool: ...
    @property
    def wires(self) -> list[Wire]: ...
    @property
    def files(self) -> list[Path]: ...


class Peers:
    """The other ranks, as one rank sees them. All ranks make theirs at once.

    control, data: wires of the training thread and of its lane; None in a run of one rank
    arrivals:      the wire on which ranks without a common file report when they were ready; None as above
    local, doubt:  whether all ranks are on one host; the error of this rank's clock, in seconds
    offset:        seconds by which this host's clock was ahead of rank 0's
    """

    def __init__(self, session: PeeringView) -> None:
        self.session, self.rank, self.leaving = session, session.rank, session.leaving
        self.store: Any = None
        self.control: Wire | None = None
        self.data: Wire | None = None
        self.arrivals: Wire | None = None
        self.local, self.doubt, self.offset = True, 0.0, 0.0
        self._watching: Any = None  # its second connection
        self._parted: float | None = None  # when a wait for a message found a peer gone
        self._folder = Path()
        if self.rank.size > 1:
            self._meet_peers()

    def _meet_peers(self) -> None:
        session, (host, port) = self.session, self.session.store_address
        self.store = connect_store(host, port, session.generation)
        membership.store_process(self.store, self.rank.id)
        precise = session.experiment.precise
        self.control = control = self.open_wire("control", precise=precise)
        own = session.clock.base
        self.local, self.doubt = agree_on_time(control, session.clock)
        self.offset = 0.0 if self.local else session.clock.base - own
        if self.local:
            self._folder = Path(host).parent if not port else self._share_folder(control)
        self.data = self.open_wire(
            "data", precise=precise, kind=session.kind, on=session.device, is_peer_gone=self.has_lost_peer
        )
        self.arrivals = self.data
        if session.kind != "gloo" and not self.local:
            self.arrivals = self.open_wire("arrivals", precise=precise)

    def open_wire(self, tag: str, ranks: Sequence[int] = (), store: Any = None, **how: Any) -> Wire:
        """All these ranks call it at once; (): every rank. The session cuts and closes the wire."""
        session, me = self.session, self.rank.id
        index, size = (ranks.index(me), len(ranks)) if ranks else (me, self.rank.size)
        here = LOOPBACK if session.loopback else find_own_address(session.store_address)
        opened = partial(Wire, store or self.store, index, size, tag, self.leaving, here=here, **how)
        alone = how.get("kind", "gloo") != "gloo"  # NCCL opens on the thread that uses it
        wire = opened() if alone else WireOpening(opened, f"rank {me} opening {tag}").wait(self._check_opening)
        session.wires.append(wire)
        return wire

    def _check_opening(self) -> None:
        """Uses a second connection to the store, because the first one waits."""
        self.check_peers()
        self._watching = self._watching or connect_store(*self.session.store_address, self.session.generation)
        membership.require_alive(self._watching, range(self.rank.size), self.rank.members)

    def drop_store(self) -> None:
        self.store = None

    def close_wires(self, wires: list[Wire]) -> None:
        for wire in wires:
            wire.close()
            if wire in self.session.wires:  # other code closes an ended generation's wires
                self.session.wires.remove(wire)

    def await_point(self, to: str, until: float) -> None:
        """Reports that this rank has reached `to`, and waits for all ranks. until: as `time.monotonic`"""
        if self.store is None:  # a run of one rank
            return
        with contextlib.suppress(RuntimeError):  # rank 0's host keeps the store, and may be gone
            self.store.add(to, 1)
            while self.store.add(to, 0) < self.rank.size and time.monotonic() < until:
                time.sleep(POLL_SECONDS)

    def await_ends(self) -> None:
        """Waits until all ranks have made their last step, this rank must leave, or a peer is gone.

        Replicas may end at different times. If one closes its wires, a rank that still waits for a message counts it as
        lost.
        """
        if self.store is None:
            return
        with contextlib.suppress(RuntimeError):  # rank 0's host keeps the store, and may be gone
            self.store.set(f"ended {self.rank.id}", "1")
            every = [f"ended {place}" for place in range(self.rank.size)]
            while not (self.store.check(every) or self.leaving.is_set() or self.has_lost_peer()):
                time.sleep(POLL_SECONDS)

    def has_lost_peer(self) -> bool:
        return self.control is not None and self.control.has_lost_peer()

    def check_peers(self) -> None:
        """Raises if this rank must leave or a peer is gone, for waits that no wire ends."""
        if self.leaving.is_set():
            raise Aborted("told to leave")
        if self.has_lost_peer():
            raise ConnectionError("Connection closed by peer")

    def check_with_grace(self) -> None:
        """As `check_peers`, but a message may arrive LATE_MESSAGE_SECONDS after its sender has left."""
        if not self.has_lost_peer():
            self._parted = None
        elif self._parted is None:
            self._parted = time.monotonic()
        elif time.monotonic() - self._parted > LATE_MESSAGE_SECONDS:
            self.check_peers()

    def make_arrival_table(self, name: str = "", ranks: Sequence[int] = ()) -> ArrivalTable | None:
        """The arrivals at one wire's collectives by this host's ranks or `ranks`."""
        path = self._make_shared_path(f"{name}.arrivals")
        me = self.rank.id
        if path is None:
            return None
        return ArrivalTable(path, ranks.index(me), len(ranks)) if ranks else ArrivalTable(path, me, self.rank.size)

    def make_flag(self) -> RequestFlag | None:
        path = self._make_shared_path(".flag")
        return RequestFlag(path) if path else None

    def make_unused_flags(self) -> UnusedFlags | None:
        """Returns the hands that ranks raise when they left out a parameter; None if they share no memory."""
        path = self._make_shared_path(".hands")
        return UnusedFlags(path, self.rank.id, self.rank.size) if path else None

    def _make_shared_path(self, name: str) -> Path | None:
        """Rank 0 removes the file at the end. Returns None if ranks do not share a host."""
        if not self.local or self.rank.size == 1:
            return None
        self.session.files.append(self.make_path(name))
        return self.session.files[-1]

    def make_path(self, name: str) -> Path:
        """Returns a path of this run that all ranks of one host see."""
        return self._folder / f"{self.session.generation}{name}"

    def _share_folder(self, control: Wire) -> Path:
        """Makes a directory that only this user can enter, for ranks without a file as store."""
        said = torch.zeros(4096, dtype=torch.uint8)
        if self.rank.id == 0:
            made = tempfile.mkdtemp(prefix="workbench-")
            said[: len(made.encode())] = torch.frombuffer(bytearray(made.encode()), dtype=torch.uint8)
            self.session.files.append(Path(made))
        control.wait(control.broadcast(said, 0))
        return Path(bytes(said.numpy()).rstrip(b"\0").decode())


class WireOpening:
    """Opens a wire on a thread of its own, because torch cannot be interrupted while it opens one."""

    def __init__(self, make: Callable[[], Wire], name: str) -> None:
        self._make = make
        self._results: list[Wire | BaseException] = []
        self._is_abandoned = False
        self._lock = threading.Lock()  # one of both threads closes an unwanted wire
        self._thread = threading.Thread(target=self._open_wire, name=name, daemon=True)
        self._thread.start()

    def _open_wire(self) -> None:
        made: Wire | BaseException
        try:
            made = self._make()
        except BaseException as error:
            made = error
        with self._lock:
            self._results.append(made)
            left = self._is_abandoned
        if left:
            self._close_wire()

    def wait(self, look: Callable[[], None]) -> Wire:
        """Raises what `look` raises; then the wire is closed once it is open."""
        try:
            while self._thread.is_alive():
                self._thread.join(POLL_SECONDS)
                if self._thread.is_alive():
                    look()
        except BaseException:
            with self._lock:
                self._is_abandoned, made = True, bool(self._results)
            if made:
                self._close_wire()
            raise
        wire = self._results.pop()
        if isinstance(wire, BaseException):
            raise wire
        return wire

    def _close_wire(self) -> None:
        (made,) = self._results
        if not isinstance(made, BaseException):
            made.close()


def remove_files(files: list[Path]) -> None:
    """Removes files and directories; ignores missing ones."""
    for path in files:
        shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
