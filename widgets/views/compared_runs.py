"""Two runs overlaid: loss over steps, loss over seconds and step times."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import plotly.graph_objects as go

from widgets.charts import theme
from widgets.views._base import Columns, Grid, Patch, View, thin_points
from workbench.analysis import loss_curve, step_times

PANELS = ("x", "x2", "x3")
LINES = ({"color": theme.INK, "width": 2}, {"color": theme.VERMILLION, "width": 2, "dash": "dash"})
REDRAW_GROWTH = 1.02  # growth of a live run before another drawing


class ComparedRuns(View):
    """This run and `run.beside`. Both start at their first steps."""

    name: ClassVar[str] = "beside"
    title: ClassVar[str] = "Two runs, overlaid"
    about: ClassVar[str] = (
        "Two runs from their first steps on: this run as a solid line, the run beside it as a dashed line. On the "
        "left, training loss against steps. In the middle, training loss against seconds. On the right, step time "
        "against steps. Losses are means over ranks."
    )
    order: ClassVar[int] = 4
    quiet: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._drawn = -1.0  # rows at the last drawing

    def figure(self, run: Any) -> go.Figure:
        figure = go.Figure(layout=_make_layout())
        for panel in PANELS:
            for run_of, line in zip((run, run.beside), LINES, strict=True):
                name = "" if run_of is None else run_of.name
                figure.add_trace(go.Scatter(
                    x=[], y=[], xaxis=panel, yaxis=panel.replace("x", "y"), mode="lines", line=line, name=name,
                    showlegend=panel == "x", hovertemplate=f"{name}: %{{y:.4~g}} at %{{x:.6~g}}<extra></extra>",
                ))  # fmt: skip
        return figure

    def update(self, run: Any) -> Patch:
        rows = len(run.timeline.samples)
        if run.beside is None or rows < REDRAW_GROWTH * self._drawn or rows == self._drawn:
            return Patch()
        self._drawn = rows if run.live else np.inf
        found: dict[int, Columns] = {}
        for number, one in enumerate((run, run.beside)):
            for panel, points in enumerate(loss_curves(one)):
                found[2 * panel + number] = thin_points(points)
        return Patch(replace=found)

    def table(self, run: Any) -> Grid:
        """Returns each run's loss at 10 evenly spread steps."""
        out: list[tuple[Any, ...]] = []
        for one in (run, run.beside) if run.beside is not None else ():
            c = loss_curve(one.timeline)
            for i in np.unique(np.linspace(0, len(c.loss) - 1, 10).astype(int)) if len(c.loss) else ():
                out.append((one.name, int(c.steps[i]), f"{c.seconds[i]:.2f}", f"{c.loss[i]:.4f}"))
        return Grid(("run", "steps", "seconds", "training loss"), out, "Training loss, mean over ranks")


def loss_curves(run: Any) -> tuple[Columns, Columns, Columns]:
    """Returns loss by steps, loss by seconds and each step's milliseconds. All are means over ranks."""
    c, times = loss_curve(run.timeline), step_times(run.timeline)
    made = ~np.isnan(times.seconds).any(axis=1) if times.seconds.size else np.zeros(len(times.steps), bool)
    steps = times.steps[made] - (times.steps[0] if len(times.steps) else 0) + 1.0
    mean = times.seconds[made].mean(axis=1) if made.any() else np.empty(0)
    return {"x": c.steps, "y": c.loss}, {"x": c.seconds, "y": c.loss}, {"x": steps, "y": 1e3 * mean}


def _make_layout() -> go.Layout:
    x = {"nticks": 6, "rangemode": "tozero"}
    return theme.make_layout(
        260,
        xaxis=theme.make_axis("steps made", domain=[0, 0.3], **x),
        xaxis2=theme.make_axis("seconds since its first step", domain=[0.33, 0.63], anchor="y2", **x),
        xaxis3=theme.make_axis("steps made", domain=[0.7, 1], anchor="y3", **x),
        yaxis=theme.make_axis("training loss", nticks=6),
        yaxis2=theme.make_axis("", matches="y", anchor="x2", showticklabels=False, nticks=6),
        yaxis3=theme.make_axis("step time (ms)", anchor="x3", nticks=6, rangemode="tozero"),
        margin={"l": 60, "r": 10, "t": 8, "b": 46},
    )
