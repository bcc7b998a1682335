"""One rank of a run, as the parts of its loop see each other."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from workbench.host.checkpoint.reread import Former
from workbench.host.checkpoint.saving import Saving
from workbench.host.memory.batches import Batches
from workbench.host.observe.finite import Finite
from workbench.host.reconfigure.steering import Steering
from workbench.host.transfer.boundary import Boundary
from workbench.host.transfer.views import Changing
from workbench.settings import Change


class LoopView(Changing, Protocol):
    """A rank that makes steps, and goes on in a new generation. For the attributes see `Outliving`."""

    planned: list[Change]
    taken: list[Change]
    bounds: list[Boundary]
    outer: dict[str, Tensor] | None
    former: Former | None
    obeyed: int

    @property
    def saving(self) -> Saving: ...
    @property
    def finite(self) -> Finite: ...
    @property
    def reads(self) -> Batches | None: ...
    @property
    def steering(self) -> Steering: ...

    async def order_ahead(self) -> None:
        """Cuts buckets in the order of gradients, if a trial can foresee it."""

    async def agreed(self, names: list[str]) -> list[str]:
        """Returns `names` of the first of the ranks that hold the same part of the model."""

    async def lie_alike(self) -> None:
        """Gives all ranks rank 0's order of parameters."""

    async def share_out(self, ahead: bool = False) -> None:
        """Splits state that is whole on every rank as the partition and the strategy need it."""

    async def formed(self) -> None:
        """Waits until every rank of the generation holds the full state."""

    async def on(self) -> None:
        """Makes steps and evaluations until the run is over."""

    def say(self, phase: str) -> None:
        """Records what the run does now, such as "running"."""
