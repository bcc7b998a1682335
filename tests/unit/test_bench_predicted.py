"""Tests the campaign over a Llama and the simulator's timings: coverage, resumption, pages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench import across, llama, scale
from tests.bench.cells import costs_as_plain, costs_from_plain
from tests.ranks import experiment
from workbench import Costs, simulate
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.run import Run
from workbench.settings import members
from workbench.sim import Line
from workbench.strategies import Strategy


def test_every_strategy_and_every_compressor_is_among_the_settings() -> None:
    names = [name for name, _ in llama.settings()]
    assert len(names) == len(set(names)) >= 60
    for family, but in ((Strategy, {"TorchDDP", "TorchFSDP"}), (Compressor, llama.WRAPPERS)):
        for name, cls in members(family).items():
            if cls.__module__.startswith("workbench.") and name not in but:
                assert any(name in each.replace(",", "").split() for each in names), name
    assert {e for _, e in llama.settings()}.isdisjoint(llama.calibrations().values())


@pytest.mark.ranks
def test_settings_get_a_fitting_task_and_no_warm_up_lasts_to_the_end() -> None:
    for name, e in llama.settings():
        short = replace(e, steps=1).checked()
        if e.task in llama.TASKS.values() or e.partition.depth > 2:
            assert simulate(short).state == "done", name
        assert getattr(e.strategy, "warmup", 0) < llama.SETTLE, name


@pytest.mark.ranks
def test_an_interrupted_campaign_continues_and_reports_its_errors(tmp_path: Path) -> None:
    made: list[int] = []
    # interrupted by a person, failed by a run
    stops: list[BaseException] = [KeyboardInterrupt(), RuntimeError("the ranks are gone")]

    def ran(e: Experiment) -> Run:
        if len(made) == 2:
            raise stops.pop()
        made.append(e.steps)
        return simulate(e, costs=Costs(forward=0.011, backward=0.022))

    every = {f"setting {k}": experiment(2, 12, bucket_mb=0.1 * k) for k in (1, 2, 3)}
    given = Costs(forward=0.01, backward=0.02)
    with pytest.raises(KeyboardInterrupt):
        for _ in stops.copy():
            campaign = llama.Campaign(tmp_path / "llama.json", ran)
            for name, e in every.items():
                campaign.measure(name, e, given)
            assert campaign.failed == ["setting 3"]  # later settings had their turn
    found = json.loads((tmp_path / "llama.json").read_text())
    assert [row["setting"] for row in found["rows"]] == ["setting 1", "setting 2"]
    made.clear()
    again = llama.Campaign(tmp_path / "llama.json", ran)
    for name, e in every.items():
        again.measure(name, e, given)
    assert len(made) == 1 and len(again.found["rows"]) == 3
    again.measure("refused", experiment(2, 0), given)
    said = llama.section(again.found)
    assert (
        "3 settings: median error 9.1 % (goal: at most 3 %: NOT kept); worst error 9.1 % (goal: at most 10 %: kept)"
        in said
    )
    assert "- refused: steps=0" in said


def test_costs_survive_json_with_their_lines() -> None:
    costs = Costs(codec={"TopK": (Line(1e-3, 2e-9), 0.0, 3e-9)}, coder={"Cast": (1e-9, Line(1e-4, 2e-9))})
    assert costs_from_plain(json.loads(json.dumps(costs_as_plain(costs)))) == costs


@pytest.mark.ranks
def test_measured_settings_are_predicted_again_from_kept_calibrations(tmp_path: Path, monkeypatch: Any) -> None:
    e = experiment(2, 12)
    monkeypatch.setattr(llama, "calibrations", lambda: {"DDP": e, "short messages": e})
    monkeypatch.setattr(llama, "settings", lambda: iter([("one", e)]))
    given = Costs(forward=0.01, backward=0.02)
    known: dict[str, Any] = {"costs": dict.fromkeys(("DDP", "short messages"), costs_as_plain(given))}
    known["rows"] = [{"setting": "one", "predicted": 1.0, "measured": 0.04}]
    (tmp_path / "llama.json").write_text(json.dumps(known))
    llama.Campaign(tmp_path / "llama.json", lambda *_: pytest.fail("nothing is to be measured")).predict()
    (row,) = json.loads((tmp_path / "llama.json").read_text())["rows"]
    assert row["measured"] == 0.04 and row["predicted"] == pytest.approx(0.03, rel=0.05)


@pytest.mark.ranks
def test_the_page_shows_the_simulators_time_and_what_misses_the_goal() -> None:
    row = scale.once("DDP", 4, 2)
    assert row["seconds"] > 0 and row["spans"] > 0
    rows = {"DDP": {"each": {**row, "seconds": 11.0}}, "Gossip": {"each": {**row, "seconds": 29.0}},
            "X": {"each": {"refused": "cannot be"}}, "KFAC": {"each": {"late": 300.0, "load": 2.0}},
            "ZeRO3": {"each": {**row, "seconds": 99.0}, "alike": {**row, "seconds": 2.5}}}  # fmt: skip
    said = scale.text({"ranks": 1024, "steps": 100, "rows": rows})
    assert (
        "No way meets the goal for DDP and KFAC." in said
        and "- X: cannot be" in said
        and "| Gossip | - | 29.0 |" in said
    )
    assert "| ZeRO3 | 2.5 | 99.0 |" in said and "| KFAC | - | over 300 | - | - | 2 |" in said


@pytest.mark.ranks
def test_models_across_ranks_on_sites_with_codecs_are_measured_once_each(tmp_path: Path, monkeypatch: Any) -> None:
    every = dict(across.settings())
    assert sum(e.fabric.site > 0 for e in every.values()) >= 8
    assert "KFAC" in {type(e.strategy).__name__ for e in every.values()}
    assert {e.fabric.link for e in across.calibrations().values()}.isdisjoint({e.fabric.link for e in every.values()})
    made: list[Experiment] = []

    def ran(e: Experiment) -> Run:
        made.append(e)
        return simulate(e, costs=Costs(forward=0.011, backward=0.022))

    known, few = experiment(2, 16), {f"{k}, two sites": experiment(2, 16, bucket_mb=0.1 * k) for k in (1, 2)}
    monkeypatch.setattr(across, "calibrations", lambda: {"DDP": known})
    for count in (1, 2, 2):  # stopped after one, and then started again
        across.Campaign(tmp_path / "across.json", ran).measure(list(few.items())[:count])
    assert made == [known, *few.values()]
    found = json.loads((tmp_path / "across.json").read_text())
    found["rows"][0]["measured"]["bubble"] = found["rows"][0]["predicted"]["bubble"] = 0.1
    assert "| step on two sites | 2 |" in across.section(found)
