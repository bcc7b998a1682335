"""Keeps `model_of` where scripts from before the sub-packages import it. New code calls `Checkpoint.model`."""

from workbench.sim.run.resuming import model_of as model_of
