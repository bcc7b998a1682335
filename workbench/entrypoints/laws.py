"""Checks for a strategy of your own, for pages that import no simulator."""

from workbench.sim.teach.laws import RATE as RATE
from workbench.sim.teach.laws import Laws as Laws
from workbench.sim.teach.laws import Net as Net
from workbench.sim.teach.laws import batch as batch
from workbench.sim.teach.laws import flat as flat
from workbench.sim.teach.laws import laws as laws
from workbench.sim.teach.laws import mse as mse
from workbench.sim.teach.laws import trained as trained
