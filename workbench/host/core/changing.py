"""One rank of a run as a change sees it."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.experiment import Experiment
from workbench.host.core.answers import Answer
from workbench.host.core.rate import Rate
from workbench.host.placement.spread import Spread
from workbench.rank import Rank


class Changing(Protocol):
    """The parts of one rank that a change reads or sets. Each host implements it."""

    experiment: Experiment
    rank: Rank
    state: Any  # the strategy's state
    flushing: int  # uncompressed steps left, which send a residual that no error feedback uses any more
    rate: Rate
    reading: Any  # its Reading
    ledger: Any  # its Ledger
    flow: Any  # its Flow
    steering: Any  # its Steering
    finite: Any  # its Finite
    spread: Spread | None  # how a replica lies on several ranks
    answer: Answer | None  # the result of the last change

    @property
    def now(self) -> float: ...
    @property
    def sent(self) -> int: ...  # bytes that this rank has sent over its links
    @property
    def learner(self) -> Any: ...  # the task's functions
    @property
    def layout(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...

    def able(self, wanted: Experiment) -> Experiment: ...  # returns `wanted`; KnobError if this host cannot
    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None: ...
    def make_optimizer(self, wanted: Experiment, params: list[Any] | None = None) -> Any: ...
    def relaid(self, names: set[str], spread: Spread | None, held: bool = True) -> None: ...  # new layout
    def tuned(self) -> None: ...  # the partition's knobs changed, and the model's layout did not
    def use_optimizer(self, optimizer: Any) -> None: ...
    def choose_lane(self) -> None: ...
    def restart_data(self, used: int) -> None: ...  # after so many examples of the order
    async def rebucket(self, bucket_mb: float) -> None: ...
    async def leave_opaque(self) -> None: ...
    def enter_opaque(self) -> None: ...
    def mark(self, name: str, detail: dict[str, Any]) -> None: ...
    def sample(self, name: str, value: float) -> None: ...
    def switching(self, was: Experiment, wanted: Experiment) -> Any: ...
    def foreseen(self, cheaply: bool) -> Any: ...  # the Trial of a future step; None if unknown
    async def leave(self, strategy: Any) -> None: ...
    def enter(self, was: Experiment, wanted: Experiment) -> None: ...
    def sharded(self, buckets: Any) -> None: ...  # optimizer state is in shards of these buckets; None: whole
    def regrouped(self) -> None: ...  # the mesh is new: closes the old groups
    async def gather(self, number: int) -> list[int]: ...  # every rank's number, by rank
