"""Tests views of compression's savings and costs: live, as a table, and without data."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.unit.encoded import DENSE, QUICK, SLOW, TOPK, WHOLE, Author, compressed
from widgets.charts.boxes import KINDS
from widgets.charts.feed import Feed
from widgets.views._base import View, draw_view
from widgets.views.compression import Compressed
from widgets.views.compression_benefit import CompressionBenefit
from widgets.views.timeline import Timeline
from workbench.run import Run


def said(run: Run) -> str:
    return str(CompressionBenefit().update(run).html)


def points(run: Run, view: View | None = None) -> list[list[float]]:
    """Returns y of each trace: ratio, error, residual, cosine."""
    patch = (view or Compressed()).update(run)
    return [list(patch.append.get(k, {}).get("y", [])) for k in range(4)]


def test_without_compression_the_panel_reports_that_and_the_chart_is_absent() -> None:
    author = Author(DENSE)
    author.steps(20, WHOLE)
    assert "Compression is off" in said(author.run) and "Choose a compressor" in said(author.run)
    assert Compressed.quiet and points(author.run) == [[], [], [], []]
    assert "Compression is off" in said(Run({}, live=True))


def test_without_measuring_the_panel_explains_how_to_enable_it() -> None:
    html = said(compressed(SLOW, measure=0))
    assert "set measure_every to 20" in html and "100 &times;" in html and "10 kB sent instead of 1 MB (fp32)" in html
    assert "The time with Dense is unknown" in html
    soon = Author(TOPK, measure_every=50)
    soon.steps(20, SLOW)
    assert "measured every 50 steps" in said(soon.run)


def test_the_panel_explains_one_rank_and_too_few_steps() -> None:
    fresh = Author(TOPK)
    assert "The run has too few steps with TopK(density=0.01) to measure its savings and costs" in said(fresh.run)
    fresh.run.live = True
    assert "The savings and costs of TopK(density=0.01) appear here after a few steps" in said(fresh.run)
    fresh.run.settings["ranks"] = 1
    assert "A single rank sends nothing" in said(fresh.run)


def test_the_panel_shows_the_numbers_of_the_analysis() -> None:
    html = said(compressed(SLOW))
    assert '<p class="wb-verdict wb-found">TopK(density=0.01) takes 40 ms per step' in html
    assert "on this link Dense would be faster" in html
    cells = (
        "100 &times;",
        "0.5",
        "0.8",
        "2",
        "40 ms",
        "10 ms of it behind compute",
        "with Dense 6 ms (predicted)",
    )
    for cell in cells:
        assert f"<td>{cell}</td>" in html, cell
    assert "median of 8 measurements" in html and "steps 2-39" in html
    assert 'class="wb-verdict">TopK' in said(compressed(QUICK)), "what pays is no alarm"


def test_names_are_escaped_in_html() -> None:
    author = Author({"<b>Mine</b>": {"x": 1}})
    author.steps(20, SLOW)
    assert "&lt;b&gt;Mine" in said(author.run) and "<b>Mine" not in said(author.run)


def test_the_chart_shows_every_exchange_and_every_measurement() -> None:
    ratio, error, residual, cosine = points(compressed(SLOW))
    assert ratio == [100.0] * 40
    assert (error, residual, cosine) == ([0.5] * 8, [2.0] * 8, [0.8] * 8)
    figure = draw_view(Compressed(), compressed(SLOW))
    assert figure is not None and list(figure.data[1].x) == [4.0, 9.0, 14.0, 19.0, 24.0, 29.0, 34.0, 39.0]
    looks = [(t.line.color, t.line.dash, t.marker.symbol) for t in figure.data[1:]]
    assert len({look[0] for look in looks}) == len({look[2] for look in looks}) == 3, "not by colour alone"


def test_the_chart_receives_only_new_points() -> None:
    author, view = Author(TOPK), Compressed()
    author.steps(10, SLOW, 5)
    assert [len(y) for y in points(author.run, view)] == [10, 2, 2, 2]
    assert points(author.run, view) == [[], [], [], []]
    author.steps(5, SLOW, 5)
    assert [len(y) for y in points(author.run, view)] == [5, 1, 1, 1]


def test_the_chart_starts_with_the_first_compression_and_continues_without() -> None:
    author = Author(DENSE)
    author.steps(10, WHOLE)
    author.set("compressor", TOPK)
    author.steps(10, SLOW)
    author.set("compressor", DENSE)
    author.steps(5, WHOLE)
    patch = Compressed().update(author.run)
    assert patch.append[0]["x"].tolist() == list(range(10, 25))
    assert patch.append[0]["y"].tolist() == [100.0] * 10 + [1.0] * 5
    assert "Compression is off" in said(author.run)


def test_a_live_panel_updates_at_its_own_pace_without_repetition(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    author, view = Author(TOPK, measure_every=5), CompressionBenefit()
    author.run.live = True
    author.steps(20, SLOW, 5)
    assert "40 ms" in str(view.update(author.run).html)
    author.steps(1, SLOW)
    assert view.update(author.run).html is None, "too soon"
    now[0] += 10
    assert "steps 2-20" in str(view.update(author.run).html)
    now[0] += 10
    assert view.update(author.run).html is None, "nothing is new"


def test_the_chart_has_a_table() -> None:
    grid = Compressed().table(compressed(SLOW))
    assert grid.head == ("step", "effective ratio", "relative error", "left unsent / to be sent", "cosine")
    assert grid.rows[-1] == (39, "100", "0.5", "2", "0.8") and len(grid.rows) == 8
    assert Compressed().table(Run({"ranks": 2})).rows == []


def test_the_timeline_draws_measuring_under_its_own_name() -> None:
    author = Author(TOPK)
    author.steps(6, SLOW, 6)
    number = next(i for i, kind in enumerate(KINDS) if kind.key == "measuring")
    boxes = Timeline().update(author.run).replace[number]
    assert set(boxes["step"]) == {5} and len(boxes["x0"]) == 4
    np.testing.assert_allclose(boxes["x1"] - boxes["x0"], 6e-3)
    assert KINDS[number].legend == "sent to evaluate or to measure compression"


def test_the_page_receives_the_list_of_quiet_panels() -> None:
    content: dict[str, Any] = Feed(compressed(SLOW)).make_opening()[0]
    quiet = {spec["name"] for spec in content["specs"] if spec["quiet"]}
    assert quiet == {"asked", "beside", "causes", "collectives", "compression", "entered", "gpu", "lateness", "memory",
                     "mesh", "norms", "path", "peaks", "pipeline", "upkeep", "verdicts"}  # fmt: skip
    assert json.loads(json.dumps(content))["views"]["pays"]["html"]


def test_a_logarithmic_axis_ends_at_round_values_around_its_data() -> None:
    author, view = Author(TOPK), Compressed()
    author.steps(5, SLOW, 5)
    first = view.update(author.run).layout
    low, high = first["yaxis.range"]
    assert low < np.log10(50) < np.log10(100) < high and first["yaxis.dtick"] == "D2"  # of 100 alone
    low, high = first["yaxis2.range"]
    assert low < np.log10(0.5) < np.log10(2) < high < np.log10(2.5)
    author.steps(5, SLOW, 5)
    assert view.update(author.run).layout == {}, "nothing lies beyond"
    author.steps(5, SLOW._replace(sent=10), 5, (0.5, 0.8, 3000.0))
    later = view.update(author.run).layout
    assert later["yaxis.range"][1] > 5 and later["yaxis2.range"][1] > np.log10(3000) and later["yaxis2.dtick"] == 1


def test_a_negative_cosine_is_drawn_and_zeros_are_left_out_of_logarithms() -> None:
    author = Author(TOPK)
    author.steps(5, SLOW, 5, (0.0, -0.5, 0.0))
    assert points(author.run)[1:] == [[], [], [-0.5]]
