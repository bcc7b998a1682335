"""The simulator: the same strategies on a virtual clock, without processes, writing the same record."""

from workbench.sim.collective import Mismatch as Mismatch
from workbench.sim.costs import Costs as Costs
from workbench.sim.deadlock import Deadlock as Deadlock
from workbench.sim.durations import AlphaBeta as AlphaBeta
from workbench.sim.durations import Duration as Duration
from workbench.sim.lines import Line as Line
from workbench.sim.simulate import simulate as simulate

__all__ = ["AlphaBeta", "Costs", "Deadlock", "Duration", "Line", "Mismatch", "simulate"]
