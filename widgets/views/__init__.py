"""The charts and texts of the dashboard, one file each, found by looking in this folder."""

from __future__ import annotations

from widgets.views._base import View
from workbench.knobs import members


def all_views() -> dict[str, type[View]]:
    """Every view by class name, in their order on the board."""
    return dict(sorted(members(View).items(), key=lambda item: item[1].order))
