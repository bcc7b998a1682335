"""What if: other ranks and another wire on the simulator, beside the run that it was calibrated from.

The sliders ask, a thread of its own simulates, a line says what came out, and the simulated timeline is drawn by
the same view as the live one. Simulating costs nothing until the panel is opened.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from widgets.board import Board
from widgets.views.timeline import Timeline
from workbench.analysis.words import duration

UNLIMITED = 5.0  # the slider's upper end, log10 of Mbit/s: as fast as the machine goes
HINT = "Move a slider, or press <b>Simulate</b>: the simulator is calibrated from the run above, then asked."
WIDE = {"description_width": "130px"}


class WhatIf(ipywidgets.VBox):
    """Sliders for ranks and link, the answer in words, and the timeline that the simulator expects.

    present: gives the run that is asked about, or None
    """

    def __init__(self, present: Callable[[], Any]) -> None:
        self.present = present
        row = ipywidgets.Layout(width="min(100%, 560px)")
        same = {"continuous_update": False, "style": WIDE, "layout": row}
        self.ranks = ipywidgets.IntSlider(4, 1, 64, description="ranks", **same)
        self.bandwidth = ipywidgets.FloatSlider(UNLIMITED, min=0.0, max=UNLIMITED, step=0.05, readout=False,
                                                description="bandwidth", **same)  # fmt: skip
        self.speed = ipywidgets.Label()
        self.latency = ipywidgets.FloatSlider(0.0, min=0.0, max=50.0, step=0.1, description="latency (ms)", **same)
        self.button = ipywidgets.Button(description="Simulate", tooltip="calibrate from the run and simulate")
        self.said = ipywidgets.HTML(f"<p>{HINT}</p>")
        self.board: Board | None = None
        self.working: threading.Thread | None = None
        self._again = False
        self._following = True  # the sliders stand where the run does, until one is moved
        self._setting = False
        self._above = [  # the board, which comes and goes below
            ipywidgets.HBox([self.ranks, self.button], layout=ipywidgets.Layout(flex_flow="row wrap")),
            ipywidgets.HBox([self.bandwidth, self.speed]), self.latency, self.said,
        ]  # fmt: skip
        super().__init__(self._above)
        self.add_class("twb-whatif")
        self.button.on_click(lambda _: self.ask())
        for slider in (self.ranks, self.bandwidth, self.latency):
            slider.observe(self._moved, "value")
        self._name_speed()

    def follow(self) -> None:
        """Sets the sliders to where the run stands; called when the panel opens."""
        run = self.present()
        if run is None or not self._following:
            return
        link, self._setting = _link(run), True
        try:
            self.ranks.value = int(run.settings.get("ranks", 4))
            self.bandwidth.value = slide(link["bandwidth"])
            self.latency.value = float(link["latency"])
        finally:
            self._setting = False
        self._name_speed()

    def _moved(self, _: Any) -> None:
        self._name_speed()
        if not self._setting:
            self._following = False
            self.ask()

    def _name_speed(self) -> None:
        self.speed.value = speed(mbits(self.bandwidth.value))

    def settings(self) -> dict[str, Any]:
        """What the sliders ask, as knobs and their values."""
        return {
            "ranks": self.ranks.value, "link.bandwidth": mbits(self.bandwidth.value), "link.latency": self.latency.value
        }  # fmt: skip

    def ask(self) -> None:
        """Simulates on a thread of its own; asked again meanwhile, once more with what the sliders then say."""
        if self.working is not None and self.working.is_alive():
            self._again = True
            return
        self.working = threading.Thread(target=self._work, name="what if", daemon=True)
        self.working.start()

    def _work(self) -> None:
        while True:
            self._again = False
            self.button.disabled = True
            try:
                self._answer()
            finally:
                self.button.disabled = False
            if not self._again:
                return

    def _answer(self) -> None:
        run = self.present()
        if run is None:
            self.said.value = "<p>There is no run yet: press <b>Start</b>, then ask again.</p>"
            return
        self.said.value, settings = "<p>simulating…</p>", self.settings()
        try:
            found = run.what_if(settings)
        except Exception as error:
            self.said.value = f"<p>It cannot be simulated: {escape(str(error))}</p>"
            return
        self.said.value = words(found, settings)
        self._draw(found.run)

    def _draw(self, run: Any) -> None:
        old, self.board = self.board, Board(run, views=(Timeline,))
        self.children = (*self._above, self.board)
        if old is not None:
            old.close()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        super().close()


def words(found: Any, settings: dict[str, Any]) -> str:
    """What came out, for the page."""
    more = "more" if found.error > 0 else "less"
    off = "the same" if abs(found.error) < 0.005 else f"{abs(found.error):.0%} {more} than measured"
    ratio = found.other / found.same
    much = "as long" if 0.995 < ratio < 1.005 else f"{ratio:.3g} × as long"
    latency = f", {settings['link.latency']:g} ms" if settings["link.latency"] else ""
    ranks = f"{settings['ranks']} rank{'s' * (settings['ranks'] != 1)}"
    return (
        f"<p>A step as it is: <b>{duration(found.measured)}</b> measured, "
        f"<b>{duration(found.same)}</b> simulated ({off}).<br>"
        f"What if {ranks}, {escape(speed(settings['link.bandwidth']))}{latency}: "
        f"<b>{duration(found.other)}</b> per step, "
        f"{much}; {found.sent / 1e6:.3g} MB sent per step and rank. Its timeline:</p>"
    )


def mbits(position: float) -> float:
    """Mbit/s at a position of the slider; 0 (unlimited) at its upper end."""
    return 0.0 if position >= UNLIMITED else float(f"{10**position:.3g}")


def slide(bandwidth: float) -> float:
    """The slider's position for so many Mbit/s."""
    return min(max(math.log10(bandwidth), 0.0), UNLIMITED) if bandwidth else UNLIMITED


def speed(bandwidth: float) -> str:
    """A bandwidth in words."""
    return f"{bandwidth:g} Mbit/s" if bandwidth else "unlimited: as fast as this machine goes"


def _link(run: Any) -> dict[str, float]:
    """The link as it is now: as the run began, with every change since."""
    fabric = run.settings.get("fabric", {}).get("Fabric", {})
    link = {"bandwidth": 0.0, "latency": 0.0, **fabric.get("link", {}).get("Link", {})}
    for change in run.changes:
        name = change.path.rsplit(".", 1)[-1]
        if change.path.startswith("fabric.link.") and name in link:
            link[name] = float(change.value)
    return link
