"""Experiment, which describes a run completely. Its checks."""

from workbench.experiment.experiment import Experiment as Experiment

__all__ = ["Experiment"]
