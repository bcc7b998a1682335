"""Keep: the picture that stays in a notebook beside a dashboard, once its run has ended.

[Note: Two outputs] A cell that shows a dashboard has two outputs: the widget, and after it this picture. Where the
widget lives, look.css hides what follows it; where it does not (GitHub, nbconvert, a notebook opened without its
kernel) the picture is there. In one output both could not be: a page prefers the widget even if its kernel is gone.
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

from workbench.settings.said import said

SOON = "A picture of the run's charts stays here once the run has ended."
WIDTH = 1000  # px that a page gives the picture, however dense it is


class Keep:
    """One picture per dashboard, in every cell that shows it; drawn once for each run, when it has ended.

    run: what tells the run that is shown, or None
    once: it is always the same run, so that nothing is waited for once its picture is there
    """

    def __init__(self, run: Callable[[], Any], once: bool = False) -> None:
        self._run, self._once = run, once
        self._leave: Callable[[], Any] = lambda: None  # waits for no cell's end any more
        self._id = uuid.uuid4().hex
        self._drawn: Any = None  # the run whose picture is there
        self._bundle: tuple[dict[str, Any], dict[str, Any]] = {"text/plain": SOON}, {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self.shown = False
        self.trouble = ""

    def show(self) -> None:
        """Gives the cell its second output; does nothing where there is no kernel (IPython in a terminal)."""
        shell = get_ipython()
        if shell is None or not hasattr(shell, "kernel"):
            return
        if not self.shown:
            self.shown = True
            # nbclient takes an output only from a cell that still runs: what ends within a cell is drawn before its end
            hook = _cell_ended(ref(self))
            shell.events.register("post_run_cell", hook)
            self._leave = finalize(self, shell.events.unregister, "post_run_cell", hook)
        display(self._bundle[0], metadata=self._bundle[1], raw=True, display_id=self._id)

    def refresh(self) -> None:
        """Begins to draw if a run has ended whose picture is not there; returns at once."""
        if self.due and (self._thread is None or not self._thread.is_alive()):
            self._thread = threading.Thread(target=self.draw, name="picture of a run", daemon=True)
            self._thread.start()

    @property
    def due(self) -> bool:
        """A run has ended, and a page waits for its picture."""
        run = self._run()
        return self.shown and run is not None and not run.live and run is not self._drawn

    def draw(self) -> None:
        """Draws what is due and puts it into every cell that shows the dashboard."""
        with self._lock:
            if not self.due:
                return
            self._drawn = run = self._run()
            try:
                self._bundle = bundle(run)
            except Exception as error:  # a picture that fails must not take the dashboard or the cell with it
                self.trouble = f"The picture could not be drawn: {said(error)}"
                self._bundle = {"text/plain": self.trouble}, {}
            update_display(self._bundle[0], metadata=self._bundle[1], raw=True, display_id=self._id)
            if self._once:
                self._leave()

    def close(self) -> None:
        """No cell's end is waited for any more; the picture stays."""
        self.shown = False
        self._leave()


def _cell_ended(kept: ref[Keep]) -> Callable[..., None]:
    """What the kernel calls at the end of a cell. The kernel holds it, so it must not hold the run."""

    def ended(_: Any = None) -> None:
        if (keep := kept()) is not None:
            keep.draw()

    return ended


def bundle(run: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The picture of a run as a page takes it: its data and their metadata."""
    from widgets.charts.picture import (  # matplotlib takes a second to load: only once there is something to draw
        about,
        png,
    )

    said = about(run)
    data = {"image/png": base64.b64encode(png(run)).decode(), "text/plain": said}
    return data, {"image/png": {"width": WIDTH, "alt": said}}
