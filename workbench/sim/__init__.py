"""The simulator: the same strategies on a virtual clock, without processes, writing the same record."""

from workbench.sim.collective import Mismatch as Mismatch
from workbench.sim.costs import Costs as Costs
from workbench.sim.deadlock import Deadlock as Deadlock
from workbench.sim.durations import Duration as Duration
from workbench.sim.durations import Wire as Wire
from workbench.sim.simulate import simulate as simulate

__all__ = ["Costs", "Deadlock", "Duration", "Mismatch", "Wire", "simulate"]
