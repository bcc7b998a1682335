"""What a Lab or a Run looks like at the end of a cell: the entry points of the group `workbench.display`."""

from __future__ import annotations

from typing import Any

from widgets.dashboard import Dashboard


def lab(shown: Any) -> Dashboard:
    """The dashboard of a lab: the same one each time, so that showing it again is another view of it."""
    return _kept(shown)


def run(shown: Any) -> Dashboard:
    """The dashboard of a run."""
    return _kept(shown)


def _kept(shown: Any) -> Dashboard:
    """Kept with its owner, so that it ends with it."""
    found = vars(shown).get("_dashboard")
    if found is None:
        found = shown._dashboard = Dashboard(shown)
    return found
