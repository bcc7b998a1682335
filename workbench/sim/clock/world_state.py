"""The state of a simulated world that collectives and messages use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from workbench.rank import Group
from workbench.sim.clock.clock import VirtualClock
from workbench.sim.clock.network_ports import Ports
from workbench.sim.clock.record import Record
from workbench.sim.costs.chance_replay import ChanceReplay
from workbench.sim.costs.costs import Costs


class WorldState:
    """The clock, the ports and the record of `size` ranks.

    first: simulated ranks, 0: all; missed: whether ranks know of a crash
    """

    def __init__(
        self,
        size: int,
        costs: Costs | None,
        seed: int,
        replay: ChanceReplay | None,
        first: int,
        members: Sequence[int],
        now: float,
    ) -> None:
        self.size, self.costs, self.seed, self.replay = size, costs, seed, replay
        self.first = first or size
        self.members = members or range(self.first)
        self.clock = VirtualClock(now)
        self.record = Record(self.members)
        self.ports = Ports(size, costs, seed)
        self.missed = False
        self._hosts: list[Any] = []
        self._here: dict[Group, tuple[int, ...]] = {}

    @property
    def hosts(self) -> list[Any]:
        return self._hosts

    def list_simulated_ranks(self, group: Group | None) -> Sequence[int]:
        if group is None:
            return range(self.first)
        found = self._here.get(group)
        if found is None:
            found = self._here[group] = tuple(r for r in group.ranks if r < self.first)
        return found

    def find_position(self, group: Group, rank: int) -> int:
        """Returns a rank's position among the simulated ranks of a group."""
        return group.index(rank) if self.first == self.size else self.list_simulated_ranks(group).index(rank)
