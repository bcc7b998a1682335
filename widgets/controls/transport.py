"""The transport bar of a lab: the buttons from Start to Checkpoint and the status line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import anywidget
import traitlets

from widgets.controls.controls import shown_experiment
from widgets.controls.progress import RunProgress, describe_trouble, list_activities, status_line
from widgets.static import read_static
from workbench.analysis.export.export import as_python
from workbench.settings import KnobError
from workbench.settings.describe_error import said

MAY = {
    "starting": ("stop",),
    "idle": ("start",),
    "running": ("pause", "stop", "checkpoint"),
    "paused": ("resume", "step", "stop", "checkpoint"),
    "stopping": ("stop",),
    "failed": ("start",),
    "closed": (),
}
WHY = {
    "start": "train the experiment of the controls",
    "pause": "pause all ranks after this step",
    "resume": "continue from here",
    "step": "run one step, then pause again; pause first",
    "stop": "end this run at the next step; press again: end now",
    "checkpoint": "save all state during training; a run can resume from it",
}
SHOW_ALL = ("copy", "start")  # these buttons would reveal a riddle's faults
FRESH = """from workbench import Lab

lab = Lab(ranks={ranks})
lab.run()  # nothing has run yet; after Start this shows the run and its changes
lab
"""


class Transport(anywidget.AnyWidget):
    """The bar at the top of the dashboard.

    read_only: whether the bar ignores all buttons except docking
    dock:      shows the dashboard next to the notebook, or None
    """

    _esm = read_static("hearing.js", "transport.js")
    _css = read_static("look.css")
    state = traitlets.Unicode("idle").tag(sync=True)
    line = traitlets.Unicode("").tag(sync=True)
    may = traitlets.Dict().tag(sync=True)
    why = traitlets.Dict(WHY).tag(sync=True)
    error = traitlets.Dict().tag(sync=True)
    works = traitlets.List(traitlets.Dict()).tag(sync=True)
    docks = traitlets.Bool(False).tag(sync=True)
    read_only = traitlets.Bool(False).tag(sync=True)

    def __init__(self, lab: Any, *, read_only: bool = False, dock: Callable[[], Any] | None = None) -> None:
        super().__init__(read_only=read_only, docks=dock is not None)
        self.lab, self._dock = lab, dock
        self.progress = RunProgress()
        self._refused = ""
        self.on_msg(lambda _, message, __: self.handle_button(message["do"]))
        self.refresh()

    def refresh(self) -> None:
        run, state = self.lab.run_now, self.lab.state
        self.progress.follow_run(run)
        early = state == "starting" and not self.lab.live  # a run may be requested before engines are up
        with self.hold_trait_notifications():
            self.state = state
            self.may = {} if self.read_only else dict.fromkeys(("start",) if early else MAY[state], True)
            self.works = list_activities(run, state, self.progress)
            self.line = status_line(state, self.progress, self.lab.experiment.ranks, self._describe_detail(state))
            self.error = self._describe_error(run)

    def _describe_detail(self, state: str) -> str:
        if state == "starting":
            return str(self.lab.progress)
        if state != "running" or not self.progress.is_stuck:
            return ""
        return str(self.lab.run_now.holdup)

    def _describe_error(self, run: Any) -> dict[str, Any]:
        if self._refused:
            return {"title": "Refused:", "text": self._refused, "more": ""}
        if found := describe_trouble(run):
            return found
        notes = self.lab.notes
        title = "The run failed." if self.lab.state == "failed" else "Attention:"
        held = {"stacks": True} if run is not None and run.holdup else {}
        return {"title": title, "text": notes[-1], "more": "", **held} if notes else {}

    def handle_button(self, what: str) -> None:
        self._refused = ""
        if what == "dock":
            return self._open_dock()
        if self.read_only:
            return
        if what in SHOW_ALL and shown_experiment(self.lab) is not self.lab.experiment:
            self._refused = "A riddle is running: answer it or call riddle.give_up() first."
            return self.refresh()
        if what == "copy":
            self.send({"python": run_code(self.lab)})
            return self.refresh()
        if what == "stacks":  # a hanging rank may take seconds
            threading.Thread(target=self._show_stacks, name="dashboard request", daemon=True).start()
            return self.refresh()
        verbs = {"start": self.lab.run, "pause": self.lab.pause, "resume": self.lab.resume, "step": self.lab.step,
                 "checkpoint": self.lab.checkpoint}  # fmt: skip
        try:
            verbs.get(what, self.lab.stop)()
        except Exception as error:  # shown to the person who pressed the button
            self._refused = said(error)
        self.refresh()

    def _open_dock(self) -> None:
        try:
            if self._dock is not None:
                self._dock()
        except KnobError as error:
            self._refused = str(error)
        self.refresh()

    def _show_stacks(self) -> None:
        try:
            self.send({"stacks": str(self.lab.stacks())})
        except Exception as error:
            self._refused = said(error)
            self.refresh()


def run_code(lab: Any) -> str:
    """Returns the lab's run as code, or else the experiment's code."""
    run = lab.run_now
    return as_python(run) if run is not None else FRESH.format(ranks=lab.experiment.ranks)
