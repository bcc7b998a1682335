"""Experiment, which describes a run completely, and its checks."""

from workbench.experiment.experiment import Experiment as Experiment

__all__ = ["Experiment"]
