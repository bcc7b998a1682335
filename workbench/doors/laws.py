"""Laws that a strategy of yours can be held to, for pages that import no simulator."""

from workbench.sim.laws import RATE as RATE
from workbench.sim.laws import Laws as Laws
from workbench.sim.laws import Net as Net
from workbench.sim.laws import batch as batch
from workbench.sim.laws import flat as flat
from workbench.sim.laws import laws as laws
from workbench.sim.laws import mse as mse
from workbench.sim.laws import trained as trained
