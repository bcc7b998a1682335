"""The face that a notebook shows of a Lab or a Run: asked from whoever offers one, plain text without it."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any


def face(name: str, thing: Any, include: Any = None, exclude: Any = None) -> Any:
    """A mimebundle of `thing` from the entry point `name` of the group workbench.display."""
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
    """Shows `thing` in a notebook as whoever offers a face does; where nobody does, the notebook does it itself."""
    for entry in entry_points(group="workbench.display", name=name):
        try:
            shown = entry.load()(thing)
        except ImportError:
            break
        if hasattr(shown, "_ipython_display_"):
            return shown._ipython_display_()
    raise NotImplementedError  # what IPython takes for "ask the next representation"
