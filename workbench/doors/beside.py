"""A member and its reference on the simulator, for pages that import no simulator."""

from workbench.sim.teach.beside import Beside as Beside
from workbench.sim.teach.beside import beside as beside
from workbench.sim.teach.beside import named as named
