"""What a Lab or a Run looks like at the end of a cell: the entry points of the group `workbench.display`."""

from __future__ import annotations

from typing import Any

from widgets.page.dashboard import Dashboard


def lab(shown: Any, read_only: bool = False) -> Dashboard:
    """The dashboard of a lab: the same one each time, so that showing it again is another view of it."""
    return _kept(shown, read_only)


def run(shown: Any, read_only: bool = False) -> Dashboard:
    """The dashboard of a run."""
    return _kept(shown, read_only)


def _kept(shown: Any, read_only: bool) -> Dashboard:
    """Kept with its owner, so that it ends with it; one to steer by, and one to look at."""
    name = "_watched" if read_only else "_dashboard"
    found: Dashboard | None = vars(shown).get(name)
    if found is None:
        found = Dashboard(shown, read_only)
        setattr(shown, name, found)
    return found
