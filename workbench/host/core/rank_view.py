"""One rank of a run, as the other parts of host see it.

A view lists what its users read or call. Sub-packages extend `RankView`, as `transfer/change_view.py` does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from torch import nn
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.rank import Rank
from workbench.tasks import Learner

if TYPE_CHECKING:
    from collections.abc import Mapping

    from workbench.settings import Json


class RankView(Protocol):
    """One rank.

    state:  the strategy's own state
    spread: how a replica lies on several ranks; None: each rank has a whole replica
    now:    seconds since the run began
    """

    @property
    def experiment(self) -> Experiment: ...
    @property
    def rank(self) -> Rank: ...
    @property
    def learner(self) -> Learner: ...
    @property
    def model(self) -> nn.Module: ...
    @property
    def layout(self) -> ParameterLayout: ...
    @property
    def optimizer(self) -> Optimizer: ...
    @property
    def state(self) -> Any: ...
    @property
    def spread(self) -> ReplicaSpread | None: ...
    @property
    def now(self) -> float: ...

    async def gather(self, number: int) -> list[int]:
        """Returns every rank's number."""

    def mark(self, name: str, detail: Mapping[str, Json]) -> None:
        """Records an event."""

    def sample(self, name: str, value: float) -> None:
        """Records one number."""
