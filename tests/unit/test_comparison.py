"""Tests comparisons of two runs: verdicts for worse and alike, and the exit code."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.unit import synthetic
from tests.unit.test_cli import refused, say
from widgets.charts.feed import Feed
from workbench.analysis.compare.comparison import judge_metric
from workbench.experiment import Experiment
from workbench.run import Run, RunError, simulate
from workbench.settings import KnobError


def made(name: str, steps: int = 120, **how: object) -> Run:
    run = synthetic.run(steps=steps, changes=(), **how)  # type: ignore[arg-type]
    run.name = name
    return run


SLOW = (1, "forward", synthetic.factor("forward", 0.1))  # 10 % of a step


@pytest.fixture(scope="module")
def runs() -> tuple[Run, Run, Run]:
    return made("first", seed=1), made("again", seed=2, steps=100), made("slow", seed=3, slow=SLOW)


def test_ten_per_cent_slower_is_worse_in_time_only_and_a_repetition_is_alike(runs: tuple[Run, Run, Run]) -> None:
    first, again, slow = runs
    assert set(first.compare(again).verdict) == {"alike", "unknown"}
    found = first.compare(slow)
    lost = ("step time", "exposed communication", "loss at equal seconds")
    assert all(found.verdict[metric] == "worse" for metric in lost)
    assert found.verdict["loss at equal steps"] == found.verdict["bytes per step and rank"] == "alike"
    assert 0.006 < found.low["step time"] < found.high["step time"] < 0.0105, "of 10 ms jitter hides some"
    assert (slow.compare(first).verdict[list(lost)] == "better").all()
    assert first.compare(slow, tolerance=0.2).verdict["step time"] == "alike"
    with pytest.raises(RunError, match=r"tolerance=-1: must be a share"):
        first.compare(slow, tolerance=-1)


def test_few_equal_autocorrelated_series_are_called_different() -> None:
    rng, said = np.random.default_rng(0), []
    for _ in range(150):
        noise = rng.standard_normal((2, 100))
        for i in range(1, 100):
            noise[:, i] += 0.7 * noise[:, i - 1]
        said.append(judge_metric("step", "s", *(1 + 0.05 * noise), lacks="", tolerance=0.0).verdict)
    assert said.count("alike") >= 0.96 * len(said)


def test_losses_are_aligned_by_steps_seconds_and_examples() -> None:
    def trained(batch: int, pace: float) -> Run:
        return simulate(Experiment(ranks=2, steps=60, batch=batch, pace=pace), real=True)

    found = trained(8, 10.0).compare(trained(8, 20.0))
    assert found.difference["loss at equal steps"] == found.difference["loss at equal examples"] == 0.0
    assert found.difference["loss at equal seconds"] > 0.05 and found.difference["step time"] == pytest.approx(0.01)


def test_segments_of_a_run_are_runs_and_keep_earlier_state(runs: tuple[Run, Run, Run]) -> None:
    run = synthetic.run(steps=200, changes=((100, "strategy", "LocalSGD"),))
    before, after = run.segment(0, 100), run.segment(100, 200)
    assert len(before.spans) == (run.spans.step < 100).sum() and set(after.spans.step) == set(range(100, 200))
    assert [c.path for c in after.changes] == ["strategy"] and not before.changes
    assert after.summary()["memory_peak"] == run.summary()["memory_peak"]
    assert before.compare(after).verdict["bytes per step and rank"] == "better"
    with pytest.raises(KnobError, match=r"first=5, stop=5: must be steps"):
        run.segment(5, 5)


def test_the_commands_exit_code_reports_worse_metrics(tmp_path: Path, runs: tuple[Run, Run, Run]) -> None:
    first, again, slow = (str(run.save(tmp_path / run.name)) for run in runs)
    done = say("compare", first, slow, "--out", str(tmp_path / "both.html"))
    assert done.exit_code == 1 and "WORSE" in done.output and (tmp_path / "both.html").stat().st_size > 1e6
    assert say("compare", first, again).exit_code == 0
    assert say("compare", first, slow, "--metric", "bytes").exit_code == 0
    assert say("compare", first, slow, "--metric", "step", "--tolerance", "0.5").exit_code == 0
    assert say("compare", f"{first}@0:60", f"{first}@60:120", "--metric", "step").exit_code == 0
    assert "too short" in refused(say("compare", f"{first}@0:9", again, "--metric", "step")).replace("\n", " ")
    assert "must be the beginning of one of" in refused(say("compare", first, again, "--metric", "speed"))
    assert "no such run directory" in refused(say("compare", first, str(tmp_path / "none")))


def test_views_set_the_run_beside_this_one(runs: tuple[Run, Run, Run]) -> None:
    run, _, other = made("first", seed=1), *runs[1:]
    content, _ = Feed(run).make_opening()
    assert not {"beside"} & set(content["views"])
    run.beside = other
    content, _ = Feed(run).make_opening()
    assert "▲ worse" in content["views"]["verdicts"]["html"]
    assert len(content["views"]["beside"]["replace"]) == 6
