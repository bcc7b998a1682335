"""The parts that one rank's performers share."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.shaping import ComputePace
from workbench.engine.collectives.stopwatch import Stopwatch
from workbench.engine.compute.activity import Activity
from workbench.engine.compute.offload import OffloadTransfers
from workbench.engine.p2p.mailbox import Mailbox
from workbench.experiment import Experiment
from workbench.host.elastic.rollback import Rollback
from workbench.host.memory.batches import BatchReader
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.rank import Rank


@dataclass(eq=False, repr=False)
class ComputeParts:
    """The parts that more than one performer uses.

    experiment:        returns the settings in force
    learner:           the task's functions
    optimizer:         the present one; a change may replace it
    usage:             which parameters steps use
    run_loss_backward: runs the backward of a loss, scaled by a number
    show_loss:         returns a loss as it is recorded
    alone:             held while a coroutine of this rank or the optimizer runs
    module:            the model or torch's wrapper around it; forwards call it
    fully:             torch's fully_shard, while it trains the model
    """

    rank: Rank
    experiment: Callable[[], Experiment]
    learner: Any
    model: nn.Module
    layout: ParameterLayout
    optimizer: Any
    batches: BatchReader
    lane: Lane
    mailbox: Mailbox
    pace: ComputePace
    watch: Stopwatch
    memory_account: MemoryAccount
    unsharder: Unsharder
    submodel: SubModelTraining
    non_finite_guard: NonFiniteGuard
    rollback: Rollback
    away: OffloadTransfers
    usage: ParameterUsage
    run_loss_backward: Callable[[Tensor, Any], None]
    show_loss: Callable[[Tensor], Tensor]
    at: Activity = field(default_factory=Activity)
    alone: AbstractContextManager[Any] = field(default_factory=threading.Lock)
    module: Any = None
    fully: Any = None

    def __post_init__(self) -> None:
        self.module = self.model
        self.usage.take_layout(self.model, self.layout)

    def strategy(self) -> Any:
        return self.experiment().strategy

    def wrap_model(self, module: Any, fully: Any = None) -> None:
        self.module, self.fully = module, fully

    def unwrap_model(self) -> Any:
        """Undoes `wrap_model`. Returns torch's fully_shard, if it trained the model."""
        fully, self.module, self.fully = self.fully, self.model, None
        return fully

    def use_optimizer(self, optimizer: Any) -> None:
        self.optimizer = optimizer
