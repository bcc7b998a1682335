"""When ranks that do not meet in every round are to come together: what both hosts decide alike.

How they hear of it is each host's own: by messages on the engine (see [Note: Two ways of hearing] there), at once in a
simulation.
"""

from __future__ import annotations

from typing import Any

from workbench.experiment import Experiment
from workbench.rank import Rank


def idle(e: Experiment, rank: Rank) -> bool:
    """Has this rank nothing to do but wait for a meeting? It serves, or has made its last step before others have."""
    return rank.role == "server" or (not e.strategy.lockstep and 0 < e.steps <= rank.step)


def named(e: Experiment, rank: Rank, state: Any) -> int:
    """On rank 0: the step at which all are to meet, so late that every rank has heard of it by then."""
    strategy = e.strategy
    return max(rank.step, strategy.newest(rank, state)) + strategy.propagation_in(rank.size, rank.step)
