"""One rank, as its meetings and its background see it."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, Any, Protocol

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.shaping import Clock, Port
from workbench.engine.collectives.stopwatch import Stopwatch
from workbench.engine.collectives.wire import LeaveEvent, Wire
from workbench.engine.control.peers import Peers
from workbench.engine.p2p.mailbox import Mailbox
from workbench.host.core.rank_view import RankView
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.reconfigure.policy_runner import TappedRecorder
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.rank import Op

if TYPE_CHECKING:
    from workbench.engine.compute.host import Host
    from workbench.engine.device import Chip


class BackgroundView(RankView, Protocol):
    """A rank, as its background's thread sees it."""

    @property
    def clock(self) -> Clock: ...
    @property
    def chip(self) -> Chip: ...
    @property
    def record(self) -> TappedRecorder: ...
    @property
    def watch(self) -> Stopwatch: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def port(self) -> Port: ...
    @property
    def mailbox(self) -> Mailbox: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def memory_account(self) -> MemoryAccount: ...
    @property
    def host(self) -> Host: ...
    @property
    def leaving(self) -> LeaveEvent: ...

    def perform_hop(self, op: Op, step: int) -> Any: ...


class StoppingView(Protocol):
    """A session that may stop."""

    @property
    def stopping(self) -> bool: ...


class MeetingView(BackgroundView, Protocol):
    """due_count: planned changes that are due"""

    @property
    def paused(self) -> bool: ...
    @property
    def credit(self) -> int: ...

    def set_paused(self, so: bool) -> None: ...

    @property
    def control(self) -> Wire | None: ...
    @property
    def inbox(self) -> queue.SimpleQueue[dict[str, Any]]: ...
    @property
    def usage(self) -> ParameterUsage: ...
    @property
    def due_count(self) -> int: ...
    @property
    def is_asynchronous(self) -> bool: ...
    @property
    def session(self) -> StoppingView: ...
