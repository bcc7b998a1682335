"""Parts of a session that its rank's tensors or sizes use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from workbench.experiment import Experiment
from workbench.host.memory.memory_account import MemoryAccount
from workbench.host.observe.non_finite import NonFiniteGuard
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.submodel_training import SubModelTraining
from workbench.host.sharding.parameter_usage import ParameterUsage
from workbench.host.sharding.unsharder import Unsharder
from workbench.rank import Rank


@dataclass(frozen=True)
class SessionParts:
    """Parts of one rank's session in one generation.

    usage:          which parameters steps use
    get_experiment: returns the settings in force
    """

    rank: Rank
    submodel: SubModelTraining
    memory_account: MemoryAccount
    unsharder: Unsharder
    non_finite_guard: NonFiniteGuard
    micros_in_flight: InFlight
    usage: ParameterUsage
    get_experiment: Callable[[], Experiment]
