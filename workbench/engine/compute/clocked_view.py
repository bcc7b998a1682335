"""One rank on the engine, as its performers see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from workbench.engine.collectives.shaping import Clock, ComputePace, PacedSleep, Port
from workbench.host.core.rank_view import RankView
from workbench.host.reconfigure.policy_runner import TappedRecorder

if TYPE_CHECKING:
    from workbench.engine.device import Chip


class ClockedView(RankView, Protocol):
    """A rank on a real clock. paced_sleep: waits as long as the settings say"""

    @property
    def clock(self) -> Clock: ...
    @property
    def paced_sleep(self) -> PacedSleep: ...
    @property
    def chip(self) -> Chip: ...
    @property
    def record(self) -> TappedRecorder: ...


class PacedHost(Protocol):
    """A host with phases as long as its pace says."""

    @property
    def pace(self) -> ComputePace: ...


class OffloadView(ClockedView, Protocol):
    """A rank that keeps values off its device."""

    @property
    def port(self) -> Port: ...
    @property
    def host(self) -> PacedHost: ...
