"""The verbs that an algorithm may use on its rank, and the values that they exchange."""

from workbench.rank.awaitables import Backward as Backward
from workbench.rank.awaitables import Forward as Forward
from workbench.rank.awaitables import Handle as Handle
from workbench.rank.awaitables import Op as Op
from workbench.rank.awaitables import collective as collective
from workbench.rank.awaitables import message_name as message_name
from workbench.rank.bucket import MOMENTUM as MOMENTUM
from workbench.rank.bucket import Bucket as Bucket
from workbench.rank.bucket import Memory as Memory
from workbench.rank.bucket import Part as Part
from workbench.rank.dtypes import COMPLEX as COMPLEX
from workbench.rank.dtypes import FLOATS as FLOATS
from workbench.rank.dtypes import as_real as as_real
from workbench.rank.dtypes import can_average as can_average
from workbench.rank.errors import StrategyError as StrategyError
from workbench.rank.mesh import Group as Group
from workbench.rank.mesh import Mesh as Mesh
from workbench.rank.neighbour_sites import sites as sites
from workbench.rank.outline import each as each
from workbench.rank.outline import outlined as outlined
from workbench.rank.outline import sizes_of as sizes_of
from workbench.rank.outline import values_of as values_of
from workbench.rank.rank import REDUCTIONS as REDUCTIONS
from workbench.rank.rank import Rank as Rank
from workbench.rank.units import Cut as Cut
from workbench.rank.units import Entries as Entries
from workbench.rank.units import Units as Units

__all__ = [
    "COMPLEX", "FLOATS", "MOMENTUM", "REDUCTIONS", "Backward", "Bucket", "Cut", "Entries", "Forward",
    "Group", "Handle", "Memory", "Mesh", "Op", "Part", "Rank", "StrategyError", "Units", "as_real", "can_average",
    "collective", "each", "message_name", "outlined", "sites", "sizes_of", "values_of",
]  # fmt: skip
