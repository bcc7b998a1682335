"""A rank's changes: planned, being made and counted."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from workbench.host.core.planned_event import Planned, PlannedEvent

MAX_UNDONE = 16  # made changes that a rank can undo


class ChangeQueue:
    """One rank's changes, in all ranks' order.

    planned: future changes, by step
    taken:   planned changes to make now
    obeyed:  how many changes were made or refused
    """

    def __init__(self, planned: Iterable[Planned] = (), obeyed: int = 0, taken: Iterable[Planned] = (),
                 made: Sequence[Planned | None] = ()) -> None:  # fmt: skip
        """made: the last changes made or refused; None for an unplanned one"""
        self.planned, self.taken, self.obeyed = [*planned], [*taken], obeyed
        self._made = made

    def count_due(self, step: int) -> int:
        return sum(change.at_step <= step for change in self.planned)

    def take_changes(self, count: int) -> None:
        """Takes the first `count` planned changes to make them now."""
        self.taken, self.planned = self.planned[:count], self.planned[count:]

    def continue_count(self, obeyed: int) -> None:
        """Goes on from the count of all ranks."""
        self.obeyed = obeyed

    def plan_event(self, event: Planned) -> None:
        """Plans an event, behind the changes due by then."""
        self.planned.insert(bisect_right([change.at_step for change in self.planned], event.at_step), event)

    def drop_events(self, kind: type[PlannedEvent]) -> None:
        self.planned = [change for change in self.planned if not isinstance(change, kind)]

    def count_obeyed(self, planned: Planned | None = None) -> None:
        """Counts a change made or refused. planned: the change, if planned"""
        self.obeyed += 1
        self._made = (*self._made, planned)[-MAX_UNDONE:]

    def undo_changes(self, changes: int) -> bool:
        """Makes `changes` the number of made changes. Returns whether this rank had made more.

        If it had made fewer, it skips the difference. If it had made more, it plans the planned ones of these again.
        """
        todo, undone = [*self.taken, *self.planned], self.obeyed - changes
        again = [change for change in list(self._made)[-undone:] if change is not None] if undone > 0 else []
        self.taken, self.planned = [], [*again, *todo[max(0, -undone) :]]
        return undone > 0

    def copy(self) -> ChangeQueue:
        return ChangeQueue(self.planned, self.obeyed, self.taken, self._made)
