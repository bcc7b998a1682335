"""Shows a dashboard in a panel of JupyterLab with jupyter-widgets' sidecar."""

from __future__ import annotations

import importlib.util
from typing import Any

from workbench.settings import KnobError, short

ANCHORS = ("split-right", "split-left", "split-top", "split-bottom", "tab-after", "right")


def has_sidecar() -> bool:
    """Whether sidecar is installed."""
    return importlib.util.find_spec("sidecar") is not None


class SidePanel:
    """The panel of one dashboard."""

    def __init__(self, dashboard: Any) -> None:
        self._dashboard = dashboard
        self._panel: Any = None

    def open_panel(self, title: str, anchor: str) -> None:
        """Raises KnobError."""
        if anchor not in ANCHORS:
            raise KnobError(f"anchor={short(anchor)}: must be one of {', '.join(ANCHORS)}")
        if not has_sidecar():
            raise KnobError("dock: the package sidecar is missing; run pip install 'training-workbench[dock]' and "
                            "restart JupyterLab")  # fmt: skip
        from sidecar import Sidecar

        self.close()
        shown = self._dashboard._repr_mimebundle_()
        data, about = shown if isinstance(shown, tuple) else (shown, {})
        self._panel = Sidecar(title=title, anchor=anchor)
        self._panel.outputs = ({"output_type": "display_data", "data": data, "metadata": about},)

    def close(self) -> None:
        if self._panel is not None:
            self._panel.close()
            self._panel = None
