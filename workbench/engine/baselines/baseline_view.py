"""One rank on the engine, as torch's own baselines see it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from workbench.engine.collectives.wire import Wire
from workbench.host.transfer.change_view import ChangeView

if TYPE_CHECKING:
    from workbench.engine.compute.host import Host


class BaselineView(ChangeView, Protocol):
    """A rank that torch's wrapper trains."""

    @property
    def control(self) -> Wire | None: ...
    @property
    def host(self) -> Host: ...
