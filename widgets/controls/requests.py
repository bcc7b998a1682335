"""The list of changes requested from a lab, with their results."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import anywidget
import traitlets

from widgets.charts.marks import label_change
from widgets.static import read_static
from workbench.settings import to_plain

BEFORE = "before the run"  # id of such a change
MAX_LISTED_CHANGES = 40  # newest changes to list; the record has all


class Requests(anywidget.AnyWidget):
    """The list of changes, newest first. `refresh()` sends it only if it changed."""

    _esm = read_static("hearing.js", "requests.js")
    _css = read_static("look.css")
    items = traitlets.List(traitlets.Dict()).tag(sync=True)

    def __init__(self, lab: Any) -> None:
        super().__init__()
        self.lab = lab
        self.refresh()

    def refresh(self) -> None:
        self.items = list_items(self.lab.changes)


def list_items(changes: Iterable[Any]) -> list[dict[str, str]]:
    """Returns changes as lines for the page, newest first."""
    return [_make_item(t) for t in list(changes)[: -MAX_LISTED_CHANGES - 1 : -1]]


def _make_item(change: Any) -> dict[str, str]:
    if change.refused is not None:
        state, said = "refused", f"refused: {change.refused}"
    elif change.applied_at is None:
        state, said = "waiting", "requested, pending until the next step"
    else:
        early = change.id == BEFORE
        state, said = "applied", "set before the run" if early else f"applied at step {change.applied_at}"
    made = getattr(change, "change", None)
    if made is not None and made.by:
        said += f"; decided by {made.by}: {made.reason}"
    asked = getattr(change, "requested_at", None)
    when = time.strftime("%H:%M:%S", time.localtime(asked)) if asked else ""
    text = label_change({"path": change.path, "value": to_plain(change.value)})
    return {"path": change.path, "text": text, "state": state, "said": said, "when": when}
