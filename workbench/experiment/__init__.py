"""Experiment, which describes a run completely, and the checks that refuse an invalid one."""

from workbench.experiment.experiment import Experiment as Experiment

__all__ = ["Experiment"]
