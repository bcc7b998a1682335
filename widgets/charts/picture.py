"""Draws a run as a PNG for saved notebooks, GitHub and nbconvert: last steps, loss and changes."""

from __future__ import annotations

import io
import threading
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from widgets.charts import theme
from widgets.charts.marks import ChangeMark, change_marks
from widgets.charts.paint import paint_panel, resolve_colour
from widgets.views._base import View, draw_view, ranks_of
from widgets.views.bytes_sent import BytesSent
from widgets.views.loss import Loss
from widgets.views.ranks import Ranks
from widgets.views.timeline import Timeline
from workbench.analysis import last_steps, stands_for

WIDTH = 10.0  # inches
DPI = (100, 72, 50, 36)  # the first that gives a small file
MAX_BYTES = 300_000  # bytes
MAX_LISTED_CHANGES = 12  # changes listed below the charts
MAX_RANKS = 32  # more would be illegible and take a minute
NUMBER_SHARE = 0.06  # share of an axis that a number takes
_one = threading.Lock()  # matplotlib's text rendering is not thread-safe


def draw_png(run: Any) -> bytes:
    """Returns a run's picture: under 300 kB and up to 1000 px wide."""
    with _one, matplotlib.style.context("default"):  # without the user's dark style or TeX
        figure = paint_run(run)
        for dpi in DPI:
            file = io.BytesIO()
            figure.savefig(file, format="png", dpi=dpi, metadata={"Software": None}, pil_kwargs={"optimize": True})
            if file.tell() < MAX_BYTES:
                break
    return file.getvalue()


def describe_picture(run: Any) -> str:
    """Describes the picture for readers who cannot see it."""
    changes = "; ".join(_name_mark(mark) for mark in change_marks(run)[-MAX_LISTED_CHANGES:])
    shown = "its last steps on each rank, its loss, the parts of a step, its bytes per step"
    return f"{_make_title(run)}. Charts: {shown}. Changes: {changes or 'none'}."


def paint_run(run: Any) -> Figure:
    """Paints the picture."""
    ranks, marks = min(ranks_of(run) // stands_for(run.timeline), MAX_RANKS), change_marks(run)
    tall = 0.75 + min(0.4 * ranks, 6.0)
    below = [_name_mark(mark) for mark in marks[-MAX_LISTED_CHANGES:]]
    if len(marks) > MAX_LISTED_CHANGES:
        below.insert(0, f"the last {MAX_LISTED_CHANGES} of {len(marks)} changes:")
    heights = [tall, 2.4, max(1.9, 0.2 * ranks)]
    foot = 0.12 + 0.2 * len(below)
    high = sum(heights) + 2.9 + foot
    room = ConstrainedLayoutEngine(rect=(0.005, foot / high, 0.99, 1 - foot / high))
    figure = Figure(figsize=(WIDTH, high), facecolor="white", layout=room)
    FigureCanvasAgg(figure)
    figure.suptitle(_make_title(run), fontsize=13, x=0.01, ha="left", fontweight="bold")
    rows = figure.subfigures(3, 1, squeeze=False, height_ratios=[h + 0.75 for h in heights])[:, 0]
    _draw_row(rows[0], run, marks, [(Timeline(), ("x",))])
    _draw_row(rows[1], run, marks, [(Loss(), ("x", "x2"))])
    _draw_row(rows[2], run, marks, [(Ranks(), ("x",)), (BytesSent(), ("x",))])
    figure.text(0.01, 0.06 / figure.get_figheight(), "\n".join(below), fontsize=10, va="bottom", linespacing=1.35)
    return figure


def _draw_row(place: Any, run: Any, marks: list[ChangeMark], views: list[tuple[View, tuple[str, ...]]]) -> None:
    """Draws views next to each other. A view's panels share the y axis."""
    parts = place.subfigures(1, len(views)) if len(views) > 1 else [place]
    for part, (view, panels) in zip(parts, views, strict=True):
        view.most = MAX_RANKS
        chart = draw_view(view, run)
        every = part.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        listed = []
        for axes, panel in zip(every, panels, strict=True):
            axes.tick_params(labelsize=9.5, color=resolve_colour(theme.MUTED))
            listed += paint_panel(axes, chart, panel)
            _draw_marks(axes, marks, view.axes.get(panel))
        part.suptitle(view.title, fontsize=11, x=0.01, ha="left")
        if listed:
            columns = 5 if len(views) == 1 else 2
            part.legend(
                handles=listed, loc="outside lower left", ncols=columns, fontsize=9, frameon=False, handlelength=1.6
            )


def _draw_marks(axes: Axes, marks: list[ChangeMark], column: str | None) -> None:
    if column is None:
        return
    low, high = sorted(axes.get_xlim())
    groups: list[tuple[float, list[int | str]]] = []
    for mark in marks:
        at = getattr(mark, column)
        if not low <= at <= high:
            continue
        axes.axvline(at, color=resolve_colour(theme.INK), linestyle=(0, (1, 2)), linewidth=1.2)
        if groups and at - groups[-1][0] < NUMBER_SHARE * (high - low):
            groups[-1][1].append(mark.number)
        else:
            groups.append((at, [mark.number]))
    for at, numbers in groups:
        text = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        axes.annotate(text, (at, 1), xycoords=("data", "axes fraction"), xytext=(2, -1), textcoords="offset points",
                      fontsize=9.5, va="bottom")  # fmt: skip


def _make_title(run: Any) -> str:
    began = next(iter(run.settings.get("strategy") or {"?": None}))
    ranks, steps = ranks_of(run), last_steps(run.timeline)[1]
    there = ranks // stands_for(run.timeline)
    some = f" (the charts show ranks 0 to {MAX_RANKS - 1})" if there > MAX_RANKS else ""
    some = f" ({there} stand{'s' * (there == 1)} for all)" if there < ranks else some
    return f"Run {run.name}: {ranks} rank{'s' * (ranks != 1)}{some}, {steps} steps, began with {began}, {run.state}"


def _name_mark(mark: ChangeMark) -> str:
    return f"{mark.number}  {mark.label}, from step {mark.step}"
