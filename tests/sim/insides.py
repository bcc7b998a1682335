"""Runs simulations and keeps their ranks, so that tests can read parameters and strategy state."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch

from workbench import simulate
from workbench.experiment import Experiment
from workbench.run import Run
from workbench.settings import Change
from workbench.sim.rank.session import Session


def simulated(e: Experiment, *changes: Change, real: bool = True) -> tuple[Run, list[Session]]:
    """Returns the run and its ranks in their final state."""
    made: list[Session] = []
    init = Session.__init__

    def kept(self: Session, *args: Any) -> None:
        init(self, *args)
        made.append(self)

    with patch.object(Session, "__init__", kept):
        run = simulate(e, changes=changes, real=real)
    return run, made


def parameters(sessions: list[Any]) -> torch.Tensor:
    """Returns (ranks, n) float64: each rank's parameters in model order, for sessions of either host."""
    return torch.stack([torch.cat([b.data.double() for b in s.layout.list_params()]) for s in sessions])
