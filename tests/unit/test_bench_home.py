"""Tests the bench of methods in their home regimes: equal budgets, resumption, and verdicts."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import home, home_page
from tests.bench.home_claims import CLAIMS
from tests.bench.home_looks import Because, Claim, Look, seen, wanted
from tests.bench.home_rows import FRESH, MOST, SEEDS, Book, Regime, Row, Trial, best, needs, tried, winner
from workbench.experiment import Experiment
from workbench.fabric import Fabric, TransientStraggler
from workbench.sim import Costs
from workbench.strategies import LocalSGD
from workbench.tasks import Digits

pytestmark = pytest.mark.ranks
HOME = Regime(name="home", words="four ranks", task=Digits(width=4, hidden=16), ranks=2, steps=4, goal=1.0, looks=2)
ROW = Row(regime=HOME, method="LocalSGD", axes={"rate": (1.0, 2.0, 4.0), "every": (2, 4)})
BASE = Row(regime=HOME, method="DDP", axes={"rate": (1.0, 2.0, 4.0)})
CLAIM = Claim(method="LocalSGD", paper="Faster.", source="abstract", row=ROW, against=BASE, looks=(Look("time", 1.0),))
COSTS = Costs(forward=0.01, backward=0.02, update=0.005)


def ran(seconds: float, loss: float = 0.5) -> dict[str, Any]:
    """Returns a run that reaches the goal, 1, after so many seconds."""
    return {
        "samples_per_s": 100.0,
        "bytes": 10.0,
        "largest": 10,
        "curve": [[0, 0.0, 2.0], [2, seconds, 1.0], [4, 9.0, loss]],
    }


def filled(book: Book, row: Row, took: Callable[[Trial, int], float], there: Any = None) -> None:
    """Plays all trials that a row needs."""

    def kept(row: Row, trial: Trial, seed: int) -> bool:
        return book.line(row, trial, seed) is not None

    while todo := needs(row, book, kept):
        for row, trial, seed in todo:
            book.keep(row, trial, seed, ran(took(trial, seed)), key="")


def test_a_grid_grows_once_beyond_each_edge_and_the_winner_runs_with_new_seeds(tmp_path: Path) -> None:
    book = Book(tmp_path)
    filled(book, ROW, lambda t, _: 8.0 / t["rate"] + 1.0 / t["every"])
    assert tried(ROW, book)[6:] == [{"rate": 8.0, "every": 4}, {"rate": 4.0, "every": 8}]
    assert winner(ROW, book) == {"rate": 8.0, "every": 4}, "the edge is still the best, and nothing beyond it is tried"
    assert len(book.lines()) == (6 + 2) * len(SEEDS) + len(FRESH)
    assert book.found(ROW, {"rate": 8.0, "every": 4}, FRESH) is not None


def test_beyond_an_edge_stays_within_the_knobs_range() -> None:
    row = replace(ROW, axes={"every": (1, 2, 256), "momentum": ("keep", "average")})
    assert (row.beyond("every", 1), row.beyond("every", 256), row.beyond("every", 2)) == (None, None, None)
    assert row.beyond("momentum", "keep") is None
    slow = replace(ROW, method="SlowMo", axes={"beta": (0.2, 0.5, 0.8), "every": (4, 8)})
    assert (slow.beyond("beta", 0.8), slow.beyond("beta", 0.2)) == (0.99, 0.0)
    assert (slow.beyond("every", 4), slow.beyond("every", 8)) == (2, 16)


def test_reaching_the_goal_beats_missing_it_and_a_refused_trial_is_worst(tmp_path: Path) -> None:
    book, trials = Book(tmp_path), BASE.trials()
    ends = [{"refused": "no"}, ran(math.inf, 1.2) | {"curve": [[0, 0.0, 2.0], [4, 9.0, 1.2]]}, ran(8.0)]
    for trial, found in zip(trials, ends, strict=True):
        for seed in SEEDS:
            book.keep(BASE, trial, seed, found, key="")
    assert best(BASE, book, trials) == trials[2] and best(BASE, book, trials[:2]) == trials[1]


def test_each_seed_has_separate_shards_and_stragglers() -> None:
    task = Digits(shards="dirichlet")
    regime = replace(HOME, task=task, fabric=Fabric(faults=(TransientStraggler(),)))
    (one, there), (other, _) = regime.seeded(3), regime.seeded(4)
    assert (one.shard_seed, there.faults[0].seed) == (3, 3) and one != other  # type: ignore[attr-defined]


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda c: f"{c.method} in {c.row.regime.name}")
def test_every_trial_of_a_claim_can_be_run_within_the_budget(claim: Claim) -> None:
    for row in (claim.row, claim.against):
        trials = row.trials()
        assert 1 <= len(trials) <= MOST
        made = [row.cell(trial, 10).asked() for trial in trials]
        assert len({str(e) for e in made}) == len(trials), "each axis turns something"
        edges = [{axis: value for axis in row.axes for value in row.axes[axis] if row.beyond(axis, value) is not None}]
        assert all(isinstance(row.cell({**trials[0], **edge}, 0).asked()[0], Experiment) for edge in edges)


def test_rows_with_one_name_are_equal() -> None:
    every: dict[str, Row] = {}
    for claim in CLAIMS:
        for row in (claim.row, claim.against):
            assert every.setdefault(row.name, row) == row
    assert len({Book(Path()).path(row) for row in every.values()}) == len(every)


def test_a_campaign_continues_and_repeats_changed_cells(tmp_path: Path) -> None:
    claim = replace(CLAIM, row=replace(ROW, axes={"every": (2,)}), against=replace(BASE, axes={"rate": (1.0,)}))
    book = Book(tmp_path)
    assert not home.Campaign(COSTS, book, until=0.0).run([claim]) and not book.lines()
    campaign = home.Campaign(COSTS, book, until=time.time() + 300)
    row, cell = claim.row, {"every": 2}
    for seed in SEEDS[1:]:
        book.keep(row, cell, seed, ran(2.0), key=campaign.key(row, cell, seed))
    book.keep(row, cell, SEEDS[0], ran(2.0), key="of other code")
    for seed in (*SEEDS, *FRESH):
        book.keep(claim.against, {"rate": 1.0}, seed, ran(4.0), key=campaign.key(claim.against, {"rate": 1.0}, seed))
    todo = wanted(claim, book, campaign.there)
    assert [(r.method, seed) for r, _, seed in todo] == [("LocalSGD", SEEDS[0])]
    assert row.cell(cell, 3).asked()[0].strategy == LocalSGD(every=2)
    assert not campaign.failed and Book(tmp_path).line(row, cell, SEEDS[1]) == book.line(row, cell, SEEDS[1])


def test_a_cell_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(home, "ProcessPoolExecutor", lambda workers, *_, **__: ThreadPoolExecutor(workers))
    claim = replace(CLAIM, row=replace(ROW, axes={}), against=replace(ROW, axes={}))
    book = Book(tmp_path)
    assert home.Campaign(COSTS, book, until=time.time() + 300).run([claim])
    assert [line["seed"] for line in book.lines()] == [*SEEDS, *FRESH]
    again = home.Campaign(COSTS, Book(tmp_path), until=time.time() + 300)
    assert again.run([claim]) and len(book.lines()) == len(SEEDS) + len(FRESH)


@pytest.mark.parametrize("same", [True, False])
def test_cells_of_older_code_are_kept_if_a_few_come_out_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, same: bool
) -> None:
    monkeypatch.setattr(home, "ProcessPoolExecutor", lambda workers, *_, **__: ThreadPoolExecutor(workers))
    claim = replace(CLAIM, row=replace(ROW, axes={}), against=replace(ROW, axes={}))
    campaign = home.Campaign(COSTS, Book(tmp_path), until=time.time() + 300)
    assert campaign.run([claim])
    whole = campaign.book.lines()
    for line in whole:
        found = {**line["found"], "bytes": line["found"]["bytes"] + (not same)}
        campaign.book.keep(claim.row, line["trial"], line["seed"], found, key="of other code")
    home.confirm([claim], home.Campaign(COSTS, Book(tmp_path), until=time.time() + 300))
    kept = Book(tmp_path).kept(claim.row)
    assert len(kept) == len(whole), "none is lost"
    again = home.Campaign(COSTS, Book(tmp_path), until=0.0)
    assert all(again.there(claim.row, line["trial"], line["seed"]) == same for line in whole)
    assert all(line["confirmed"]["cells"] == home.CONFIRM for line in kept)


# verdict and page


def page(tmp_path: Path, mine: Callable[[int], float], because: Because | None = None, there: float = 1.0) -> str:
    claim, book = replace(CLAIM, because=because), Book(tmp_path)
    filled(book, claim.against, lambda t, _: 4.0 + abs(t["rate"] - 2))
    filled(book, claim.row, lambda t, seed: mine(seed) + abs(t["rate"] - 2) + abs(t["every"] - 4))
    if pair := claim.proof(book):
        for (row, trial), seconds in zip(pair, (there, 4.0), strict=True):
            for seed in FRESH:
                book.keep(row, trial, seed, ran(seconds), key="")
    return home_page.text(tmp_path, (claim,))


def test_a_claim_within_the_whole_interval_is_seen(tmp_path: Path) -> None:
    said = page(tmp_path, lambda seed: 2.0)
    assert "| 2.00 (2.00 to 2.00) times as fast to the target loss (goal: at least 1) | yes |" in said
    assert "| home | LocalSGD | rate 2, every 4 | 6 + 1 |" in said and "| home | DDP | rate 2 | 3 |" in said


def test_a_claim_with_an_interval_on_both_sides_is_not_seen(tmp_path: Path) -> None:
    said = page(tmp_path, lambda seed: 2.0 if seed < 12 else 5.0)
    assert "| no: the interval contains the goal |" in said


def test_a_reason_is_tested_in_the_regime_where_it_does_not_hold(tmp_path: Path) -> None:
    reason = Because(words="The wire is fast", regime=replace(HOME, name="slow", words="a slow wire"))
    said = page(tmp_path / "a", lambda seed: 8.0, reason)
    assert "| no: see below |" in said
    assert "| LocalSGD | The wire is fast. | a slow wire | 4.00 (4.00 to 4.00) times as fast" in said
    assert "target loss | yes |" in said
    assert "target loss | yes, but not alone |" in page(tmp_path / "b", lambda seed: 8.0, reason, there=6.0)
    assert "target loss | NO |" in page(tmp_path / "d", lambda seed: 8.0, reason, there=8.5)
    assert "| no: no cause is proven yet |" in page(tmp_path / "c", lambda seed: 8.0)
    same = replace(reason, same=True)
    assert "target loss | yes |" in page(tmp_path / "e", lambda seed: 8.0, same, there=8.1)
    assert "target loss | NO |" in page(tmp_path / "f", lambda seed: 8.0, same, there=4.0)


def test_a_reason_is_tested_only_for_claims_that_are_not_seen(tmp_path: Path) -> None:
    claim = replace(CLAIM, because=Because(words="", regime=replace(HOME, name="elsewhere")))
    for seconds, more in ((2.0, 0), (8.0, 2 * len(FRESH))):
        book = Book(tmp_path / str(seconds))
        filled(book, claim.against, lambda t, _: 4.0)
        filled(book, claim.row, lambda t, _, s=seconds: s)  # type: ignore[misc]
        assert seen(claim, book) is not None
        assert len(wanted(claim, book, lambda r, t, s, b=book: b.line(r, t, s) is not None)) == more  # type: ignore[misc]


def test_numbers_of_a_method_relative_to_its_baseline() -> None:
    base, mine = {**ran(4.0, 0.5), "accuracy": 0.9}, {**ran(2.0, 0.4), "accuracy": 0.92, "bytes": 5.0}
    never = {"curve": [[0, 0.0, 2.0], [4, 9.0, 1.5]]}
    told = {what: Look(what, 0.0).value(mine, base, (1.0, 1.0)) for what in ("time", "loss", "points", "bytes", "pace")}
    assert told == pytest.approx({"time": 2.0, "loss": 1.25, "points": 2.0, "bytes": 2.0, "pace": 1.0})
    assert Look("time", 0.0).value(never, base, (1.0, 1.0)) == 0.0, "it never got there"
    assert Look("time", 0.0).value(mine, never, (1.0, 1.0)) == 4.5, "the baseline took longer than all its run"
    broken = {**mine, "curve": [[0, 0.0, 2.0], [4, 9.0, math.nan]]}
    assert Look("loss", 0.0).value(broken, base, (1.0, 1.0)) == 0.0


def test_the_summary_counts_claims_that_show(tmp_path: Path) -> None:
    page(tmp_path / "a", lambda seed: 2.0)
    assert "1 of 1 papers' claims show." in home_page.summary(tmp_path / "a", (CLAIM,))
    page(tmp_path / "b", lambda seed: 2.0 if seed < 12 else 5.0)
    said = home_page.summary(tmp_path / "b", (CLAIM,))
    assert "0 of 1 papers' claims show. For 1 more the interval contains the goal." in said
    assert "0 of 1 papers' claims show. 1 claims are not tested yet." in home_page.summary(tmp_path / "c", (CLAIM,))


def test_a_page_without_data_reports_that_for_every_claim(tmp_path: Path) -> None:
    said = home_page.text(tmp_path)
    assert said.count("| not run yet |") == len(CLAIMS) and "0 cells" in said
    book, row = Book(tmp_path), CLAIMS[0].row
    for seed in SEEDS:
        book.keep(row, row.trials()[0], seed, ran(1.0), key="")
    assert "| not run yet (1 of 24 trials) |" in home_page.text(tmp_path)
    assert json.loads(book.path(row).read_text().splitlines()[0])["trial"] == row.trials()[0]
