"""Tests sinks of runs: a tracker gets rows step by step, and a report is written at the end of a block."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import workbench
from tests.unit import synthetic
from workbench.entrypoints.trackers import list_metrics, log_to
from workbench.experiment import Experiment
from workbench.record.run import hearers
from workbench.run import Run, RunError, simulate


class Stand:
    """A stub of the package trackio that keeps the logged rows and may fail at a step."""

    def __init__(self) -> None:
        self.config: dict[str, Any] = {}
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.fails_at = -1
        self.finished = False

    def init(self, project: str, name: str, config: dict[str, Any], embed: bool) -> Stand:
        self.config = {"project": project, "name": name, **config}
        return self

    def log(self, found: dict[str, float], step: int) -> None:
        if step == self.fails_at:
            raise OSError("the tracker is full")
        self.rows.append((step, found))

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def trackio(monkeypatch: pytest.MonkeyPatch) -> Stand:
    stand, module = Stand(), types.ModuleType("trackio")
    module.init = stand.init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "trackio", module)
    return stand


def test_a_live_run_is_logged_step_by_step_to_its_end(trackio: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workbench.entrypoints.trackers.POLL_INTERVAL", 0.01)
    whole, live = synthetic.run(steps=60, changes=()), Run({"ranks": 4, "lr": 0.1}, name="live", live=True)
    sink = log_to(live, "trackio", project="wires")
    for kind in ("spans", "samples", "marks"):
        rows = whole.timeline.table(kind).rows()
        for part in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
            live.timeline.table(kind).extend(part.columns)
    live.live = False
    sink.wait(60)
    assert trackio.finished and not sink.error and sink.told == 60
    assert [step for step, _ in trackio.rows] == list(range(60))
    assert trackio.config == {"project": "wires", "name": "live", "ranks": "4", "lr": "0.1"}
    step = whole.spans[(whole.spans["lane"] == "step") & (whole.spans["step"] == 30)]
    said, loss = trackio.rows[30][1], whole.samples[(whole.samples["name"] == "loss") & (whole.samples["step"] == 30)]
    assert said["step_seconds"] == pytest.approx((step.t1 - step.t0).mean())
    assert said["loss"] == pytest.approx(loss.value.mean()) and said["bytes"] == 6_000_000
    assert "held_out" in trackio.rows[20][1] and "held_out" not in said


def test_wandb_gets_each_step_in_its_own_run_and_the_failed_state(monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = Mock()
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    whole = synthetic.run(steps=20, changes=())
    whole.timeline.marks.add([(0, 19, "state", 99.0, '{"state": "failed"}')])
    sink = log_to(whole, "wandb", project="wires")
    sink.wait(30)
    assert not sink.error and whole.state == "failed"
    begun, told = wandb.init.call_args.kwargs, wandb.init.return_value
    assert begun["project"] == "wires" and begun["name"] == whole.name and begun["reinit"] == "create_new"
    assert [call.kwargs["step"] for call in told.log.call_args_list] == list(range(20))
    assert told.log.call_args_list[5].args[0].keys() >= {"step_seconds", "exposed_seconds", "bytes", "loss"}
    told.finish.assert_called_once_with(exit_code=1)


def test_a_tracker_that_fails_ends_the_sink_and_not_the_run(trackio: Stand) -> None:
    trackio.fails_at = 7
    sink = log_to(synthetic.run(steps=20, changes=()), "trackio")
    sink.wait(60)
    assert "the tracker is full" in sink.error and not trackio.finished and len(trackio.rows) == 7


def test_an_unknown_tracker_raises_run_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    monkeypatch.setitem(sys.modules, "mlflow.entities", None)
    with pytest.raises(RunError, match="tracker=mlflow: is not installed; pip install mlflow"):
        log_to(Run({"ranks": 1}), "mlflow")
    with pytest.raises(RunError, match="tracker='excel': must be one of mlflow, trackio, wandb"):
        log_to(Run({"ranks": 1}), "excel")


def test_steps_that_some_rank_has_not_ended_are_not_logged() -> None:
    run = synthetic.run(steps=10, changes=(), ranks=2)
    rows = run.timeline.spans.rows()
    cut = Run({"ranks": 2})
    cut.timeline.spans.extend(rows[~(rows.equal("lane", "step") & (rows.step == 4) & (rows.rank == 1))].columns)
    assert [step for step, *_ in list_metrics(cut, 0, 10)] == [0, 1, 2, 3, 5, 6, 7, 8, 9]
    assert list_metrics(cut, 0, 1)[0][2].keys() == {"step_seconds", "exposed_seconds", "bytes"}


def test_a_report_has_the_runs_of_its_block_even_after_an_error(tmp_path: Path) -> None:
    with workbench.report(tmp_path / "out.html") as runs:
        simulate(Experiment(ranks=2, steps=10, pace=5.0))
        simulate(Experiment(ranks=2, steps=10, pace=5.0))
    assert len(runs) == 2 and not hearers
    assert {page.name for page in tmp_path.iterdir()} == {"out.html", "out-2.html"}
    with pytest.raises(ZeroDivisionError), workbench.report(tmp_path / "broken.html"):
        simulate(Experiment(ranks=2, steps=10, pace=5.0))
        _ = 1 / 0
    assert (tmp_path / "broken.html").stat().st_size > 1e6 and not hearers
    with (
        pytest.raises(RunError, match="is not written, because no run began"),
        workbench.report(tmp_path / "none.html"),
    ):
        pass
    with pytest.raises(RunError, match="path='': must be a page"), workbench.report(""):
        pass
