"""A rank's view for hand-overs and changes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from torch import nn
from torch.optim import Optimizer

from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.host.core.data_positions import ReaderView
from workbench.host.core.learning_rate import Rate
from workbench.host.core.rank_view import RankView
from workbench.host.core.request_answers import RequestAnswer
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.passes.in_flight import InFlight
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.sharding.access_trace import AccessTrace
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.host.transfer.shard_layout import ShardLayout

if TYPE_CHECKING:
    from workbench.strategies import Strategy


class ChangeView(RankView, Protocol):
    """A rank whose state moves because settings or ranks change.

    flushing:   uncompressed steps left, which send an unused residual
    answer:     as in RankLoop
    sent_bytes: bytes sent over its links
    """

    experiment: Experiment
    answer: RequestAnswer | None

    @property
    def flushing(self) -> int: ...
    @property
    def memory_account(self) -> MemoryAccount: ...
    @property
    def usage(self) -> ParameterUsage: ...
    @property
    def unsharder(self) -> Unsharder: ...

    def adopt_settings(self, wanted: Experiment, step: int) -> None:
        """As in RankLoop."""

    def exchange_by(self, compressor: Compressor, flushing: int = 0) -> None:
        """As in RankLoop."""

    def make_optimizer(self, wanted: Experiment, params: list[nn.Parameter] | None = None) -> Optimizer:
        """Makes one for `params`, or for all."""

    def use_optimizer(self, optimizer: Optimizer) -> None:
        """Steps with it."""

    def choose_lane(self) -> None:
        """Call it after changes of compressor or network."""

    def lay_out_parameters(self, names: set[str], spread: ReplicaSpread | None, held: bool = True) -> None:
        """held: False if values come later, as shards"""

    async def reorder_parameters(self, names: list[str]) -> None:
        """Cuts new buckets."""

    def sharded(self, buckets: ShardLayout | None) -> None:
        """buckets: the shards of optimizer state; None: whole"""

    @property
    def rate(self) -> Rate: ...
    @property
    def micros_in_flight(self) -> InFlight: ...
    @property
    def reads(self) -> ReaderView | None: ...
    @property
    def sent_bytes(self) -> int: ...

    def require_trainable(self, wanted: Experiment) -> Experiment:
        """Raises KnobError if this host cannot train `wanted`."""

    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None:
        """Sets links and faults. was: None at a run's start"""

    def tune_partition(self) -> None:
        """Keeps the model's layout."""

    def restart_data(self, used: int) -> None:
        """used: the first examples to skip"""

    async def resize_buckets(self, bucket_mb: float) -> None:
        """Cuts new buckets."""

    async def leave_opaque(self) -> None:
        """Ends torch's wrapper."""

    def enter_opaque(self) -> None:
        """Wraps the model."""

    def record_switch(self, was: Experiment, wanted: Experiment) -> AbstractContextManager[None]:
        """Inside, the strategy or partition is switched."""

    async def leave(self, strategy: Strategy) -> None:
        """Ends all operations in flight."""

    def enter_strategy(self, was: Experiment | None, wanted: Experiment) -> None:
        """Enters it."""

    def reset_groups(self) -> None:
        """Closes the old mesh's groups."""

    def foresee_reads(self, cheaply: bool) -> AccessTrace | None:
        """Returns a step's reads; None if unknown. cheaply: does not build the model"""

    async def broadcast_text(self, text: str, by: int = 0) -> str:
        """Returns rank `by`'s text."""
