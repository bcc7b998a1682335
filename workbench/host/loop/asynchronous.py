"""Decides when ranks meet that do not meet in every round.

The engine announces a meeting by messages (see [Note: Two ways of hearing] there), a simulation at once.
"""

from __future__ import annotations

from workbench.experiment import Experiment
from workbench.rank import Rank


def is_apart(e: Experiment, rank: Rank) -> bool:
    """Whether ranks make steps without a meeting in every round."""
    if rank.mesh.inside:  # a replica's stages exchange each batch, and all ranks get each ticket
        return False
    return not e.strategy.lockstep or e.strategy.propagation_in(rank.size, rank.step) > 0


def is_idle(e: Experiment, rank: Rank) -> bool:
    """Whether this rank only waits, as a server or after its last step."""
    return rank.role == "server" or (not e.strategy.lockstep and 0 < e.steps <= rank.step)


def choose_meeting_step(e: Experiment, rank: Rank, state: object) -> int:
    """Chooses a step late enough for every rank to know it. Only for rank 0."""
    strategy = e.strategy
    return max(rank.step, strategy.newest(rank, state)) + strategy.propagation_in(rank.size, rank.step)
