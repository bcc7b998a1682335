"""The What-if panel: simulates other ranks and links on its own thread. The present run calibrates it.

A closed panel costs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from html import escape
from typing import Any

import ipywidgets

from widgets.charts.board import Board
from widgets.controls.asking import (
    UNLIMITED,
    describe_bandwidth,
    describe_result,
    draw_curve,
    list_assumptions,
    parse_settings,
    slider_bandwidth,
    slider_position,
)
from widgets.views.timeline import Timeline
from workbench.experiment import Experiment
from workbench.fabric.networks import NETWORKS
from workbench.settings import members, resolve

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
SAME, OWN = "as it is", "the link below"
CHOICES = ("strategy", "compressor", "partition")
HINT = "Move a slider or press <b>Simulate</b>. The run above calibrates the simulator."
WIDE = {"description_width": "130px"}


class WhatIf(ipywidgets.VBox):
    """Sliders for ranks and link, the answer in words and the predicted timeline.

    present: returns the run to start from, or None
    """

    def __init__(self, present: Callable[[], Any]) -> None:
        self.present = present
        row = ipywidgets.Layout(width="min(100% - 4px, 560px)")
        plain = {"style": WIDE, "layout": row}
        same = {"continuous_update": False, **plain}
        self.ranks = ipywidgets.SelectionSlider(options=RANKS, value=4, description="ranks", **same)
        self.network = ipywidgets.Dropdown(options=[OWN, *NETWORKS], description="network", **plain)
        self.kinds = {
            name: ipywidgets.Dropdown(options=[SAME, *sorted(_list_members(name))], description=name, **plain)
            for name in CHOICES
        }  # fmt: skip
        self.bucket = ipywidgets.Text("", placeholder="as it is", description="bucket (MB)", **same)
        self.site = ipywidgets.Text("", placeholder="as it is", description="ranks per site", **same)
        self.more = ipywidgets.Text(
            "", placeholder="strategy.every=16, partition.stages=4", description="other knobs", **same
        )
        # the speed in words is right of the slider, or below
        beside = ipywidgets.Layout(flex="1 1 300px", width="auto", max_width="560px")
        self.bandwidth = ipywidgets.FloatSlider(UNLIMITED, min=0.0, max=UNLIMITED, step=0.05, readout=False,
                                                description="bandwidth", **{**same, "layout": beside})  # fmt: skip
        self.speed = ipywidgets.Label(layout=ipywidgets.Layout(margin="2px 2px 2px 12px"))
        self.latency = ipywidgets.FloatSlider(0.0, min=0.0, max=50.0, step=0.1, description="latency (ms)", **same)
        self.button = ipywidgets.Button(description="Simulate", tooltip="calibrate from the run and simulate")
        self.over = ipywidgets.Button(description="Plot over ranks", tooltip="plot a step's time over ranks, to 4,096")
        self.said = ipywidgets.HTML(f"<p>{HINT}</p>")
        self.curve = ipywidgets.HTML()
        self.assumed = ipywidgets.HTML()
        self.board: Board | None = None
        self.working: threading.Thread | None = None
        self._again = self._over = False
        self._following = True
        self._setting = False
        wrap = ipywidgets.Layout(flex_flow="row wrap")
        below = ipywidgets.HBox([self.curve, self.assumed], layout=wrap)
        for part, width in ((self.curve, "1 1 320px"), (self.assumed, "1 1 300px")):
            part.layout = ipywidgets.Layout(flex=width, width="auto", min_width="0")
        self._above = [  # the board is added and removed below these
            ipywidgets.HBox([self.ranks, self.button, self.over], layout=wrap), self.network,
            ipywidgets.HBox([self.bandwidth, self.speed], layout=wrap), self.latency, *self.kinds.values(),
            self.bucket, self.site, self.more, self.said, below,
        ]  # fmt: skip
        super().__init__(self._above)
        self.add_class("twb-whatif")
        self.button.on_click(lambda _: self.start_simulation())
        self.over.on_click(lambda _: self.start_simulation(over=True))
        asked = (self.ranks, self.network, self.bandwidth, self.latency, self.bucket, self.site, self.more)
        for part in (*asked, *self.kinds.values()):
            part.observe(self._handle_move, "value")
        self._name_speed()

    def follow_run(self) -> None:
        run = self.present()
        if run is None or not self._following:
            return
        link = _present_link(run)
        self._set_sliders(int(run.settings.get("ranks", 4)), slider_position(link["bandwidth"]), float(link["latency"]))

    def set_fixed(self, ranks: float, bandwidth: float, latency: float) -> None:
        self._following = False
        self._set_sliders(ranks, bandwidth, latency)

    def _set_sliders(self, ranks: float, bandwidth: float, latency: float) -> None:
        self._setting = True
        try:
            self.ranks.options = sorted({*RANKS, int(ranks)})
            self.ranks.value, self.bandwidth.value, self.latency.value = int(ranks), bandwidth, latency
        finally:
            self._setting = False
        self._name_speed()

    def _handle_move(self, _: Any) -> None:
        self._name_speed()
        if not self._setting:
            self._following = False
            self.start_simulation()

    def _name_speed(self) -> None:
        self.bandwidth.disabled = self.latency.disabled = self.network.value != OWN
        self.speed.value = describe_bandwidth(slider_bandwidth(self.bandwidth.value))

    def chosen_settings(self) -> dict[str, Any]:
        """Raises KnobError for unreadable input."""
        found: dict[str, Any] = {"ranks": self.ranks.value}
        if self.network.value == OWN:
            found |= {"link.bandwidth": slider_bandwidth(self.bandwidth.value), "link.latency": self.latency.value}
        found |= {name: kind.value for name, kind in self.kinds.items() if kind.value != SAME}
        for path, text in (("bucket_mb", self.bucket), ("fabric.site", self.site)):
            found |= parse_settings(f"{path}={text.value}") if text.value.strip() else {}
        return found | parse_settings(self.more.value)

    def start_simulation(self, over: bool = False) -> None:
        """Simulates on its own thread. Later calls cause one more simulation, with the last values.

        over: with the curve over ranks
        """
        self._over = self._over or over
        if self.working is not None and self.working.is_alive():
            self._again = True
            return
        self.working = threading.Thread(target=self._simulate_all, name="what if", daemon=True)
        self.working.start()

    def _simulate_all(self) -> None:
        while True:
            self._again = False
            self.button.disabled = self.over.disabled = True
            try:
                self._simulate_once()
            finally:
                self.button.disabled = self.over.disabled = False
            if not self._again:
                return

    def _simulate_once(self) -> None:
        run = self.present()
        if run is None:
            self.said.value = "<p>There is no run yet. Press <b>Start</b>, then simulate again.</p>"
            return
        self.said.value = "<p>simulating…</p>"
        over, self._over = self._over, False
        try:
            settings = self.chosen_settings()
            network = "" if self.network.value == OWN else self.network.value
            found = run.what_if(settings, **({"network": network} if network else {}))
            self.said.value, self.assumed.value = (
                describe_result(found, settings, network),
                list_assumptions(found.assumptions),
            )
            if over:
                rows = run.scaling({k: v for k, v in settings.items() if k != "ranks"}, network)
                self.curve.value, self.assumed.value = draw_curve(rows), list_assumptions(rows.assumptions)
            else:
                self.curve.value = ""
        except Exception as error:
            self.said.value = f"<p>Simulation refused: {escape(str(error))}</p>"
            return
        self._draw_board(found.run)

    def _draw_board(self, run: Any) -> None:
        old, self.board = self.board, Board(run, views=(Timeline,))
        self.children = (*self._above, self.board)
        if old is not None:
            old.close()

    def close(self) -> None:
        if self.board is not None:
            self.board.close()
        super().close()


def _list_members(name: str) -> dict[str, Any]:
    found: dict[str, Any] = members(resolve(Experiment(), name)[1].kind)
    return found


def _present_link(run: Any) -> dict[str, float]:
    fabric = run.settings.get("fabric", {}).get("Fabric", {})
    link = {"bandwidth": 0.0, "latency": 0.0, **fabric.get("link", {}).get("Link", {})}
    for path, value in [one for change in run.changes for one in change.settings.items()]:
        name = path.rsplit(".", 1)[-1]
        if path.startswith("fabric.link.") and name in link:
            link[name] = float(value)
    return link
