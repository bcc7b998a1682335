"""Exports the run to files or compares it with a recorded run, on its own thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from workbench.analysis.export.files import FORMS
from workbench.run import Run
from workbench.settings.describe_error import said

WIDE = {"description_width": "130px"}


class FilesPanel(ipywidgets.VBox):
    """Two lines: export the run and compare it.

    present: returns the shown run, or None
    renew:   draws the board again with another run next to it
    """

    def __init__(self, present: Callable[[], Any], renew: Callable[[], None]) -> None:
        self.present, self._renew = present, renew
        wide = ipywidgets.Layout(width="min(100% - 4px, 560px)")
        self.form = ipywidgets.Dropdown(options=list(FORMS), description="export to", style=WIDE)
        self.out = ipywidgets.Text(placeholder="file or folder; NAME-FORM if empty", description="as", style=WIDE,
                                   layout=wide)  # fmt: skip
        self.export = ipywidgets.Button(description="Export", tooltip="write the run on the kernel's machine")
        self.other = ipywidgets.Text(placeholder="a run directory, such as runs/first", description="compare with",
                                     style=WIDE, layout=wide)  # fmt: skip
        self.compare = ipywidgets.Button(description="Compare", tooltip="overlay both runs and list what differs")
        self.said = ipywidgets.HTML("<p>Paths are on the kernel's machine.</p>")
        self.working: threading.Thread | None = None
        row = ipywidgets.Layout(flex_flow="row wrap")
        super().__init__([
            ipywidgets.HBox([self.form, self.out, self.export], layout=row),
            ipywidgets.HBox([self.other, self.compare], layout=row), self.said,
        ])  # fmt: skip
        self.add_class("twb-files")
        self.export.on_click(lambda _: self._start_work(self._export_run))
        self.compare.on_click(lambda _: self._start_work(self._compare_run))

    def _start_work(self, what: Callable[[Any], str]) -> None:
        if self.working is not None and self.working.is_alive():
            return
        self.working = threading.Thread(target=self._do_work, args=(what,), name="files of a run", daemon=True)
        self.working.start()

    def _do_work(self, what: Callable[[Any], str]) -> None:
        run = self.present()
        if run is None:
            self.said.value = "<p>There is no run yet.</p>"
            return
        self.export.disabled = self.compare.disabled = True
        self.said.value = "<p>working…</p>"
        try:
            self.said.value = f"<p>{escape(what(run))}</p>"
        except Exception as error:  # shown to the person who pressed the button
            self.said.value = f"<p>{escape(said(error))}</p>"
        finally:
            self.export.disabled = self.compare.disabled = False

    def _export_run(self, run: Any) -> str:
        return f"Wrote {run.export(self.form.value, self.out.value or None)}."

    def _compare_run(self, run: Any) -> str:
        run.beside = Run.open(self.other.value) if self.other.value else None
        self._renew()
        return f"{run.beside.name} is beside this run, above." if run.beside else "No run is beside this one."
