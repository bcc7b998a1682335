"""The state that a rank carries into its next generation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from workbench.host.checkpoint.whole_state import RecoveryCheckpoint
from workbench.host.transfer.boundary import Boundary


class CarriedState(NamedTuple):
    """A rank's own state between 2 generations.

    bounds: boundaries that this rank can go back to
    outer:  its outer momentum there
    former: the checkpoint to which all ranks go back
    """

    bounds: Sequence[Boundary] = ()
    outer: dict[str, Tensor] | None = None
    former: RecoveryCheckpoint | None = None
