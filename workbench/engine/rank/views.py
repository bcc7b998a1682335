"""One rank on the engine, as the functions see it that check, wrap and order its model."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.engine.compute.host import Host
from workbench.engine.compute.shared_parameters import SharedParameters
from workbench.engine.control.peers import Peers
from workbench.engine.wire.collectives import Wire
from workbench.engine.wire.lane import Lane
from workbench.engine.wire.shaping import Port
from workbench.experiment import Experiment
from workbench.host.transfer.views import ChangeView


class PlaceView(Protocol):
    """Where a rank trains. kind: the backend, such as "gloo"; device: its name, such as "cpu"."""

    @property
    def kind(self) -> str: ...
    @property
    def device(self) -> str: ...


class ModelView(ChangeView, Protocol):
    """A rank with a model."""

    @property
    def session(self) -> PlaceView: ...
    @property
    def control(self) -> Wire | None: ...
    @property
    def host(self) -> Host: ...
    @property
    def peers(self) -> Peers: ...
    @property
    def lane(self) -> Lane: ...
    @property
    def port(self) -> Port: ...
    @property
    def shared(self) -> SharedParameters: ...

    def make_example(self, wanted: Experiment) -> Any:
        """Returns a batch that is equal on all ranks."""

    def take_early_requests(self) -> None:
        """Takes requests that are on their way."""

    def mark_buckets(self) -> None:
        """Records the size of each bucket."""
