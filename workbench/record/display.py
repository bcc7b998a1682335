"""Notebook representations of a Lab or a Run, from entry points of `workbench.display`."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from workbench.settings import KnobError


def face(name: str, thing: Any, include: Any = None, exclude: Any = None) -> Any:
    """Returns a mimebundle of `thing` from the entry point `name`, or plain text."""
    plain = {"text/plain": repr(thing)}
    for entry in entry_points(group="workbench.display", name=name):
        try:
            shown = entry.load()(thing)
        except ImportError:
            return plain
        if hasattr(shown, "_repr_mimebundle_"):
            return shown._repr_mimebundle_(include=include, exclude=exclude)
        return shown or plain
    return plain


def show(name: str, thing: Any) -> None:
    """Displays `thing` through its entry point. Raises NotImplementedError without one."""
    for entry in entry_points(group="workbench.display", name=name):
        try:
            shown = entry.load()(thing)
        except ImportError:
            break
        if hasattr(shown, "_ipython_display_"):
            return shown._ipython_display_()
    raise NotImplementedError  # IPython then tries the next representation


def dashboard(name: str, thing: Any, read_only: bool) -> Any:
    """Returns the widget for `thing` from the entry point `name`. Raises KnobError without one."""
    for entry in entry_points(group="workbench.display", name=name):
        try:
            return entry.load()(thing, read_only)
        except ImportError as error:
            raise KnobError(f"dashboard: cannot be shown here ({error}); pip install training-workbench") from None
    raise KnobError("dashboard: no installed package draws one; pip install training-workbench")
