"""ByGroup: one algorithm for one kind of group, and another for the remaining groups."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.fabric.algorithms._base import Algorithm, Among, FabricView
from workbench.fabric.algorithms.native import Native
from workbench.fabric.algorithms.ring import Ring
from workbench.settings import knob

if TYPE_CHECKING:
    from torch import Tensor

    from workbench.rank import Group


@dataclass(frozen=True, kw_only=True)
class ByGroup(Algorithm):
    """Groups of one mesh dimension sum by one algorithm, the remaining groups by another.

    A strategy with groups names its dimensions, such as "within" and "between" of HierarchicalLocalSGD. The run's mark
    "mesh" lists them. On a mesh of one dimension and for a collective of all ranks, `others` applies.

    When to use it: if groups inside a site need another algorithm than groups that leave it.
    """

    group: str = knob("within", doc="the dimension of the groups in question")
    there: Algorithm = knob(Ring(), doc="how these groups sum")
    others: Algorithm = knob(Native(), doc="how all other groups sum")

    def refuses(self) -> str | None:
        return self.there.refuses() or self.others.refuses()

    def chosen(self, fabric: FabricView, group: Group | None, ranks: Sequence[int], nbytes: int) -> Algorithm:
        named = group is not None and group.dims == (self.group,)
        return (self.there if named else self.others).chosen(fabric, group, ranks, nbytes)

    def seconds(self, fabric: FabricView, ranks: Sequence[int], nbytes: float, gamma: float = 0.0) -> float:
        return self.others.seconds(fabric, ranks, nbytes, gamma)

    async def all_reduce(self, rank: Among, x: Tensor) -> None:
        raise NotImplementedError("call the algorithm that `chosen` returns")
