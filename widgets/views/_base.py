"""The whole contract of a view: one chart or one piece of text about a run.

A view draws what `workbench.analysis` computes or what the record holds; it never computes a statistic.
It says once what its figure looks like and afterwards hands out only what is new. A view is one file in this
folder; nothing else has to be touched for it to appear. Nothing here knows the browser.
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
LIMIT = 600  # points a curve is thinned to when its past is sent


@dataclass
class Patch:
    """What is new in a view since it was last asked.

    append:  trace number -> columns (x, y, ...) to put behind what the trace holds
    replace: trace number -> columns that take the trace's place. Columns x0, x1, rank are boxes in the lane
             that the trace's `meta` names
    layout:  layout keys to set, dotted as plotly takes them ("xaxis.range")
    html:    the whole text of a view without a figure
    facts:   plain values for the page: names of boxes, the step shown, ...
    """

    append: dict[int, Columns] = field(default_factory=dict)
    replace: dict[int, Columns] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)
    html: str | None = None
    facts: dict[str, Any] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.append or self.replace or self.layout or self.facts or self.html is not None)


class Grid(NamedTuple):
    """A data table: the same content as a chart, for reading and for screen readers."""

    head: tuple[str, ...]
    rows: list[tuple[Any, ...]]
    note: str = ""


class View(ABC):
    """One chart or text. An instance follows one run for one board, from the run's first row on.

    name:   short name; the page marks the chart with data-view=name
    title:  heading; about: what the chart shows, in a sentence for those who cannot see it
    empty:  what will appear here, shown until there is something to draw
    order:  place on the board; width: columns it takes of twelve (wide board, narrow board)
    axes:   plotly axis ("x", "x2") -> "step" or "t": where the marks of changes are drawn
    labelled: marks are named; else they only have their number
    tools:  "steps" for a chart of some steps: follow, hold still, choose the step (answered by `ask`)
    spoken: a screen reader says when the text changes
    quiet:  not on the page while there is nothing to draw
    tells:  says what is wrong and who is to blame; silent while the run is a riddle (`run.secret`)
    most:   only the first so many ranks are drawn (the picture of a run of many); None for all
    setter: sets a knob of the lab that trains; None where there is none, or where one may only look
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
        """The figure with its traces empty, or None for a view that is text."""
        return None

    @abstractmethod
    def update(self, run: Any) -> Patch:
        """What is new since the last call (everything, at the first)."""

    def table(self, run: Any) -> Grid | None:
        """The data table beside the chart; None where the view is a text or a table itself."""
        return None

    def ranks(self, run: Any) -> int:
        """How many ranks are drawn."""
        there = ranks_of(run) // stands_for(run.timeline)
        return min(there, self.most or there)

    def ask(self, request: dict[str, Any]) -> None:
        """What the reader asked this view for (another window, say)."""

    def fresh(self, table: Table) -> Rows:
        """The rows of `table` that came since this was last called."""
        rows = table.rows(self.cursor)
        self.cursor += len(rows)
        return rows


def ranks_of(run: Any) -> int:
    """How many ranks the run has had: what its settings say, or the record, and those who came later."""
    said = int(run.settings.get("ranks", 0) or 0)
    came = [max(detail.get("members") or [0]) + 1 for _, _, detail in run.details("members")]
    said = max([said, *came]) if said else 0
    seen = run.timeline.samples.rows().rank
    return said or (int(seen.max()) + 1 if len(seen) else 1)


def thin(columns: Columns, limit: int = LIMIT) -> Columns:
    """At most `limit` points, keeping the least and the greatest y of each stretch of x; order is kept."""
    x, y = np.asarray(columns["x"], float), np.asarray(columns["y"], float)
    if len(x) <= limit:
        return columns
    bins = np.floor((x - x[0]) / max(x[-1] - x[0], 1e-12) * (limit // 2 - 1)).astype(int)
    order = np.lexsort((y, bins))
    edge = np.flatnonzero(np.r_[True, np.diff(bins[order]) != 0])
    keep = np.unique(np.r_[order[edge], order[np.r_[edge[1:] - 1, len(x) - 1]]])
    return {k: [v[i] for i in keep] if isinstance(v, list) else np.asarray(v)[keep] for k, v in columns.items()}


def drawn(view: View, run: Any) -> go.Figure | None:
    """The view's figure with its data in it, without a browser: for a look in Python and for tests."""
    figure = view.figure(run)
    patch = view.update(run)
    if figure is None:
        return None
    for number, columns in {**patch.append, **patch.replace}.items():
        if "x0" in columns:
            columns = _outlines(columns, figure.data[number].meta["lane"])
        figure.data[number].update({k: list(v) for k, v in columns.items() if k in ("x", "y", "z", "text")})
    figure.update_layout({k.replace(".", "_"): v for k, v in patch.layout.items()})
    return figure


def _outlines(boxes: Columns, lane: tuple[float, float]) -> Columns:
    x0, x1, rank = (np.asarray(boxes[k], float) for k in ("x0", "x1", "rank"))
    y0, y1, gap = rank + lane[0], rank + lane[1], np.full(len(rank), np.nan)
    return {"x": np.c_[x0, x1, x1, x0, x0, gap].ravel(), "y": np.c_[y0, y0, y1, y1, y0, gap].ravel()}
