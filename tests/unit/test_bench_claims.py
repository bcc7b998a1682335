"""Tests the page's verdicts on papers' claims: rows, seeds, and missing evidence."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import strategies_page
from tests.bench.cells import FABRICS, SEEDS
from tests.bench.methods import LINK
from tests.unit.test_bench_strategies import made_up, row

pytestmark = pytest.mark.ranks


def common(
    folder: Path, label: str, ends: dict[int, float], rates: tuple[float, ...] = (1.0, 2.0, 4.0), **found: float
) -> None:
    """Makes a row from the common state, by seed; its second rate is the best."""
    for seed, end in ends.items():
        for rate in rates:
            lost = end + 0.5 * (rate != rates[1])
            made_up(folder, label, f"rate {rate:g}", seed, "outer", curve=[[0, 0, 5.0], [9, 1, lost]], **found)


def test_a_gain_belongs_to_the_knobs_it_was_measured_with(tmp_path: Path) -> None:
    for label in ("DDP", "SlowMo(every=12)", "SlowMo(every=12, beta=0.2)"):
        made_up(tmp_path, label, LINK)
    common(tmp_path, "LocalSGD(every=25)", {0: 2.2})
    common(tmp_path, "SlowMo(every=25)", {0: 2.0})
    said = row(strategies_page.text(tmp_path), "Papers' claims, untuned", "SlowMo")[2]
    usual, _, other = said.partition("SlowMo(every=12, beta=0.2)")
    assert "LocalSGD's loss / loss of SlowMo(every=25), from a common state: 1.10. The claim shows." in usual
    assert "SlowMo(every=25, beta=0.2) was not measured from a common state" in other and "shows" not in other
    common(tmp_path, "SlowMo(every=25, beta=0.2)", {0: 2.1})
    said = row(strategies_page.text(tmp_path), "Papers' claims, untuned", "SlowMo")[2]
    assert "/ loss of SlowMo(every=25, beta=0.2), from a common state: 1.05" in said


def test_a_gap_uses_only_seeds_that_both_rows_have(tmp_path: Path) -> None:
    for seed, end in enumerate((2.0, 2.0, 1.4)):
        common(tmp_path, "DDP", {seed: end}, bytes=(1e6, 1e6, 4e6)[seed])
    common(tmp_path, "LocalSGD(every=25)", {0: 2.1, 1: 2.1}, bytes=4e4)
    found = row(strategies_page.text(tmp_path), "Outer momentum from a common state", "LocalSGD(every=25)")
    assert found[3:5] == ["+5.0%", "4.0%"], "and of the third seed nothing"


def test_an_untested_edge_of_the_grid_is_reported(tmp_path: Path) -> None:
    common(tmp_path, "DDP", {0: 2.0})
    common(tmp_path, "LocalSGD(every=4)", {0: 2.1}, rates=(2.0, 4.0))
    page = strategies_page.text(tmp_path)
    assert "one more rate beyond it is tried. This rate is not tried yet for LocalSGD(every=4)." in page
    assert (
        row(page, "Outer momentum from a common state", "LocalSGD(every=4)")[1]
        == "0.012 (at the edge; the next rate is not tried yet)"
    )
    common(tmp_path, "LocalSGD(every=4)", {0: 2.1}, rates=(0.5, 4.0, 1.0, 2.0, 8.0))
    assert "is not tried yet" not in strategies_page.text(tmp_path)


def test_a_claim_about_bytes_and_time_is_judged_by_both(tmp_path: Path) -> None:
    name = "OneBitAdam(warmup=60)"
    falls_short = "The claim about bytes shows; that about time, 1.50, does NOT. The warm-up"
    for seconds, words in ((2.0, falls_short), (1.0, "The claim about bytes shows; that about time, 3.00, does.")):
        for seed in SEEDS:
            made_up(tmp_path, "DDP", LINK, seed, curve=[[0, 0.0, 5.0], [150, 3.0, 3.0], [300, 6.0, 2.5]])
            quick = [[0, 0.0, 5.0], [150, seconds, 3.0], [300, 2 * seconds, 2.5]]
            made_up(tmp_path, name, LINK, seed, bytes=2e5, curve=quick)
        said = row(strategies_page.text(tmp_path), "Papers' claims, untuned", "OneBitAdam")[2]
        assert words in said and "The claim shows" not in said


def test_samples_per_second_do_not_show_a_time_to_accuracy(tmp_path: Path) -> None:
    for where in FABRICS:
        made_up(tmp_path, "DDP", where)
        made_up(tmp_path, "StochasticGradientPush(graph=exponential)", where, samples_per_s=8000.0)
    said = row(strategies_page.text(tmp_path), "Papers' claims, untuned", "StochasticGradientPush")[2]
    assert "10.00 with +0.0% loss. The paper's claim is the time" in said and "The claim shows" not in said
