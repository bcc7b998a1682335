"""Keeps `model_of` importable for old scripts. New code calls `Checkpoint.model`."""

from workbench.sim.run.resuming import model_of as model_of
