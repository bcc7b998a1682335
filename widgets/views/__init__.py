"""The charts and texts of the dashboard. Each file in this folder has one."""

from __future__ import annotations

from typing import Any

from widgets.views._base import View
from workbench.settings import members


def all_views() -> dict[str, type[View]]:
    """Returns every view by class name, in the order of the board."""
    root: type[Any] = View  # mypy accepts no abstract class as type[View]
    return dict(sorted(members(root).items(), key=lambda item: item[1].order))
