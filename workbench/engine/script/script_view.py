"""One rank, as a script's loop sees it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from workbench.engine.collectives.wire import LeaveEvent
from workbench.host.core.rank_view import RankView

if TYPE_CHECKING:
    from workbench.engine.compute.host import Host
    from workbench.engine.control.peers import Peers


class ChildrenView(Protocol):
    """The processes that a rank's loop starts."""

    def collect_started(self) -> AbstractContextManager[None]:
        """Collects every process that this thread starts inside the block."""


class SessionView(Protocol):
    """where: the address of the store"""

    @property
    def store_address(self) -> tuple[str, int]: ...
    @property
    def generation(self) -> str: ...
    @property
    def children(self) -> ChildrenView: ...


class ScriptView(RankView, Protocol):
    """A rank that a loop leads."""

    @property
    def session(self) -> SessionView: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def host(self) -> Host: ...
    @property
    def leaving(self) -> LeaveEvent: ...

    def broadcast_text_now(self, text: str, by: int = 0) -> str:
        """Returns the text of rank `by`, on every rank."""
