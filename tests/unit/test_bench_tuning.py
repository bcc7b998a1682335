"""Tests tuning: common rates, one more beyond an edge, then all seeds at the best."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from tests.bench import compression_page, compression_tuned, strategies, tuning
from tests.bench.cells import Cell, Results, keep, kept
from workbench.compressors import Compressor
from workbench.settings import from_plain
from workbench.sim import Costs
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks
GRID = (1.0, 2.0, 4.0)


def make(rate: float, seed: int) -> Cell:
    return Cell(part="tuned", row="TopK", where=tuning.where(rate), seed=seed, method="DDP", rate=rate)


def results(ends: dict[tuple[float, int], float], row: str = "TopK", part: str = "tuned") -> Results:
    """Returns cells by (rate, seed) with these final losses."""
    return Results(
        {"part": part, "row": row, "where": tuning.where(rate), "seed": seed, "found": curve([9, 1, end])}
        for (rate, seed), end in ends.items()
    )


def curve(*points: list[float]) -> dict[str, Any]:
    return {"curve": [[0, 0, 5.0], *points]}


def asked(found: Results) -> list[tuple[float, int]]:
    return [(cell.rate, cell.seed) for cell in tuning.cells(found, "tuned", "TopK", GRID, make)]


def test_tuning_runs_the_grid_on_one_seed_and_then_the_best_with_all() -> None:
    first = [(1.0, 0), (2.0, 0), (4.0, 0)]
    assert asked(results({})) == asked(results({(1.0, 0): 2.0})) == first
    assert asked(results({(1.0, 0): 2.0, (2.0, 0): 1.9, (4.0, 0): 2.1})) == [*first, (2.0, 1), (2.0, 2)]


@pytest.mark.parametrize(("low", "high", "beyond"), [(2.0, 1.8, 8.0), (1.8, 2.0, 0.5)])
def test_only_one_rate_beyond_an_edge_is_tried(low: float, high: float, beyond: float) -> None:
    ends = {(1.0, 0): low, (2.0, 0): 1.9, (4.0, 0): high}
    assert asked(results(ends)) == [*[(r, 0) for r in GRID], (beyond, 0)]
    edge = min(GRID, key=lambda r: ends[r, 0])
    worse, better = results({**ends, (beyond, 0): 2.5}), results({**ends, (beyond, 0): 1.5})
    assert asked(worse)[3:] == [(beyond, 0), (edge, 1), (edge, 2)]
    assert asked(better)[3:] == [(beyond, 0), (beyond, 1), (beyond, 2)]
    chosen = [tuning.choice(found, "tuned", "TopK", GRID) for found in (worse, better)]
    assert [(c.rate, c.edge) for c in chosen if c] == [(edge, False), (beyond, True)]


def test_a_training_that_ends_in_nan_is_the_worst() -> None:
    found = results({(1.0, 0): math.nan, (2.0, 0): 2.0, (4.0, 0): math.inf})
    chosen = tuning.choice(found, "tuned", "TopK", GRID)
    assert chosen == tuning.Choice(2.0, False, [1.0, 2.0, 4.0])
    assert tuning.choice(results({(2.0, 1): 2.0}), "tuned", "TopK", GRID) is None, "the first seed decides"


def test_tuning_continues_until_the_best_has_all_seeds(tmp_path: Path) -> None:
    costs = Costs(forward=0.01, backward=0.02, update=0.005)

    def tiny(rate: float, seed: int) -> Cell:
        return Cell(part="tuned", row="TopK", where=tuning.where(rate), seed=seed, method="DDP", rate=rate,
                    task=Digits(width=4, hidden=16), steps=2, every=2)  # fmt: skip

    def plan() -> list[Cell]:
        for cell in (cells := tuning.cells(Results.of(tmp_path), "tuned", "TopK", GRID, tiny)):
            if kept(cell, costs, tmp_path) is None:
                end = {1.0: 2.0, 2.0: 1.0, 4.0: 3.0}[cell.rate]
                keep(cell, costs, {"curve": [[0, 0, 5.0], [2, 1, end]]}, tmp_path)
        return cells

    while len(plan()) < 5:
        pass
    assert strategies.rounds(plan, costs, math.inf, tmp_path, 1) == 0
    assert sorted((f["where"], f["seed"]) for f in Results.of(tmp_path).files) == [
        ("rate 1", 0), ("rate 2", 0), ("rate 2", 1), ("rate 2", 2), ("rate 4", 0)]  # fmt: skip


# -- compressors under three optimizers


def test_every_row_is_valid_with_every_optimizer() -> None:
    cells = compression_tuned.cells(Results([]))
    assert len({cell.path for cell in cells}) == len(cells) == sum(3 * len(s.rows) for s in compression_tuned.SETTINGS)
    for cell in cells:
        experiment, _ = cell.asked()
        assert experiment.lr == pytest.approx(cell.rate * cell.task.lr)
        assert isinstance(from_plain(cell.codec, Compressor), Compressor)
    momenta = {repr(cell.asked()[0].optimizer) for cell in cells}
    assert len(momenta) == 3 and any("beta1=0.0" in words for words in momenta)
    dgc = next(cell for cell in cells if cell.row.startswith("DGC")).asked()[0].compressor
    assert (dgc.density, dgc.momentum) == (0.01, 0.9), "the paper's momentum, at one in a hundred"


def tuned(row: str, ends: list[float], setting: int = 0) -> list[dict[str, Any]]:
    """Returns a row with the best loss at the second of 3 rates."""
    s = compression_tuned.SETTINGS[setting]
    low, middle, high = compression_tuned.grid(s)
    at = {(low, 0): ends[0] + 0.2, (high, 0): ends[0] + 0.1, **{(middle, seed): end for seed, end in enumerate(ends)}}
    return results(at, compression_tuned.label(s, row), compression_tuned.PART).files


def test_the_page_compares_rows_with_dense_at_its_best_rate() -> None:
    adam = [*tuned("Dense", [2.0, 2.0, 2.0]), *tuned("TopK", [2.2, 2.2, 2.2])]
    found = Results([*adam, *tuned("Dense", [3.0, 3.0], setting=2)])
    page = compression_tuned.text(found)
    assert "| TopK | 0.006 | 2.200 ± 0.000 | +10.0% |" in page and "Tried first: 0.003, 0.006, 0.012." in page
    assert "Not measured yet: ALQ, AMQ, PowerSGD." in page
    partly = Results([one for one in adam if one["where"] != "rate 4"])
    said = compression_tuned.text(partly)
    assert "Under AdamW, the task's own: not measured yet." not in said, "a grid is tried whole"
    assert "under three optimizers: not measured yet." in said and "#" not in said, "no heading over no table"
    assert "Under AdamW(beta1=0): not measured yet." in page
    assert "| Dense | 0.1 | 3.000 (2 of 3 seeds) | +0.0% |" in page


def test_an_untested_edge_does_not_count_as_widened() -> None:
    s = compression_tuned.SETTINGS[0]
    low, middle, high = compression_tuned.grid(s)
    row, ends = compression_tuned.label(s, "Dense"), {(low, 0): 2.2, (middle, 0): 2.1, (high, 0): 2.0}
    page = compression_tuned.text(results(ends, row))
    assert "| Dense | 0.012 (at the edge; the next rate is not tried yet) |" in page
    page = compression_tuned.text(results({**ends, (2 * high, 0): 1.9}, row))
    assert "| Dense | 0.024 (at the edge of the tried rates) |" in page
    assert "| Dense | 0.012 | " in compression_tuned.text(results({**ends, (2 * high, 0): 2.3}, row))


def test_the_page_shows_the_head_start_of_a_tuned_dense() -> None:
    plain = [
        {"part": "loss", "row": "Dense", "where": "any link", "seed": s, "found": curve([200, 1, 3.0])}
        for s in range(3)
    ]
    rows = tuned("Dense", [2.0, 2.0, 2.0])
    for one in rows:
        one["found"]["curve"] = [[0, 0, 5.0], [100, 1, 3.0], [300, 2, one["found"]["curve"][-1][2]]]
    said = compression_tuned.sooner(Results([*plain, *rows]), 3.0)
    assert "At its own best rate, 0.006, it reaches that loss in 100 steps instead of 200" in said
    assert "below 2.00 against dense fp32" in said
    assert compression_tuned.sooner(Results(plain), 3.0) == ""
    steps = [
        {"part": "step", "row": row, "where": "50 Mbit/s", "seed": 0, "found": {"step_s": t, "bytes": 1, "codec_s": 0}}
        for row, t in (("Dense", 0.4), ("ALQ", 0.1))
    ]
    alq = [{**one, "row": "ALQ"} for one in plain]
    said = compression_page._where(Results([*plain, *alq, *rows, *steps]))
    assert "| 50 Mbit/s | ALQ | 4.00 | 1 of 1: ALQ | 0 of 1 | 2.00 | 1 of 1: ALQ | 0 of 1 |" in said


def test_winners_are_also_counted_against_a_tuned_dense(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tuned Dense needs half the steps, so 1.6 times the speed of an untuned Dense is no win."""
    took = {"Dense": 0.4, "ALQ": 0.1, "QSGD": 0.25, "AMQ": 0.4}
    about = {"where": "50 Mbit/s", "seed": 0, "part": "step"}
    steps = [{**about, "row": row, "found": {"step_s": t, "bytes": 1, "codec_s": 0}} for row, t in took.items()]
    runs = [{"part": "loss", "row": r, "where": "any link", "seed": 0, "found": curve([200, 1, 3.0])} for r in took]
    monkeypatch.setattr(compression_tuned, "head_start", lambda *_: (2.0, 100.0, 200.0, 3))
    said = compression_page._where(Results([*steps, *runs]))
    assert "| 4.00 | 2 of 3: ALQ, QSGD | 0 of 3 | 2.00 | 1 of 3: ALQ | 2 of 3: QSGD, AMQ |" in said
    monkeypatch.setattr(compression_tuned, "head_start", lambda *_: None)
    said = compression_page._where(Results([*steps, *runs]))
    assert "own best" not in said and "tuned dense" not in said
