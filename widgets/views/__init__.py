"""The charts and texts of the dashboard, one file each, found by looking in this folder."""

from __future__ import annotations

from typing import Any

from widgets.views._base import View
from workbench.settings import members


def all_views() -> dict[str, type[View]]:
    """Every view by class name, in their order on the board."""
    root: type[Any] = View  # of an abstract class no more may be said than this, though none is made here
    return dict(sorted(members(root).items(), key=lambda item: item[1].order))
