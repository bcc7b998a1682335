"""Tests that long work reports progress and remaining time until it ends."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.unit.synthetic import run as recorded
from tests.unit.test_dashboard import StillLab, noted
from widgets.controls.progress import RunProgress, list_activities, status_line
from widgets.controls.transport import Transport
from workbench.analysis import checkpoint_progress
from workbench.cluster.processes import duration_history as usual
from workbench.experiment import Experiment
from workbench.record.timeline import Sample
from workbench.run import plan, simulate
from workbench.settings import progress as doing
from workbench.strategies import DDP


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes progress reports appear at once."""
    monkeypatch.setattr(doing, "DELAY_BEFORE_BAR", -1.0)


def test_nested_parts_make_one_share_that_never_falls(at_once: None) -> None:
    seen = []
    with doing.doing("planning", 2) as outer:
        for _ in range(2):
            with doing.doing("simulating", 4) as inner:
                for k in range(1, 5):
                    inner.at(k)
                    seen.append(outer.share)
            outer.step()
        with doing.doing("once more", 4):
            seen.append(outer.share)
        assert [w.what for w in doing.under_way()] == ["planning"]
    assert seen == [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0, 1.0] and doing.under_way() == []


def test_failed_work_is_no_longer_under_way(at_once: None) -> None:
    with pytest.raises(ValueError), doing.doing("outer", 1), doing.doing("inner", 1):
        raise ValueError
    assert doing.under_way() == []


def test_remaining_time_follows_from_progress_or_from_last_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with doing.doing("simulating", 10) as parts, doing.doing("starting", usual=8.0) as whole:
        now[0] = 106.0
        assert parts.to_go is None or parts.to_go > 0
        assert whole.share == 0.75 and whole.to_go == 2.0 and repr(whole) == "starting, 75 % done, 2 s to go"
        now[0] = 120.0
        assert whole.share == 0.99 and whole.to_go == 1.0
    with doing.doing("simulating", 10) as parts:
        now[0] = 126.0
        parts.at(3)
        assert parts.to_go == pytest.approx(14.0)


def test_simulating_and_planning_are_under_way_while_they_last(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    e = Experiment(ranks=2, steps=3, pace=5, strategy=DDP(), eval_every=0)
    shares: list[tuple[str, float | None]] = []
    told = doing.Doing.tell
    here = threading.get_ident()

    def heard(self: doing.Doing) -> None:
        told(self)
        if threading.get_ident() == here:
            shares.extend((work.what, work.share) for work in doing.under_way())

    monkeypatch.setattr(doing.Doing, "tell", heard)
    simulate(e)
    assert shares == [("simulating", pytest.approx(k / 3)) for k in (1, 2, 3)]
    shares.clear()
    plan(e, strategies=[DDP()], partitions=[e.partition])
    assert {what for what, _ in shares} == {"planning"} and shares[-1][1] == 1.0


def test_the_duration_of_a_start_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    assert usual.read_duration("starting 4 engines") is None
    usual.note_duration("starting 4 engines", 5.5)
    assert usual.read_duration("starting 4 engines") == 5.5
    usual._file().write_text("[1")
    assert usual.read_duration("starting 4 engines") is None
    with pytest.raises(ValueError), usual.time_work("starting 4 engines"):
        raise ValueError
    assert usual.read_duration("starting 4 engines") is None  # a failed start gives no duration


def test_a_run_of_known_length_says_what_it_has_to_go() -> None:
    run = recorded(steps=30, step_s=0.1)
    run.settings["steps"] = 130
    progress = RunProgress().follow_run(run)
    assert progress.to_go == pytest.approx(100 / (progress.step_rate or 0))
    said = status_line("running", progress, 4)
    assert "step 29 of 130" in said and said.split(" · ")[3].endswith("s to go")
    (work,) = list_activities(run, "running", progress)
    assert work == {"what": "the run", "share": pytest.approx(30 / 130, abs=1e-3), "said": "23 % of 130 steps done"}
    run.settings["steps"] = 0
    assert (
        "to go" not in status_line("running", RunProgress().follow_run(run), 4)
        and list_activities(run, "running", progress) == []
    )


def test_a_checkpoint_is_reported_while_it_is_written() -> None:
    run = recorded(steps=20)
    assert checkpoint_progress(run.timeline) is None
    run.timeline.samples.add([Sample(0, 4, "checkpoint_copied", 1.0, 0.1)])
    noted(run, (0, 7, "saved", {"step": 4}))  # at 7 s
    assert checkpoint_progress(run.timeline) is None
    run.timeline.samples.add([Sample(r, 9, "checkpoint_copied", 9.0 + r, 0.1) for r in range(2)])
    found = checkpoint_progress(run.timeline)
    assert found is not None and (found.step, found.since, found.usual) == (9, 10.0, 6.0)
    run.live, run.epoch = True, time.time() - 14.0
    said = [w for w in list_activities(run, "running", RunProgress()) if "checkpoint" in w["what"]]
    assert said and said[0]["said"] == "writing the checkpoint of step 9, 2 s to go"
    assert said[0]["share"] == pytest.approx(4 / 6, abs=0.05)


def test_the_page_shows_the_work_of_this_process(at_once: None) -> None:
    with doing.doing("tuning", 4) as work:
        work.step()
        bar = Transport(StillLab())
        assert [(w["what"], w["share"]) for w in bar.works] == [("tuning", 0.25)]
        json.dumps(bar.works)
    bar.refresh()
    assert bar.works == []


def test_a_notebooks_bar_disappears_at_the_end_even_if_the_last_part_was_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from tqdm.notebook import tqdm

    shown: list[dict[str, Any]] = []

    class Bar(tqdm):
        def display(self, *args: Any, **kwargs: Any) -> None:
            shown.append(kwargs)

    monkeypatch.setattr(doing, "_line", lambda what: Bar(total=1.0, leave=False))
    with doing.doing("simulating", 4) as work:
        work.at(3)
    assert shown[-1].get("close") is True, shown
    assert not any(each.get("bar_style") == "danger" for each in shown)
