"""The dashboard: the charts of a run, with controls if it shows a lab.

    Dashboard(lab)     # controls, Start and Stop, the list of changes, and the charts of the lab's run
    Dashboard(run)     # the same charts of a recorded run
    Dashboard(lab, read_only=True)  # for viewers: without controls, and requests have no effect

One timer updates everything while a page shows it.
"""

from __future__ import annotations

from typing import Any

import ipywidgets
from IPython.display import display

from widgets.charts.board import Board
from widgets.charts.refresh import RefreshTimer
from widgets.controls.controls import Controls
from widgets.controls.members import Members
from widgets.controls.requests import Requests
from widgets.controls.transport import Transport
from widgets.controls.tuner import Tuner
from widgets.controls.what_if import WhatIf
from widgets.export.files import FilesPanel
from widgets.export.keep import KeptPicture
from widgets.export.summary import summary_table
from widgets.page import looks
from widgets.page.side import SidePanel, has_sidecar
from workbench.record.run import Run


class Dashboard(ipywidgets.Box):
    """All charts and controls as one widget. A second display is a second view of the same run.

    shown:     the Lab or the Run that it shows
    read_only: whether it has no controls
    """

    def __init__(self, shown: Any, read_only: bool = False) -> None:
        self.shown, self.read_only = shown, read_only
        recorded = isinstance(shown, Run)
        self.board = Board(
            shown if recorded else shown.run_now, setter=None if recorded or read_only else self._set_knob
        )
        self.side = SidePanel(self)
        self.handles = () if recorded else self._make_handles(shown)
        run_now = (lambda: shown) if recorded else (lambda: shown.run_now)
        self.what_if = WhatIf(run_now)
        self.fold = _fold_panel(self.what_if, "What if? The simulator beside the run")
        self.files = FilesPanel(run_now, self.board.draw_again)
        self.keep = KeptPicture(run_now, once=recorded)
        asked = self.fold, _fold_panel(self.files, "Export, compare")
        frame = ipywidgets.Box(_make_boxes([self.board, *asked], self.handles))
        frame.add_class("twb-frame")
        if recorded:
            frame.add_class("twb-recorded")
        if read_only:
            frame.add_class("twb-read-only")
        super().__init__([frame])
        self.add_class("twb-dashboard")
        self.timer = RefreshTimer(self.board, self.refresh)
        if not recorded or shown.live:
            self.timer.start()
        if not recorded:
            shown.watchers.append(lambda: self.board.watched)

    def _make_handles(self, lab: Any) -> tuple[Any, ...]:
        bar = Transport(lab, read_only=self.read_only, dock=self.dock if has_sidecar() else None)
        if self.read_only:
            return bar, Requests(lab)
        return bar, Controls(lab), Requests(lab), Members(lab), Tuner(lab)

    def _set_knob(self, path: str, value: Any) -> None:
        self.shown.set(path, value)

    @property
    def _title(self) -> str:
        return f"Run {self.shown.name}" if isinstance(self.shown, Run) else f"Lab {self.shown.name}"

    def dock(self, anchor: str = "split-right") -> None:
        """Shows the dashboard in a panel of JupyterLab. A second call opens it again.

        anchor: "split-right", "split-left", "split-top", "split-bottom", "tab-after" or "right" (the side bar)

        Raises KnobError without the package sidecar.
        """
        self.side.open_panel(self._title, anchor)

    def state(self) -> dict[str, Any]:
        """Returns the open, chosen and pinned items as JSON (page/looks.py)."""
        return looks.read_state(self)

    def restore(self, state: dict[str, Any] | str) -> None:
        """Applies a `state()`, also as JSON text. Raises KnobError for an invalid one."""
        looks.restore_state(self, state)

    def refresh(self) -> None:
        for handle in self.handles:
            handle.refresh()
        if self.handles:
            self.board.show(self.shown.run_now)
        self.keep.start_drawing()

    def close(self) -> None:
        """Ends the timer and the widgets. The run goes on."""
        self.timer.stop()
        self.keep.close()
        self.side.close()
        for part in (self.board, self.what_if, self.files, *self.handles):
            part.close()
        super().close()

    def _ipython_display_(self) -> None:
        """Shows the widget and the picture; see [Note: Two outputs] in keep.py."""
        shown = self._repr_mimebundle_()
        data, about = shown if isinstance(shown, tuple) else (shown, {})
        display(data, metadata=about, raw=True)
        self.keep.add_output()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """Adds a line of text and a small table for pages without widgets."""
        shown = super()._repr_mimebundle_(**kwargs)
        bundle = shown[0] if isinstance(shown, tuple) else shown
        run = self.shown if isinstance(self.shown, Run) else self.shown.run_now
        bundle["text/plain"] = repr(self.shown)
        if run is not None:
            bundle["text/html"] = summary_table(run)
        return bundle

    def __repr__(self) -> str:
        return f"Dashboard({self.shown!r})"


def _fold_panel(panel: Any, title: str) -> Any:
    fold = ipywidgets.Accordion([panel], titles=[title], selected_index=None)
    if isinstance(panel, WhatIf):
        fold.observe(lambda change: panel.follow_run() if change["new"] == 0 else None, "selected_index")
    fold.add_class("twb-fold")
    return fold


def _make_boxes(main: list[Any], handles: tuple[Any, ...]) -> list[Any]:
    places = {"twb-main": main}
    if len(handles) == 5:
        transport, controls, requests, members, tuner = handles
        main = [*main, _fold_panel(tuner, "Tuner: settings tried while the ranks train")]
        places = {"twb-top": [transport], "twb-left": [controls, members, requests], "twb-main": main}
    elif handles:
        places = {"twb-top": [handles[0]], "twb-main": [*main, *handles[1:]]}
    boxes = []
    for place, parts in places.items():
        box = ipywidgets.VBox(parts)
        box.add_class(place)
        boxes.append(box)
    return boxes
