"""A member on the simulator beside what it is held against, for pages that import no simulator."""

from workbench.sim.beside import Beside as Beside
from workbench.sim.beside import beside as beside
from workbench.sim.beside import named as named
