"""The contract of a view, which is a chart or a text about a run.

A view draws results of `workbench.analysis` or rows of the record. It describes its figure once, then returns
only new data. To add a view, add a file to this folder.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import plotly.graph_objects as go

from workbench.analysis import stands_for
from workbench.record.timeline import Rows, Table

Setter = Callable[[str, Any], Any]  # (path, value) of a knob
Columns = dict[str, Any]  # name -> numpy array of numbers, or list of text
MAX_CURVE_POINTS = 600  # of a curve, if its past is sent


@dataclass
class Patch:
    """The new content of a view since the last call.

    append:  trace number -> columns (x, y, ...) to append to the trace
    replace: trace number -> columns that replace the trace's. Columns x0, x1, rank are boxes in the lane that the
             trace's `meta` names
    layout:  layout keys to set, dotted as plotly takes them ("xaxis.range")
    html:    the complete text of a view without a figure
    facts:   plain values for the page, such as names of boxes
    """

    append: dict[int, Columns] = field(default_factory=dict)
    replace: dict[int, Columns] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    html: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.append or self.replace or self.layout or self.facts or self.html is not None)


class Grid(NamedTuple):
    """A chart's data as a table, for readers and screen readers."""

    head: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    note: str = ""


class View(ABC):
    """A chart or a text. An instance follows one run for one board, from the run's first row.

    name:   short name; the page marks the chart with data-view=name
    title:  heading. about: the chart in words, for readers who cannot see it
    empty:  the text before the first data
    order:  place on the board; width: its share of 12 columns (wide board, narrow board)
    axes:   plotly axis ("x", "x2") -> "step" or "t", for axes that show the marks of changes
    labelled: marks have names; else only numbers
    tools:  "steps" for a chart with a choice of steps, which `ask` handles
    spoken: screen readers announce a change of the text
    quiet:  the page hides the view while it is empty
    tells:  reveals faults and culprits, so a riddle (`run.secret`) hides the view
    most:   the number of ranks drawn in the picture of a large run; None for all
    setter: sets a knob of the live lab; None without a lab and in read-only dashboards
    """

    __family__: ClassVar[bool] = True
    home: ClassVar[str] = "widgets.views"
    name: ClassVar[str]
    title: ClassVar[str]
    about: ClassVar[str]
    empty: ClassVar[str] = ""
    order: ClassVar[int] = 50
    width: ClassVar[tuple[int, int]] = (12, 12)
    axes: ClassVar[dict[str, str]] = {}
    labelled: ClassVar[bool] = False
    tools: ClassVar[str] = ""
    spoken: ClassVar[bool] = False
    quiet: ClassVar[bool] = False
    tells: ClassVar[bool] = False
    most: int | None = None
    setter: Setter | None = None

    def __init__(self) -> None:
        self.cursor = 0

    def figure(self, run: Any) -> go.Figure | None:
        """Returns the figure with empty traces; None if the view is a text."""
        return None

    @abstractmethod
    def update(self, run: Any) -> Patch:
        """Returns the new content since the last call. The first call returns all content."""

    def table(self, run: Any) -> Grid | None:
        """Returns the chart's data table; None if the view is a text or a table."""
        return None

    def ranks(self, run: Any) -> int:
        """Returns how many ranks are drawn."""
        there = ranks_of(run) // stands_for(run.timeline)
        return min(there, self.most or there)

    def ask(self, request: dict[str, Any]) -> None:
        """Handles a reader's request."""

    def fresh(self, table: Table) -> Rows:
        """Returns the new rows of `table` since the last call."""
        rows = table.rows(self.cursor)
        self.cursor += len(rows)
        return rows


def ranks_of(run: Any) -> int:
    """Returns how many ranks the run has had, including later ones."""
    said = int(run.settings.get("ranks", 0) or 0)
    came = [max(detail.get("members") or [0]) + 1 for _, _, detail in run.details("members")]
    said = max([said, *came]) if said else 0
    seen = run.timeline.samples.rows().rank
    return said or (int(seen.max()) + 1 if len(seen) else 1)


def thin_points(columns: Columns, limit: int = MAX_CURVE_POINTS) -> Columns:
    """Returns at most `limit` points: the least and the greatest y of each stretch of x."""
    x, y = np.asarray(columns["x"], float), np.asarray(columns["y"], float)
    if len(x) <= limit:
        return columns
    bins = np.floor((x - x[0]) / max(x[-1] - x[0], 1e-12) * (limit // 2 - 1)).astype(int)
    order = np.lexsort((y, bins))
    edge = np.flatnonzero(np.r_[True, np.diff(bins[order]) != 0])
    keep = np.unique(np.r_[order[edge], order[np.r_[edge[1:] - 1, len(x) - 1]]])
    return {k: [v[i] for i in keep] if isinstance(v, list) else np.asarray(v)[keep] for k, v in columns.items()}


def draw_view(view: View, run: Any) -> go.Figure | None:
    """Returns the figure with its data."""
    figure = view.figure(run)
    patch = view.update(run)
    if figure is None:
        return None
    for number, columns in {**patch.append, **patch.replace}.items():
        if "x0" in columns:
            columns = _outline_boxes(columns, figure.data[number].meta["lane"])
        figure.data[number].update({k: list(v) for k, v in columns.items() if k in ("x", "y", "z", "text")})
    figure.update_layout({k.replace(".", "_"): v for k, v in patch.layout.items()})
    return figure


def _outline_boxes(boxes: Columns, lane: tuple[float, float]) -> Columns:
    x0, x1, rank = (np.asarray(boxes[k], float) for k in ("x0", "x1", "rank"))
    y0, y1, gap = rank + lane[0], rank + lane[1], np.full(len(rank), np.nan)
    return {"x": np.c_[x0, x1, x1, x0, x0, gap].ravel(), "y": np.c_[y0, y0, y1, y1, y0, gap].ravel()}
