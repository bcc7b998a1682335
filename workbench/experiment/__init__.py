"""The value that names all that a run depends on, and every reason why one is refused."""

from workbench.experiment.experiment import Experiment as Experiment

__all__ = ["Experiment"]
