"""Keeps a picture of the charts in the notebook after the run ends.

[Note: Two outputs] A cell with a dashboard has 2 outputs: the widget and this picture. While the widget works, look.css
hides the picture. Without a kernel (GitHub, nbconvert, a reopened notebook) the picture is visible. One output cannot
hold both, because a page prefers even a dead widget.
"""

from __future__ import annotations

import base64
import threading
import uuid
from collections.abc import Callable
from typing import Any
from weakref import finalize, ref

from IPython import get_ipython
from IPython.display import display, update_display

from workbench.settings.describe_error import said

SOON = "A picture of the run's charts appears here when the run ends."
WIDTH = 1000  # px on a page, at any resolution


class KeptPicture:
    """One picture per dashboard, in every cell that shows it. It is drawn once, at the run's end.

    run:  returns the shown run, or None
    once: whether the run never changes, so that the picture removes its hook
    """

    def __init__(self, run: Callable[[], Any], once: bool = False) -> None:
        self._run, self._once = run, once
        self._leave: Callable[[], Any] = lambda: None
        self._id = uuid.uuid4().hex
        self._drawn: Any = None  # the run in the picture
        self._bundle: tuple[dict[str, Any], dict[str, Any]] = {"text/plain": SOON}, {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.shown = False
        self.trouble = ""

    def add_output(self) -> None:
        """Adds the second output. Does nothing without a kernel (IPython in a terminal)."""
        shell = get_ipython()
        if shell is None or not hasattr(shell, "kernel"):
            return
        if not self.shown:
            self.shown = True
            # nbclient accepts an output only while its cell runs, so the hook draws before the cell's end
            hook = _cell_ended(ref(self))
            shell.events.register("post_run_cell", hook)
            self._leave = finalize(self, shell.events.unregister, "post_run_cell", hook)
        display(self._bundle[0], metadata=self._bundle[1], raw=True, display_id=self._id)

    def start_drawing(self) -> None:
        if self.is_due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.draw_picture, name="picture of a run", daemon=True)
            self._thread.start()

    @property
    def is_due(self) -> bool:
        run = self._run()
        return self.shown and run is not None and not run.live and run is not self._drawn

    def draw_picture(self) -> None:
        with self._lock:
            if not self.is_due:
                return
            self._drawn = run = self._run()
            try:
                self._bundle = make_bundle(run)
            except Exception as error:  # must not break the dashboard or the cell
                self.trouble = f"The picture could not be drawn: {said(error)}"
                self._bundle = {"text/plain": self.trouble}, {}
            update_display(self._bundle[0], metadata=self._bundle[1], raw=True, display_id=self._id)
            if self._once:
                self._leave()

    def close(self) -> None:
        self.shown = False
        self._leave()


def _cell_ended(kept: ref[KeptPicture]) -> Callable[..., None]:
    """Returns a hook for the end of a cell. It must not hold the run, because the kernel holds the hook."""

    def ended(_: Any = None) -> None:
        if (keep := kept()) is not None:
            keep.draw_picture()

    return ended


def make_bundle(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a run's picture as a mimebundle with metadata."""
    from widgets.charts.picture import (  # matplotlib takes a second to load
        describe_picture,
        draw_png,
    )

    said = describe_picture(run)
    data = {"image/png": base64.b64encode(draw_png(run)).decode(), "text/plain": said}
    return data, {"image/png": {"width": WIDTH, "alt": said}}
