"""Converts a run to messages for the live board and the report."""

from __future__ import annotations

import json
import uuid
from html import escape
from typing import Any

from widgets.charts.film import make_film
from widgets.charts.marks import ChangeMark, all_marks
from widgets.charts.wire import MessagePacker
from widgets.views import all_views
from widgets.views._base import Patch, Setter, View
from workbench.settings.describe_error import said

Message = tuple[dict[str, Any], list[bytes]]  # content and binary buffers


class Feed:
    """One run as messages, from its first row."""

    def __init__(self, run: Any, kinds: tuple[type[View], ...] | None = None, setter: Setter | None = None) -> None:
        self.run = run
        self._plays = kinds is None  # a board of selected charts has no player
        self.key = uuid.uuid4().hex  # pages with another key must send "hello"
        self._setter = setter
        self.views = [self._make_view(kind) for kind in (all_views().values() if kinds is None else kinds)]
        self.troubles: list[str] = []
        self._marks: list[ChangeMark] = []
        self._hushed: dict[str, str] = {}  # muted views, and their sentences

    def make_opening(self) -> Message:
        """Returns the charts' specs and the run so far."""
        specs = [_make_spec(view, self.run) for view in self.views]
        content, buffers = self.make_news() or ({"views": {}}, [])
        return {**content, "kind": "open", "run": self.key, "specs": specs, "film": self._make_film()}, buffers

    def _make_film(self) -> dict[str, Any] | None:
        """Returns the data to play the run. None for a live run, and during a riddle."""
        try:
            return None if self.run.secret or not self._plays else make_film(self.run)
        except Exception as error:  # such a record can still be shown
            self.troubles.append(f"The player is unavailable: {said(error)}")
            return None

    def make_news(self) -> Message | None:
        """Returns each view's new rows since the last call, or None."""
        patches, trouble = self._collect_patches()
        marks = all_marks(self.run)
        if not patches and not trouble and marks == self._marks:
            return None
        content, buffers = self.pack_message(patches)
        if trouble:
            content["trouble"] = trouble
        if marks != self._marks:
            self._marks, content["marks"] = marks, [mark._asdict() for mark in marks]
        return content, buffers

    def _collect_patches(self) -> tuple[dict[str, Patch], str]:
        patches, trouble = {}, []
        for view in self.views:
            try:
                if (
                    patch := self._hide_view(view)
                    if view.tells and self.run.secret
                    else self._restore_view(view).update(self.run)
                ):
                    patches[view.name] = patch
            except Exception as error:
                text = f"{view.title} could not be updated: {said(error)}"
                if text not in self.troubles:
                    self.troubles.append(text)
                    trouble.append(text)
        return patches, "; ".join(trouble)

    def _make_view(self, kind: type[View]) -> View:
        view = kind()
        view.setter = self._setter
        return view

    def _hide_view(self, view: View) -> Patch:
        """Returns the riddle's sentence in place of a view, once."""
        said = self._hushed.get(view.name)
        self._hushed[view.name] = self.run.secret
        return Patch() if said == self.run.secret else Patch(html=f'<p class="wb-empty">{escape(self.run.secret)}</p>')

    def _restore_view(self, view: View) -> View:
        """Returns the view. Makes a muted one again, so that it sends all its rows."""
        if self._hushed.pop(view.name, None) is None:
            return view
        at = self.views.index(view)
        self.views[at] = self._make_view(type(view))
        return self.views[at]

    def pack_message(self, patches: dict[str, Patch]) -> Message:
        packing = MessagePacker()
        views = {name: packing.pack_patch(patch) for name, patch in patches.items()}
        content = {"kind": "tick", "run": self.key, "views": views, "epoch": self.run.epoch}
        return content, [packing.joined_buffer]

    def find_view(self, name: str) -> View | None:
        return next((view for view in self.views if view.name == name), None)

    def make_table(self, name: str) -> dict[str, Any]:
        """Returns a view's data table, or {} if it has none or is muted."""
        view = self.find_view(name)
        if view and view.tells and self.run.secret:
            return {}
        grid = view.table(self.run) if view else None
        return {} if grid is None else {"head": grid.head, "rows": grid.rows, "note": grid.note}


def _make_spec(view: View, run: Any) -> dict[str, Any]:
    figure = view.figure(run)
    said = ("name", "title", "about", "empty", "width", "axes", "labelled", "tools", "spoken", "quiet")
    return {
        **{k: getattr(view, k) for k in said},
        "figure": None if figure is None else json.loads(figure.to_json()),
        "table": type(view).table is not View.table,  # a table takes as long as the chart
    }
