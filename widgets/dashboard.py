"""Dashboard: the charts of a run and, for a lab, the handles beside them.

    Dashboard(lab)     # controls, Start and Stop, the list of changes, and the charts of the lab's run
    Dashboard(run)     # the same charts of a recorded run

One timer brings everything up to date, and only while a page shows it. It sets traits and nothing else.
"""

from __future__ import annotations

from typing import Any

import ipywidgets
from IPython.display import display

from widgets.board import Board
from widgets.controls import Controls
from widgets.keep import Keep
from widgets.members import Members
from widgets.refresh import Refresh
from widgets.requests import Requests
from widgets.summary import table
from widgets.transport import Transport
from widgets.what_if import WhatIf
from workbench.record.run import Run


class Dashboard(ipywidgets.Box):
    """All there is to see and set, as one widget. Showing it twice gives two views of the same run.

    shown: the Lab or the Run that it shows
    """

    def __init__(self, shown: Any) -> None:
        self.shown = shown
        recorded = isinstance(shown, Run)
        self.board = Board(shown if recorded else shown.run_now)
        kinds = () if recorded else (Transport, Controls, Requests, Members)
        self.handles: tuple[Any, ...] = tuple(kind(shown) for kind in kinds)
        run_now = (lambda: shown) if recorded else (lambda: shown.run_now)
        self.what_if = WhatIf(run_now)
        self.keep = Keep(run_now, once=recorded)
        frame = ipywidgets.Box(_boxes([self.board, _folded(self.what_if)], self.handles))
        frame.add_class("twb-frame")
        if recorded:
            frame.add_class("twb-recorded")
        super().__init__([frame])
        self.add_class("twb-dashboard")
        self.timer = Refresh(self.board, self.refresh)
        if not recorded or shown.live:
            self.timer.start()
        if not recorded:
            shown.watchers.append(lambda: self.board.watched)

    def refresh(self) -> None:
        """Brings the handles up to date and shows the lab's present run."""
        for handle in self.handles:
            handle.refresh()
        if self.handles:
            self.board.show(self.shown.run_now)
        self.keep.refresh()

    def close(self) -> None:
        """Ends the timer and the widgets; the run goes on."""
        self.timer.stop()
        self.keep.close()
        for part in (self.board, self.what_if, *self.handles):
            part.close()
        super().close()

    def _ipython_display_(self) -> None:
        """Shows the widget and, after it, what stays of the run; see [Note: Two outputs] in keep.py."""
        shown = self._repr_mimebundle_()
        data, about = shown if isinstance(shown, tuple) else (shown, {})
        display(data, metadata=about, raw=True)
        self.keep.show()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        """The live widget, and beside it a line and a small table for where widgets cannot be shown."""
        shown = super()._repr_mimebundle_(**kwargs)
        bundle = shown[0] if isinstance(shown, tuple) else shown
        run = self.shown if isinstance(self.shown, Run) else self.shown.run_now
        bundle["text/plain"] = repr(self.shown)
        if run is not None:
            bundle["text/html"] = table(run)
        return bundle

    def __repr__(self) -> str:
        return f"Dashboard({self.shown!r})"


def _folded(panel: WhatIf) -> Any:
    """The panel under a title that opens it."""
    fold = ipywidgets.Accordion([panel], titles=["What if? The simulator beside the run"], selected_index=None)
    fold.observe(lambda change: panel.follow() if change["new"] == 0 else None, "selected_index")
    fold.add_class("twb-fold")
    return fold


def _boxes(main: list[Any], handles: tuple[Any, ...]) -> list[Any]:
    places = {"twb-main": main}
    if handles:
        transport, controls, requests, members = handles
        places = {"twb-top": [transport], "twb-left": [controls, members, requests], "twb-main": main}
    boxes = []
    for place, parts in places.items():
        box = ipywidgets.VBox(parts)
        box.add_class(place)
        boxes.append(box)
    return boxes
