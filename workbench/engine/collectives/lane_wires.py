"""The wires of one lane by group of ranks, opened at first use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from workbench.engine.collectives.shaping import LinkShaper
from workbench.engine.collectives.wire import Wire
from workbench.rank import Group


class GroupWires(NamedTuple):
    """One group's wires and shaper on one lane. In a group of one rank, `wire` and `aside` are None.

    aside: the wire for tensors in the host's memory
    met:   the file in which its ranks met, or None
    """

    wire: Wire | None
    shaper: LinkShaper
    aside: Wire | None
    met: Path | None = None


class LaneWires:
    """One lane's lines by group. Only its thread uses them, or another thread while the lane is idle."""

    def __init__(self, whole: GroupWires | None, open: Callable[[Group | None], GroupWires]) -> None:
        self._lines: dict[Group | None, GroupWires] = {} if whole is None else {None: whole}
        self._open = open
        self._past: list[Path] = []  # meeting files of the groups before the last change

    def for_group(self, group: Group | None) -> GroupWires:
        """None: all ranks"""
        line = self._lines.get(group)
        if line is None:
            line = self._lines[group] = self._open(group)
        return line

    def forget_groups(self, generation: int | None = None) -> list[Wire]:
        """Forgets the groups of other generations. Returns their wires, which the caller closes."""
        old = [group for group in self._lines if group is not None and group.generation != generation]
        lines = [self._lines.pop(group) for group in old]
        _close_tables(lines)
        for file in self._past:  # not sooner: another rank may just have opened its end
            file.unlink(missing_ok=True)
        self._past = [line.met for line in lines if line.met is not None]
        return list({id(wire): wire for line in lines for wire in (line.wire, line.aside) if wire is not None}.values())

    def close(self) -> None:
        """The session closes the wires."""
        _close_tables(self._lines.values())


def _close_tables(lines: Iterable[GroupWires]) -> None:
    for line in lines:
        if line.shaper.table is not None:
            line.shaper.table.close()
