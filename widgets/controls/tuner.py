"""The tuner panel: the trials of `lab.tuning`, with a row and a bar each."""

from __future__ import annotations

import threading
from html import escape
from typing import Any

import ipywidgets

from widgets.charts import theme
from workbench.settings import KnobError

HINT = (
    "<b>Tune</b> tries buckets, compressors, strategies and their periods during training. The simulator orders the "
    "trials. The tuner rejects settings that harm the loss. <code>lab.tune({...})</code> tries your own settings."
)
BAR_WIDTH = 240  # pixels of the longest bar


class Tuner(ipywidgets.VBox):
    """Buttons and the trials of a lab's last search."""

    def __init__(self, lab: Any) -> None:
        self.lab = lab
        self.begin = ipywidgets.Button(description="Tune", tooltip="try settings in the live run; keep the best")
        self.pause = ipywidgets.Button(description="Pause", tooltip="begin no new trial; training continues")
        self.stop = ipywidgets.Button(description="Stop", tooltip="end the search; keep the best so far")
        self.said = ipywidgets.HTML(f"<p>{HINT}</p>")
        self.rows = ipywidgets.VBox()
        self._seen: Any = None
        self._failed = ""
        buttons = ipywidgets.HBox([self.begin, self.pause, self.stop], layout=ipywidgets.Layout(flex_flow="row wrap"))
        super().__init__([buttons, self.said, self.rows])
        self.add_class("twb-tuner")
        self.begin.on_click(lambda _: self._run_request(self.lab.tune))
        self.pause.on_click(lambda _: self._run_request(self._toggle_pause))
        self.stop.on_click(lambda _: self._run_request(self._current_search.stop))
        self.refresh()

    @property
    def _current_search(self) -> Any:
        return getattr(self.lab, "tuning", None)

    def _run_request(self, asked: Any, *args: Any) -> None:
        """Runs a request on a thread, because it may wait for ranks."""

        def work() -> None:
            self._failed = ""
            try:
                asked(*args)
            except (KnobError, RuntimeError) as error:
                self._failed = str(error)
            self.refresh()

        threading.Thread(target=work, name="tuner's request", daemon=True).start()

    def _toggle_pause(self) -> None:
        tuning = self._current_search
        (tuning.resume if tuning.state == "paused" or self.pause.description == "Go on" else tuning.pause)()
        self.pause.description = "Pause" if self.pause.description == "Go on" else "Go on"

    def refresh(self) -> None:
        tuning, live = self._current_search, bool(self.lab.live)
        searching = tuning is not None and tuning.live
        trials = list(tuning.trials) if tuning is not None else []
        seen = (live, searching, tuning and (tuning.state, tuning.said), trials, self._failed)
        if seen == self._seen:
            return
        self._seen = seen
        self.begin.disabled = not live or searching
        self.pause.disabled = self.stop.disabled = not searching
        if not searching:
            self.pause.description = "Pause"
        said = f"<p>{HINT}</p>" if tuning is None else f"<p><b>{escape(tuning.state)}</b>: {escape(tuning.said)}</p>"
        if self._failed:
            said += f'<p class="twb-error">{escape(self._failed)}</p>'
        if tuning is not None and tuning.left_out:
            said += f"<p>Not tried: {len(tuning.left_out)} settings that the simulator finds far slower.</p>"
        self.said.value = said
        old = self.rows.children
        self.rows.children = tuple(self._make_row(n, trial, trials) for n, trial in enumerate(trials, start=1))
        for row in old:
            row.close()

    def _make_row(self, number: int, trial: Any, trials: list[Any]) -> Any:
        use = ipywidgets.Button(
            description="Use", tooltip=f"apply the settings of trial {number} and end the search",
            layout=ipywidgets.Layout(width="84px", flex="0 0 auto"),
            disabled=trial.seconds is None or not self.lab.live,
        )  # fmt: skip
        use.on_click(lambda _: self._run_request(self._current_search.use, number))
        best = self._current_search.best is trial
        text = ipywidgets.HTML(
            draw_trial(number, trial, trials, best), layout=ipywidgets.Layout(flex="1 1 auto", width="0")
        )
        return ipywidgets.HBox([use, text], layout=ipywidgets.Layout(align_items="center"))


def draw_trial(number: int, trial: Any, trials: list[Any], best: bool) -> str:
    """Returns a trial as text with a bar of its seconds and their interval."""
    longest = max((max(t.seconds or 0.0, t.predicted or 0.0) for t in trials), default=0.0) or 1.0
    setting, took, predicted, steps, loss, verdict = trial.cells
    wide = BAR_WIDTH * (trial.seconds or 0.0) / longest
    parts = [f'<rect x="0" y="3" width="{wide:.1f}" height="10" fill="{theme.GREEN if best else theme.SKY}"/>']
    if trial.seconds is not None and trial.high > trial.low:
        low, high = (min(BAR_WIDTH * max(x, 0.0) / longest, BAR_WIDTH) for x in (trial.low, trial.high))
        parts.append(f'<path d="M{low:.1f} 8H{high:.1f}M{low:.1f} 4V12M{high:.1f} 4V12" stroke="#000" fill="none"/>')
    if trial.predicted is not None:
        at = BAR_WIDTH * trial.predicted / longest
        parts.append(f'<path d="M{at:.1f} 0V16" stroke="{theme.VERMILLION}" stroke-width="2" stroke-dasharray="3 2"/>')
    svg = f'<svg width="{BAR_WIDTH + 2}" height="16" role="img" aria-label="{escape(took)}">{"".join(parts)}</svg>'
    about = [took and f"{took} per step", predicted and f"simulated {predicted}", steps and f"{steps} steps",
             loss and f"loss {loss} of its trend"]  # fmt: skip
    mark = " (the best so far)" if best else ""
    return (f'<div style="line-height: 1.35; white-space: normal">{number}. <b>{escape(setting)}</b>: {escape(verdict)}'
            f'{mark}<br>{svg} {escape("; ".join(filter(None, about)))}</div>')  # fmt: skip
