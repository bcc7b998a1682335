"""Tests every view on empty, live and recorded runs: it draws what the record contains."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from tests.sim.virtual import paced, stack
from tests.unit import synthetic
from tests.unit.encoded import DENSE, SLOW, TOPK, Author
from tests.unit.synthetic import run as recorded
from widgets.charts import theme
from widgets.charts.boxes import KINDS
from widgets.charts.feed import Feed
from widgets.charts.marks import change_marks
from widgets.charts.wire import MessagePacker
from widgets.static import read_static
from widgets.views import all_views
from widgets.views._base import Patch, View, draw_view, thin_points
from workbench import simulate
from workbench.analysis import bytes_per_step, line_up, since_met
from workbench.fabric import Slow
from workbench.record.timeline import Mark, Sample
from workbench.run import Run

VIEWS = all_views()
TYPES = {"u1": "<u1", "u2": "<u2", "u4": "<u4", "f4": "<f4", "f8": "<f8"}


def empty() -> Run:
    return Run({"ranks": 4}, name="empty", live=True)


def view(name: str) -> View:
    return next(kind() for kind in VIEWS.values() if kind.name == name)


def unpack(header: list[Any], buffer: bytes) -> np.ndarray:
    where, count, kind, base = header
    return np.frombuffer(buffer, TYPES[kind], count, where).astype(float) + base


@pytest.mark.parametrize("kind", VIEWS.values(), ids=lambda k: k.name)
def test_every_view_draws_an_empty_and_a_recorded_run(kind: type[View]) -> None:
    for run in (empty(), recorded(steps=60)):
        figure, text = draw_view(kind(), run), kind().update(run).html
        assert (figure is None) != (text is None)
        assert figure is None or len(figure.data) > 0
        assert kind.about and kind.title


@pytest.mark.parametrize("kind", VIEWS.values(), ids=lambda k: k.name)
def test_a_live_run_read_in_pieces_gives_the_same_picture(kind: type[View]) -> None:
    whole, live = recorded(steps=60, ranks=3), Run({"ranks": 3}, live=True)
    watching = kind()
    for piece in range(5):
        for name in ("spans", "samples", "marks"):
            table = whole.timeline.table(name)
            n = len(table)
            live.timeline.table(name).extend(table.rows(n * piece // 5, n * (piece + 1) // 5).columns)
        if piece < 4:
            watching.update(live)
    live.live = False
    watching.update(live)
    a, b = kind().update(whole), kind().update(live)
    assert json.dumps(MessagePacker().pack_patch(a), default=str) == json.dumps(
        MessagePacker().pack_patch(b), default=str
    )


def test_the_timeline_shows_every_span_of_its_steps_once_per_lane() -> None:
    run = recorded(steps=40, link=True)
    shown = view("timeline")
    patch = shown.update(run)
    first, last = patch.facts["first"], patch.facts["last"]
    rows = run.timeline.spans.rows()
    wanted = np.flatnonzero((rows.step >= first) & (rows.step <= last) & ~rows.equal("lane", "step"))
    have = np.concatenate([columns["row"] for columns in patch.replace.values()]).astype(int)
    assert set(wanted) <= set(have)
    for columns in patch.replace.values():
        assert (columns["x1"] >= columns["x0"]).all()


def test_waiting_ends_and_transfer_begins_at_the_last_arrival() -> None:
    run = recorded(steps=20, slow=(1, "backward", 2.0), hiccups=0.0)
    patch = view("timeline").update(run)
    number = {kind.key: i for i, kind in enumerate(KINDS)}
    last = line_up(run.timeline, patch.facts["first"], patch.facts["last"] + 1).last
    transfers = np.concatenate([patch.replace[number[k]]["x0"] for k in ("transfer", "odd")])
    waits = patch.replace[number["waiting"]]
    assert np.isin(transfers, last).all() and np.isin(waits["x1"], last).all()
    assert 1 not in waits["rank"][waits["x1"] - waits["x0"] > 0.01]


def test_rates_exclude_waiting_and_are_equal_in_table_and_tooltip() -> None:
    """Uses a link of 100 Mbit/s. The rate is independent of how long ranks wait for a late one."""
    late = (Slow(rank=1, factor=3.0, phase="forward"),)
    run, shown = simulate(paced(3, 8, 60.0, 100.0, task=stack(4, 300), faults=late, eval_every=4)), view("timeline")
    shown.ask({"at": 5, "steps": 1})
    patch = shown.update(run)
    number = {kind.key: i for i, kind in enumerate(KINDS)}
    hover = np.concatenate([patch.replace[number[k]]["mbit"] for k in ("transfer", "odd")])
    head, rows = shown.table(run).head, shown.table(run).rows  # type: ignore[union-attr]
    table = [float(r[head.index("Mbit/s")]) for r in rows if r[2] == "comm"]
    assert len(table) == len(hover) == 3 * 4 and hover == pytest.approx(100, rel=0.01)
    assert sorted(table) == pytest.approx(sorted(hover.tolist()), rel=0.005)
    spans = run.timeline.spans.rows()
    spans = spans[spans.equal("lane", "comm") & (spans.step == 5)]
    assert (spans.nbytes * 8e-6 / (spans.t1 - spans.t0)).min() < 60, "waiting and all"


def test_spans_that_send_nothing_have_no_rate() -> None:
    run, shown = recorded(steps=20), view("timeline")
    patch = shown.update(run)
    number = {kind.key: i for i, kind in enumerate(KINDS)}
    for key in ("forward", "waiting", "exposed", "codec"):
        assert not {"nbytes", "mbit"} & set(patch.replace[number[key]])
    assert {r[-1] for r in shown.table(run).rows if r[2] == "compute"} == {""}  # type: ignore[union-attr]


def test_a_frozen_timeline_shows_the_requested_step() -> None:
    run, shown = recorded(steps=50), view("timeline")
    shown.update(run)
    shown.ask({"at": 7, "steps": 2})
    patch = shown.update(run)
    assert (patch.facts["first"], patch.facts["last"], patch.facts["follow"]) == (7, 8, False)
    low, high = patch.layout["xaxis.range"]
    rows = run.timeline.spans.rows()
    steps = rows[rows.equal("lane", "step") & (rows.step >= 7) & (rows.step <= 8)]
    assert low < steps.t0.min() and high > steps.t1.max()
    shown.ask({"at": None})
    assert shown.update(run).facts["last"] == 49


def test_a_rank_without_new_spans_does_not_stop_the_timeline() -> None:
    whole, run = recorded(steps=60, ranks=3), Run({"ranks": 3}, live=True)
    rows = whole.timeline.spans.rows()
    run.timeline.spans.extend(rows[(rows.rank != 2) | (rows.step < 20)].columns)
    assert view("timeline").update(run).facts["latest"] == 59


def test_a_long_step_is_shown_while_it_grows() -> None:
    whole, run = recorded(steps=12, ranks=2, step_s=0.5, changes=()), Run({"ranks": 2}, live=True)
    rows, shown = whole.timeline.spans.rows(), view("timeline")
    end = float(rows.t1[rows.equal("lane", "step") & (rows.step == 9)].max())
    for since, until in ((-1.0, end + 0.05), (end + 0.05, end + 0.4)):
        run.timeline.spans.extend(rows[(rows.t1 > since) & (rows.t1 <= until)].columns)
        patch = shown.update(run)
        assert patch.facts["last"] == 9 and patch.layout["xaxis.range"][1] > end + 0.5
    drawn_steps = np.concatenate([columns["step"] for columns in patch.replace.values()])
    assert drawn_steps.max() == 10 and end < patch.facts["newest"] <= end + 0.4


def test_loss_points_equal_the_recorded_samples() -> None:
    run = recorded(steps=80, ranks=2)
    patch, samples = view("loss").update(run), run.samples
    held = samples[samples.name == "held_out"]
    assert patch.append[4]["y"].tolist() == held.value.tolist()
    assert patch.append[5]["x"].tolist() == held.t.tolist()
    mine = samples[(samples.name == "loss") & (samples["rank"] == 1)]
    assert patch.append[1]["x"].tolist() == mine.step.tolist()
    assert patch.append[3]["y"].tolist() == mine.value.tolist()


def test_the_bytes_view_equals_bytes_per_step_of_the_analysis() -> None:
    run = recorded(steps=30, ranks=2)
    patch = view("bytes").update(run)
    for rank in (0, 1):
        assert patch.append[rank]["y"].tolist() == bytes_per_step(run.timeline, 0, 30)[:, rank].tolist()


def test_bytes_of_infrequent_averaging_are_not_drawn_as_a_solid_block() -> None:
    run = recorded("LocalSGD", steps=44, ranks=2, every=8, changes=((36, "strategy", "DDP"),))
    points = view("bytes").update(run).append[0]
    whole = synthetic.BUCKETS * synthetic.NBYTES
    assert points["x"].tolist() == [7, 15, 23, 31, *range(36, 44)]
    assert points["y"].tolist() == [whole / 8] * 4 + [whole / 5] + [whole] * 7


def test_bytes_read_in_pieces_equal_bytes_read_at_once() -> None:
    whole, live = recorded("LocalSGD", steps=44, every=8, changes=()), Run({"ranks": 4}, live=False)
    shown = view("bytes")
    rows, x, y = whole.timeline.spans.rows(), [], []
    for stop in (3, 10, 11, 30, 44):
        live.timeline.spans.extend(rows[(rows.step < stop) & (rows.step >= shown.cursor)].columns)
        points = shown.update(live).append.get(2, {"x": np.empty(0), "y": np.empty(0)})
        x, y = [*x, *points["x"]], [*y, *points["y"]]
    once = view("bytes").update(whole).append[2]
    assert (x, y) == (once["x"].tolist(), once["y"].tolist()) and len(x) == 5


def test_lane_work_without_a_compressor_is_not_labelled_compressing() -> None:
    number = {kind.key: i for i, kind in enumerate(KINDS)}
    for settings, key in ((DENSE, "preparing"), (TOPK, "codec")):
        author = Author(settings)
        author.steps(6, SLOW)
        patch = view("timeline").update(author.run)
        other = {"preparing": "codec", "codec": "preparing"}[key]
        assert len(patch.replace[number[key]]["x0"]) and not len(patch.replace[number[other]]["x0"])


def test_a_rank_bar_is_as_long_as_its_step() -> None:
    run = recorded(steps=40)
    patch = view("ranks").update(run)
    rows = run.timeline.spans.rows()
    steps = rows[rows.equal("lane", "step") & (rows.step >= 20) & (rows.rank == 0)]
    total = sum(columns["x"][0] for columns in patch.replace.values())
    assert total == pytest.approx(1e3 * float(np.mean(steps.t1 - steps.t0)), rel=1e-6)


def test_the_straggler_view_names_cause_and_victims_or_says_no_rank() -> None:
    assert "No rank" in str(view("straggler").update(recorded(steps=60, changes=())).html)
    text = str(view("straggler").update(recorded(steps=60, slow=(2, "backward", 1.6), changes=())).html)
    assert "Rank 2 is the cause" in text and "victims" in text


def test_a_card_compares_before_and_after_a_change_in_words() -> None:
    run = recorded(steps=200)
    html = str(view("cards").update(run).html)
    assert html.count("<table") == len(run.changes) == 2
    assert "1 LocalSGD" in html and "down, &divide;" in html and "6 MB" in html


def test_equal_log_lines_of_ranks_are_merged_and_markup_is_escaped() -> None:
    run = empty()
    said = json.dumps({"stream": "stdout", "text": "<b>hello</b>"})
    run.timeline.marks.add([Mark(r, 3, "log", 0.1, said) for r in (0, 1, 2, 5, 5)])
    html = str(view("log").update(run).html)
    assert html.count("hello") == 1 and "ranks 0-2, 5" in html and "&times;5" in html
    assert "<b>hello" not in html and "&lt;b&gt;hello" in html


def test_changes_are_numbered_and_labelled() -> None:
    run = empty()
    for n, (path, value) in enumerate([("strategy", {"LocalSGD": {"every": 8}}), ("lr", 0.25), ("fabric.faults", [])]):
        detail = json.dumps({"id": str(n), "path": path, "value": value, "text": ""})
        run.timeline.marks.add([Mark(0, n, "change", float(n), detail)])
    assert [(m.number, m.label) for m in change_marks(run)] == [
        (1, "LocalSGD(every=8)"),
        (2, "lr = 0.25"),
        (3, "faults: none"),
    ]


def test_thinning_keeps_ends_extremes_and_order() -> None:
    y = np.sin(np.arange(50_000) / 500.0)
    y[12_345], y[40_001] = 9.0, -9.0
    kept = thin_points({"x": np.arange(50_000.0), "y": y}, 1500)
    assert len(kept["x"]) <= 1500 and {9.0, -9.0} <= set(kept["y"])
    assert (np.diff(kept["x"]) > 0).all() and kept["x"][0] == 0


def test_packed_numbers_keep_microseconds_late_in_a_long_run() -> None:
    t = 86_400.0 + np.linspace(0, 0.5, 999)
    columns = {"x": t, "row": np.arange(5_000_000, 5_000_999), "y": np.array([1.0, np.nan]), "text": ["a", "b"]}
    packing = MessagePacker()
    header = packing._pack_columns(columns)
    assert np.abs(unpack(header["x"], packing.joined_buffer) - t).max() < 1e-6
    assert unpack(header["row"], packing.joined_buffer).tolist() == columns["row"].tolist()
    assert np.isnan(unpack(header["y"], packing.joined_buffer)[1]) and header["text"] == ["a", "b"]


def test_a_feed_sends_everything_once_and_then_only_new_data() -> None:
    whole, live = recorded(steps=160), Run({"ranks": 4}, live=True)
    live.timeline = whole.timeline
    feed = Feed(live)
    content, buffers = feed.make_opening()
    assert {spec["name"] for spec in content["specs"]} == {kind.name for kind in VIEWS.values()}
    assert json.loads(json.dumps(content)) and len(content["marks"]) == len(live.changes) == 2 and buffers[0]
    assert feed.make_news() is None


def test_a_failing_view_reports_it_once_and_other_views_continue() -> None:
    class Broken(View):
        name, title, about = "broken", "Broken", "fails"

        def update(self, run: Any) -> Patch:
            raise ZeroDivisionError("no luck")

    run = recorded(steps=20)
    feed = Feed(run, (Broken, type(view("loss"))))
    content, _ = feed.make_opening()
    assert "loss" in content["views"] and content["trouble"] == (
        "Broken could not be updated: ZeroDivisionError: no luck"
    )
    assert feed.make_news() is None


def test_eight_ranks_at_twenty_steps_a_second_fit_the_bandwidth_budget() -> None:
    whole, live = recorded(steps=200, ranks=8, step_s=0.05, changes=()), Run({"ranks": 8}, live=True)
    rows, sent, feed = whole.timeline.spans.rows(), 0, Feed(live)
    feed.make_opening()
    until = float(rows.t1.max())
    ticks = np.arange(1.0, until, 1 / 6)
    for a, b in pairwise(ticks):
        live.timeline.spans.extend(rows[(rows.t1 > a) & (rows.t1 <= b)].columns)
        if news := feed.make_news():
            sent += len(json.dumps(news[0])) + len(news[1][0])
    assert sent / (ticks[-1] - ticks[0]) < 200e3


def test_colours_contrast_with_the_labels_on_them() -> None:
    for kind in KINDS:
        if kind.text:
            assert _contrast(kind.fill, kind.text) >= 4.5, kind.key
        seen = max(_contrast(kind.fill, "#ffffff"), 0 if kind.pattern else _contrast(kind.edge, "#ffffff"))
        assert seen >= (3 if not kind.pattern else 2.5), kind.key
    for ink, paper in ((theme.MUTED, "#ffffff"), (theme.INK, theme.PAPER)):
        assert _contrast(ink, paper) >= 4.5


def _contrast(a: str, b: str) -> float:
    light, dark = sorted((_luminance(a), _luminance(b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def test_the_page_can_draw_every_pattern_in_a_legend() -> None:
    source = read_static("chart.js")
    found = re.findall(r'^  "?([^":\s]*)"?: \(c\) =>', source, re.MULTILINE)
    known = {json.loads(f'"{shape}"') for shape in found}
    assert {kind.pattern for kind in KINDS} <= known and {"", "/", "x"} <= known


def test_kinds_of_boxes_differ_by_more_than_colour() -> None:
    looks = [
        (kind.top, kind.bottom, kind.pattern, bool(kind.text)) for kind in KINDS if kind.key not in ("odd", "backward")
    ]
    assert len(set(looks)) == len(looks)


@pytest.mark.parametrize(("every", "said"), [
    (8, "step<br>points: 0 or 4 steps after averaging"),
    (5, "step<br>points: just after averaging"),
    (7, "step<br>points: 0 to 6 steps after averaging"),
])  # fmt: skip
def test_drift_within_rounds_is_drawn_as_points_with_their_place_in_the_round(every: int, said: str) -> None:
    run = recorded("LocalSGD", steps=200, ranks=2, every=every, changes=())
    patch = view("drift").update(run)
    assert set(patch.append) == {2, 3}, "markers alone: a line would go up and down with the place in the round"
    assert patch.layout["xaxis.title.text"] == said
    figure = draw_view(view("drift"), run)
    assert figure is not None and figure.data[2].mode == "markers" and len(figure.data[2].x) == 10
    grid = view("drift").table(run)
    drift = run.timeline.samples.rows()
    drift = drift[drift.equal("name", "drift") & (drift.rank == 0)]
    told = [int(row[-1]) for row in grid.rows if row[1] == 0]  # type: ignore[union-attr]
    assert told == [round(v / 0.01) for v in drift.value[-10:]], "the record made up says 0.01 per step since they met"


def test_drift_of_ranks_that_synchronise_in_every_step_is_a_line() -> None:
    patch = view("drift").update(recorded(steps=100, ranks=2, changes=()))
    assert set(patch.append) == {0, 1} and "xaxis.title.text" not in patch.layout


def test_steps_since_averaging_start_again_at_a_change_of_strategy() -> None:
    run = recorded(steps=60, ranks=2, changes=((38, "strategy", "LocalSGD"),), every=30)
    since, _ = since_met(run.timeline, np.array([38, 40, 45]))
    assert since.tolist() == [0, 2, 7]


def test_memory_is_a_bar_of_categories_with_a_mark_at_the_peak() -> None:
    run, model = recorded(steps=20, ranks=2, changes=()), synthetic.BUCKETS * synthetic.NBYTES
    figure = draw_view(view("memory"), run)
    assert figure is not None
    shown = {trace.name: list(trace.x) for trace in figure.data if len(trace.x)}
    assert shown["parameters"] == [model] * 2 and shown["optimizer state"] == [2 * model] * 2
    assert shown["peak of all together"] == [6.5 * model] * 2 and "GPU's allocator" not in shown
    assert figure.layout.xaxis.tickformat == "~s" and figure.layout.xaxis.ticksuffix == "B"
    grid = view("memory").table(run)
    assert grid is not None and grid.rows[1][:2] == (1, "6 MB") and grid.rows[1][-2:] == ("39 MB", "")


def test_memory_of_a_gpu_is_marked_and_an_unknown_category_is_drawn() -> None:
    run = recorded(steps=20, ranks=2, changes=())
    told = {"allocated": 8e7, "allocated peak": 9e7, "moved to host": 5e6}
    run.timeline.samples.add([Sample(1, 19, f"memory {name}", 9.0, value) for name, value in told.items()])
    figure = draw_view(view("memory"), run)
    assert figure is not None
    shown = {trace.name: list(trace.x) for trace in figure.data if len(trace.x)}
    assert shown["GPU's allocator"] == [9e7] and shown["other"] == [0, 5e6]
