"""One rank of a run, as hand-overs and changes see it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.core.answers import Answer
from workbench.host.core.dealing import Reader
from workbench.host.core.rate import Rate
from workbench.host.core.views import RankView
from workbench.host.memory.ledger import Ledger
from workbench.host.passes.flow import Flow
from workbench.host.placement.spread import Spread
from workbench.host.sharding.reading import Reading
from workbench.host.sharding.trial import Trial
from workbench.host.sharding.usage import Usage
from workbench.host.transfer.shards import Cut

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class Changing(RankView, Protocol):
    """A rank whose state moves, because the strategy, the partition, the ranks or other settings change.

    flushing: uncompressed steps left, which send a residual that no error feedback uses any more
    answer:   the result of the last change
    sent:     bytes that this rank has sent over its links
    """

    experiment: Experiment
    flushing: int
    answer: Answer | None

    @property
    def ledger(self) -> Ledger: ...
    @property
    def usage(self) -> Usage: ...
    @property
    def reading(self) -> Reading: ...

    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer:
        """Returns a new optimizer for `params`; None: for the parameters that this rank holds."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Steps with this optimizer from now on."""

    def choose_lane(self) -> None:
        """Chooses where children run, after the compressor or the network may have changed."""

    def relaid(self, names: set[str], spread: Spread | None, held: bool = True) -> None:
        """Lays out the parameters `names` of the model here. held: False if their values come later, as shards"""

    async def relay_in(self, names: list[str]) -> None:
        """Puts the parameters into this order, and cuts new buckets."""

    def sharded(self, buckets: Cut | None) -> None:
        """Notes that optimizer state is in shards of these buckets; None: it is whole."""

    @property
    def rate(self) -> Rate: ...
    @property
    def flow(self) -> Flow: ...
    @property
    def reads(self) -> Reader | None: ...
    @property
    def sent(self) -> int: ...

    def able(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        """Sets the links and the faults. was: the experiment until now; None at the start of a run"""

    def tuned(self) -> None:
        """Applies changed knobs of the partition, while the model's layout stays."""

    def restart_data(self, used: int) -> None:
        """Begins the data again, after `used` examples of their order."""

    async def rebucket(self, bucket_mb: float) -> None:
        """Cuts buckets of another size."""

    async def leave_opaque(self) -> None:
        """Ends torch's own wrapper around the model."""

    def enter_opaque(self) -> None:
        """Wraps the model in torch's own."""

    def switching(self, was: Experiment, wanted: Experiment) -> AbstractContextManager[None]:
        """Inside, the strategy or the partition is switched, as one span."""

    async def leave(self, strategy: Strategy) -> None:
        """Leaves a strategy: all that it has in flight ends."""

    def enter(self, was: Experiment | None, wanted: Experiment) -> None:
        """Enters the strategy of `wanted`."""

    def regrouped(self) -> None:
        """The mesh is new: closes the old groups."""

    def foreseen(self, cheaply: bool) -> Trial | None:
        """Returns what a step will read; None if that is unknown. cheaply: the model is not built for it"""

    async def told(self, text: str, by: int = 0) -> str:
        """Returns the text of rank `by`, on every rank."""
