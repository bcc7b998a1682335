"""The simulator: the same strategies on a virtual clock, without processes, writing the same record."""

from workbench.sim.clock.collective import Mismatch as Mismatch
from workbench.sim.clock.deadlock import Deadlock as Deadlock
from workbench.sim.costs.costs import Costs as Costs
from workbench.sim.costs.durations import AlphaBeta as AlphaBeta
from workbench.sim.costs.durations import Duration as Duration
from workbench.sim.costs.prices import Line as Line
from workbench.sim.run.simulate import simulate as simulate

__all__ = ["AlphaBeta", "Costs", "Deadlock", "Duration", "Line", "Mismatch", "simulate"]
