"""One rank of a run, as hand-overs and changes see it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

from workbench.experiment import Experiment
from workbench.host.core.answers import RequestAnswer
from workbench.host.core.data_positions import ReaderView
from workbench.host.core.rate import Rate
from workbench.host.core.views import RankView
from workbench.host.memory.account import MemoryAccount
from workbench.host.passes.in_flight import InFlight
from workbench.host.placement.spread import ReplicaSpread
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.sharding.unsharder import Unsharder
from workbench.host.sharding.usage import ParameterUsage
from workbench.host.transfer.shards import ShardLayout

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class ChangeView(RankView, Protocol):
    """A rank whose state moves, because the strategy, the partition, the ranks or other settings change.

    flushing:   uncompressed steps left, which send a residual that no error feedback uses any more
    answer:     the result of the last change
    sent_bytes: bytes that this rank has sent over its links
    """

    experiment: Experiment
    flushing: int
    answer: RequestAnswer | None

    @property
    def ledger(self) -> MemoryAccount: ...
    @property
    def usage(self) -> ParameterUsage: ...
    @property
    def reading(self) -> Unsharder: ...

    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer:
        """Returns a new optimizer for `params`; None: for the parameters that this rank holds."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Steps with this optimizer from now on."""

    def choose_lane(self) -> None:
        """Chooses where children run, after the compressor or the network may have changed."""

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None:
        """Lays out the parameters `names` of the model here. held: False if their values come later, as shards"""

    async def reorder_parameters(self, names: list[str]) -> None:
        """Puts the parameters into this order, and cuts new buckets."""

    def sharded(self, buckets: ShardLayout | None) -> None:
        """Notes that optimizer state is in shards of these buckets; None: it is whole."""

    @property
    def rate(self) -> Rate: ...
    @property
    def flow(self) -> InFlight: ...
    @property
    def reads(self) -> ReaderView | None: ...
    @property
    def sent_bytes(self) -> int: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Returns `wanted`. Raises KnobError if this host cannot train it."""

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        """Sets the links and the faults. was: the experiment until now; None at the start of a run"""

    def tune_partition(self) -> None:
        """Applies changed knobs of the partition, while the model's layout stays."""

    def restart_data(self, used: int) -> None:
        """Begins the data again, after `used` examples of their order."""

    async def resize_buckets(self, bucket_mb: float) -> None:
        """Cuts buckets of another size."""

    async def leave_opaque(self) -> None:
        """Ends torch's own wrapper around the model."""

    def enter_opaque(self) -> None:
        """Wraps the model in torch's own."""

    def record_switch(self, was: Experiment, wanted: Experiment) -> AbstractContextManager[None]:
        """Inside, the strategy or the partition is switched, as one span."""

    async def leave(self, strategy: Strategy) -> None:
        """Leaves a strategy: all that it has in flight ends."""

    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None:
        """Enters the strategy of `wanted`."""

    def reset_groups(self) -> None:
        """The mesh is new: closes the old groups."""

    def foresee_reads(self, cheaply: bool) -> AccessTrace | None:
        """Returns what a step will read; None if that is unknown. cheaply: the model is not built for it"""

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns the text of rank `by`, on every rank."""
