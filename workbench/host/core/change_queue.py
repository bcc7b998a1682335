"""The changes of one rank: the planned ones, the ones that it makes now, and how many it has made."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from workbench.host.core.planned_event import Planned, PlannedEvent

MAX_UNDONE = 16  # made changes that a rank can still undo


class ChangeQueue:
    """One rank's changes, in the order in which all ranks make them.

    planned: future changes, in the order of their steps
    taken:   the planned changes to make now
    obeyed:  the number of changes made or refused so far
    """

    def __init__(self, planned: Iterable[Planned] = (), obeyed: int = 0, taken: Iterable[Planned] = (),
                 made: Sequence[Planned | None] = ()) -> None:  # fmt: skip
        """made: the last changes that were made or refused; None for one that was not planned"""
        self.planned, self.taken, self.obeyed = [*planned], [*taken], obeyed
        self._made = made

    def count_due(self, step: int) -> int:
        """Returns the number of planned changes that are due at `step`."""
        return sum(change.at_step <= step for change in self.planned)

    def take_changes(self, count: int) -> None:
        """Takes the first `count` planned changes, to make them now."""
        self.taken, self.planned = self.planned[:count], self.planned[count:]

    def continue_count(self, obeyed: int) -> None:
        """Goes on from the changes that all ranks have made."""
        self.obeyed = obeyed

    def plan_event(self, event: Planned) -> None:
        """Plans an event, behind the changes that are due by then."""
        self.planned.insert(bisect_right([change.at_step for change in self.planned], event.at_step), event)

    def drop_events(self, kind: type[PlannedEvent]) -> None:
        self.planned = [change for change in self.planned if not isinstance(change, kind)]

    def count_obeyed(self, planned: Planned | None = None) -> None:
        """Counts a change that was made or refused. planned: the change, if it was a planned one"""
        self.obeyed += 1
        self._made = (*self._made, planned)[-MAX_UNDONE:]

    def undo_changes(self, changes: int) -> bool:
        """Makes `changes` the number of made changes. Returns whether this rank had made more.

        If other ranks have made more than this one, it skips them. If this one has made more, it plans the planned ones
        among the rest again.
        """
        todo, undone = [*self.taken, *self.planned], self.obeyed - changes
        again = [change for change in list(self._made)[-undone:] if change is not None] if undone > 0 else []
        self.taken, self.planned = [], [*again, *todo[max(0, -undone) :]]
        return undone > 0

    def copy(self) -> ChangeQueue:
        return ChangeQueue(self.planned, self.obeyed, self.taken, self._made)
