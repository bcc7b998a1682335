"""Tests the picture of a run: it shows the live charts' content, stays small, and is drawn once per ended run."""

from __future__ import annotations

import gc
import io
import time
import weakref
from typing import Any

import matplotlib.image
import matplotlib.style
import numpy as np
import pytest
from matplotlib.colors import to_rgb

from tests.unit.synthetic import run as recorded
from widgets.charts import picture, theme
from widgets.charts.paint import resolve_colour
from widgets.export import keep
from widgets.views._base import draw_view
from widgets.views.loss import Loss
from widgets.views.timeline import Timeline
from workbench import Experiment, Pipeline
from workbench.run import Run
from workbench.sim import simulate
from workbench.tasks import ByteGPT


def pixels(png: bytes) -> np.ndarray:
    return matplotlib.image.imread(io.BytesIO(png))[:, :, :3]


@pytest.mark.parametrize("ranks", [1, 4, 64])
def test_a_picture_is_small_and_has_the_colours_of_the_live_charts(ranks: int) -> None:
    run = recorded(steps=150, ranks=ranks)
    png = picture.draw_png(run)
    assert png.startswith(b"\x89PNG") and 20_000 < len(png) < 300_000
    found = pixels(png)
    assert found.shape[1] == 1000 or ranks > 4
    for shown in (theme.BLUE, theme.SKY, theme.GREEN, theme.INK):
        assert (np.abs(found - to_rgb(resolve_colour(shown))).max(axis=2) < 0.02).sum() > 40, shown


def test_the_picture_shows_the_content_of_the_views() -> None:
    run = recorded(steps=150, ranks=2)
    axes = [a for part in picture.paint_run(run).subfigs for a in part.get_axes()]
    timeline, by_step, by_time = axes[:3]
    boxes = sum(len(c.get_paths()) for c in timeline.collections)
    assert boxes == sum(len(t.x) // 6 for t in draw_view(Timeline(), run).data if t.x)
    held = [line for line in by_step.lines if line.get_label().startswith("held-out")]
    samples = run.samples
    assert list(held[0].get_ydata()) == list(samples.value[samples.name == "held_out"])
    assert [a.get_xlabel() for a in (timeline, by_step, by_time)] == [
        "time since the run began (s)", "step", "time since the run began (s)"
    ]  # fmt: skip
    marks = [float(line.get_xdata()[0]) for line in by_step.lines if len(set(line.get_xdata())) == 1]
    assert marks == [c.at_step for c in run.changes]
    assert len(by_step.lines) - len(marks) == len(
        [t for t in draw_view(Loss(), run).data if t.xaxis != "x2" and len(t.x)]
    )


def test_the_picture_of_a_pipeline_shows_its_bubbles() -> None:
    e = Experiment(task=ByteGPT(width=32, context=16), partition=Pipeline(), ranks=2, steps=4, pace=20.0)
    run = simulate(e.checked())
    bubbles = next(trace for trace in draw_view(Timeline(), run).data if trace.name.startswith("bubble"))
    assert len(bubbles.x) > 0 and picture.draw_png(run).startswith(b"\x89PNG")


def test_a_run_without_rows_has_a_picture_too() -> None:
    assert len(picture.draw_png(Run({"ranks": 2}))) > 5_000


def test_many_changes_are_listed_to_the_last_dozen() -> None:
    run = recorded(steps=150, changes=tuple((at, "strategy.every", at) for at in range(100, 130)))
    said = picture.describe_picture(run)
    assert "18  every = 117" not in said and "19  every = 118" in said and "30  every = 129" in said
    assert len(picture.draw_png(run)) < 300_000


@pytest.mark.parametrize("style", [{"text.usetex": True}, "dark_background"])
def test_a_picture_does_not_follow_the_readers_own_style(style: Any) -> None:
    run = recorded(steps=20, ranks=2)
    plain = picture.draw_png(run)
    with matplotlib.style.context(style):
        assert picture.draw_png(run) == plain


def test_the_picture_of_many_ranks_is_small_quick_and_names_the_shown_ranks() -> None:
    run = recorded(steps=6, ranks=512)
    began = time.process_time()
    png = picture.draw_png(run)
    assert time.process_time() - began < 25 and len(png) < 300_000
    assert pixels(png).shape[0] < 2500
    assert "512 ranks (the charts show ranks 0 to 31)" in picture.describe_picture(run)


def test_drawn_ranks_still_wait_for_a_rank_that_is_not_drawn() -> None:
    run, part = recorded(steps=20, ranks=5), Timeline()
    part.most = 2
    for some, all_ in zip(draw_view(part, run).data, draw_view(Timeline(), run).data, strict=True):
        here = np.reshape(all_.x or [], (-1, 6))[np.reshape(all_.y or [], (-1, 6))[:, 0] < 1.5]
        assert np.array_equal(np.reshape(some.x or [], (-1, 6)), here, equal_nan=True), some.name


class Shell:
    """A stub of a notebook's kernel that keeps displayed outputs by display id."""

    kernel = True

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events, self.hooks, self.shown = self, [], []
        monkeypatch.setattr(keep, "get_ipython", lambda: self)
        for name in ("display", "update_display"):
            monkeypatch.setattr(keep, name, lambda data, name=name, **rest: self.shown.append((name, data, rest)))

    def register(self, _: str, hook: Any) -> None:
        self.hooks.append(hook)

    def unregister(self, _: str, hook: Any) -> None:
        self.hooks.remove(hook)

    def end_cell(self) -> None:
        for hook in list(self.hooks):
            hook()


def test_the_picture_appears_once_at_the_end_of_the_cell_in_which_the_run_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shell, run = Shell(monkeypatch), recorded(steps=40)
    run.live = True
    kept = keep.KeptPicture(lambda: run)
    kept.add_output()
    shell.end_cell()
    assert [name for name, *_ in shell.shown] == ["display"] and "image/png" not in shell.shown[0][1]
    run.live = False
    shell.end_cell()
    shell.end_cell()
    kept.add_output()
    names = [(name, "image/png" in data) for name, data, _ in shell.shown[1:]]
    assert names == [("update_display", True), ("display", True)]
    assert len({rest["display_id"] for _, _, rest in shell.shown}) == 1
    kept.close()
    assert shell.hooks == []


def test_a_recorded_run_is_released_once_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    shell, run = Shell(monkeypatch), recorded(steps=20)
    kept = keep.KeptPicture(lambda: run, once=True)
    kept.add_output()
    assert len(shell.hooks) == 1
    shell.end_cell()
    assert shell.hooks == [] and "image/png" in shell.shown[-1][1]
    kept.add_output()
    kept.close()
    assert shell.hooks == []


def test_the_cell_hook_is_only_registered_while_the_dashboard_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch)
    kept = keep.KeptPicture(lambda: None)
    kept.add_output()
    gone = weakref.ref(kept)
    del kept
    gc.collect()
    assert gone() is None and shell.hooks == []
    shell.end_cell()


def test_a_picture_that_cannot_be_drawn_shows_the_reason_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch)
    monkeypatch.setattr(picture, "draw_png", lambda run: 1 / 0)
    kept = keep.KeptPicture(lambda: recorded(steps=20))
    kept.add_output()
    shell.end_cell()
    assert "could not be drawn: ZeroDivisionError" in shell.shown[-1][1]["text/plain"]


def test_without_a_kernel_nothing_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(keep, "get_ipython", lambda: None)
    monkeypatch.setattr(keep, "display", lambda *a, **k: shown.append(a))
    kept = keep.KeptPicture(lambda: recorded(steps=20))
    kept.add_output()
    kept.start_drawing()
    assert shown == [] and not kept.is_due
