"""The entry points of the group `workbench.display`: a Lab or a Run at the end of a cell."""

from __future__ import annotations

from typing import Any

from widgets.page.dashboard import Dashboard


def lab(shown: Any, read_only: bool = False) -> Dashboard:
    """Returns a lab's dashboard, always the same one."""
    return _keep_dashboard(shown, read_only)


def run(shown: Any, read_only: bool = False) -> Dashboard:
    """Returns a run's dashboard."""
    return _keep_dashboard(shown, read_only)


def _keep_dashboard(shown: Any, read_only: bool) -> Dashboard:
    """Keeps 2 dashboards with their owner: one with controls, one read-only."""
    name = "_watched" if read_only else "_dashboard"
    found: Dashboard | None = vars(shown).get(name)
    if found is None:
        found = Dashboard(shown, read_only)
        setattr(shown, name, found)
    return found
