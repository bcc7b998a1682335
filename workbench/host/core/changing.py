"""One rank of a run as a change sees it."""

from __future__ import annotations

from typing import Any, Protocol

from workbench.experiment import Experiment
from workbench.host.core.answers import Answer
from workbench.host.core.rate import Rate
from workbench.host.placement.spread import Spread
from workbench.rank import Rank


class Changing(Protocol):
    """One rank of a run as a change sees it; each host has one."""

    experiment: Experiment
    rank: Rank
    state: Any  # what the strategy remembers
    flushing: int  # uncompressed steps still to make, in which a residual is sent that nothing feeds back any more
    rate: Rate
    reading: Any  # its Reading
    ledger: Any  # its Ledger
    flow: Any  # its Flow
    steering: Any  # its Steering
    finite: Any  # its Finite
    spread: Spread | None  # how a replica lies on several ranks
    answer: Answer | None  # what the last change came to

    @property
    def now(self) -> float: ...
    @property
    def sent(self) -> int: ...  # bytes that this rank has put on its links
    @property
    def learner(self) -> Any: ...  # its task's functions
    @property
    def layout(self) -> Any: ...
    @property
    def model(self) -> Any: ...
    @property
    def optimizer(self) -> Any: ...

    def able(self, wanted: Experiment) -> Experiment: ...  # `wanted`, or KnobError where this host cannot do it
    def set_fabric(self, was: Experiment | None, wanted: Experiment) -> None: ...
    def make_optimizer(self, wanted: Experiment, params: list[Any] | None = None) -> Any: ...
    def relaid(self, names: set[str], spread: Spread | None, held: bool = True) -> None: ...  # these lie here now
    def tuned(self) -> None: ...  # the partition has other knobs than before, and the model lies as it did
    def use_optimizer(self, optimizer: Any) -> None: ...
    def choose_lane(self) -> None: ...
    def restart_data(self, used: int) -> None: ...  # behind so many examples of its order
    async def rebucket(self, bucket_mb: float) -> None: ...
    async def leave_opaque(self) -> None: ...
    def enter_opaque(self) -> None: ...
    def mark(self, name: str, detail: dict[str, Any]) -> None: ...
    def sample(self, name: str, value: float) -> None: ...
    def switching(self, was: Experiment, wanted: Experiment) -> Any: ...
    def foreseen(self, cheaply: bool) -> Any: ...  # the Trial of a step to come; None where nobody can tell
    async def leave(self, strategy: Any) -> None: ...
    def enter(self, was: Experiment, wanted: Experiment) -> None: ...
    def sharded(self, buckets: Any) -> None: ...  # the optimizer's state lies in shards of these buckets now; or whole
    def regrouped(self) -> None: ...  # ranks are arranged anew: what belongs to groups of before is over
    async def gather(self, number: int) -> list[int]: ...  # every rank's number, by rank
