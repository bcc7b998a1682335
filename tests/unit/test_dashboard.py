"""Tests the dashboard: it joins charts and controls, and shows the run's state in every view."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.synthetic import run as recorded
from tests.waiting import until
from widgets import Dashboard
from widgets.charts.marks import all_marks
from widgets.controls.members import Members
from widgets.controls.progress import RunProgress, describe_trouble, status_line
from widgets.controls.transport import Transport
from widgets.page import display
from widgets.views.log import Log
from widgets.views.loss import Loss
from workbench.experiment import Experiment
from workbench.record.timeline import Mark
from workbench.run import Run
from workbench.settings import KnobError


class StillLab:
    """A lab without ranks that notes requests."""

    def __init__(self, run: Run | None = None, state: str = "idle") -> None:
        self.experiment = Experiment().checked()
        self.run_now, self.state, self.ranks, self.changes = run, state, 4, []
        self.progress, self.notes, self.status, self.asked = "2 of 4 engines up", [], [], []
        self.watchers: list[Any] = []

    @property
    def live(self) -> bool:
        return self.run_now is not None and self.run_now.live

    @property
    def members(self) -> tuple[int, ...]:
        return (0, 1, 3) if self.live else ()

    def stacks(self) -> str:
        return "rank 0: in forward of step 5"

    def evict(self, rank: int) -> None:
        raise KnobError(f"rank={rank}: the other ranks cannot go on without it")

    def freeze(self, rank: int) -> None:
        self.asked.append(f"freeze {rank}")

    thaw = kill = freeze

    def preempt(self, rank: int) -> None:
        self.asked.append(f"preempt {rank}")

    def resize(self, ranks: int) -> None:
        self.asked.append(f"resize {ranks}")

    def run(self) -> Run:
        self.asked.append("run")
        self.run_now, self.state = recorded(steps=30), "running"
        self.run_now.live = True
        return self.run_now

    def pause(self) -> None:
        self.asked.append("pause")

    def resume(self) -> None:
        self.asked.append("resume")

    def checkpoint(self) -> None:
        self.asked.append("checkpoint")

    def step(self) -> None:
        raise RuntimeError("there is no run to step")

    def stop(self) -> None:
        self.asked.append("stop")


def noted(run: Run, *marks: tuple[int, int, str, dict[str, Any]]) -> Run:
    run.timeline.marks.add([Mark(r, step, name, float(step), json.dumps(detail)) for r, step, name, detail in marks])
    return run


@pytest.fixture
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps dashboards of this test from refreshing by themselves."""
    monkeypatch.setattr("widgets.charts.refresh.RefreshTimer.start", lambda self: None)


def test_showing_a_lab_twice_is_two_views_of_one_dashboard(no_thread: None) -> None:
    lab = StillLab()
    first, second = display.lab(lab)._repr_mimebundle_(), display.lab(lab)._repr_mimebundle_()
    view = "application/vnd.jupyter.widget-view+json"
    assert first[view]["model_id"] == second[view]["model_id"]
    assert lab.asked == []  # showing a dashboard starts nothing


def test_a_lab_has_controls_and_a_recorded_run_has_none(no_thread: None) -> None:
    assert len(Dashboard(StillLab()).handles) == 5
    shown = Dashboard(recorded(steps=20))
    assert shown.handles == () and shown.board.run is shown.shown


def test_without_widgets_a_line_and_a_small_table_are_shown(no_thread: None) -> None:
    run = recorded(steps=20)
    bundle = Dashboard(run)._repr_mimebundle_()
    assert bundle["text/plain"] == repr(run)
    assert bundle["text/html"].count("<tr>") >= 5 and len(bundle["text/html"]) < 10_000


def test_start_shows_the_new_run_on_the_board(no_thread: None) -> None:
    lab = StillLab()
    dashboard = Dashboard(lab)
    transport = dashboard.handles[0]
    assert set(transport.may) == {"start"} and "press Start" in transport.line
    transport.handle_button("start")
    dashboard.refresh()
    assert dashboard.board.run is lab.run_now
    assert set(transport.may) == {"pause", "stop", "checkpoint"}
    assert transport.line.startswith("running · step 29 of 30 · ") and "steps/s · 4 ranks" in transport.line


@pytest.mark.parametrize(
    ("state", "may"),
    [
        ("starting", {"start"}),
        ("paused", {"resume", "step", "stop", "checkpoint"}),
        ("stopping", {"stop"}),
        ("failed", {"start"}),
        ("closed", set()),
    ],
)
def test_only_possible_actions_can_be_pressed(state: str, may: set[str]) -> None:
    assert set(Transport(StillLab(state=state)).may) == may


def test_the_loss_chart_marks_checkpoints() -> None:
    run, view = recorded(steps=30, ranks=2), Loss()
    view.update(run)
    saved = {"step": 10, "held_out": 0.5}
    noted(run, (0, 12, "saved", saved), (0, 22, "saved", {"step": 20, "held_out": None}))
    patch = view.update(run)
    drawn = [n for n, trace in enumerate(view.figure(run).data) if trace.name == "checkpoint"]
    assert [list(patch.replace[n]["x"]) for n in drawn] == [[10.0], [12.0]]
    assert list(patch.replace[drawn[0]]["y"]) == [0.5] and not view.update(run).replace


def test_an_impossible_action_gives_an_error_text() -> None:
    transport = Transport(StillLab(state="paused"))
    transport.handle_button("step")
    assert "there is no run to step" in transport.error["text"]
    transport.handle_button("resume")
    assert transport.error == {}
    transport.handle_button("checkpoint")
    assert transport.lab.asked == ["resume", "checkpoint"] and transport.error == {}


def test_the_status_line_shows_starting_engines_and_what_blocks_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = StillLab(state="starting")
    transport = Transport(lab)
    assert transport.line == "starting 4 ranks · 2 of 4 engines up"
    lab.run()
    held = "rank 2 has been in forward of step 30 for 4 s; 0, 1, 3 wait in all_reduce bucket 3"
    lab.run_now._control = SimpleNamespace(holdup=held, standing=[])
    monkeypatch.setattr("widgets.controls.progress.DELAY_BEFORE_NOTE", -1.0)
    transport.refresh()
    assert transport.line.endswith(f" · {held}") and repr(lab.run_now).endswith(f"; {held}")


def test_progress_follows_a_run_and_restarts_with_the_next() -> None:
    progress = RunProgress().follow_run(recorded(steps=30, step_s=0.1))
    assert progress.step == 29 and 1 < (progress.step_rate or 0) < 10
    progress.follow_run(None)
    assert progress.step == -1 and status_line("idle", progress, 1) == "ready, 1 rank · press Start"


def test_an_error_names_rank_step_and_operation_and_folds_identical_ones() -> None:
    detail = {"step": 7, "op": "backward", "type": "ValueError", "text": "no", "traceback": "File ..."}
    one = describe_trouble(noted(Run({}, live=True), (2, 7, "error", {"rank": 2, **detail})))
    assert one == {"title": "Error on rank 2, step 7, in backward:", "text": "ValueError: no", "more": "File ..."}
    both = noted(Run({}), (2, 7, "error", {"rank": 2, **detail}), (0, 7, "error", {"rank": 0, **detail}))
    assert describe_trouble(both)["title"].startswith("Error on ranks 0, 2, step 7")


def test_a_nan_loss_is_reported_while_the_run_is_paused() -> None:
    run = noted(Run({}, live=True), (3, 12, "nan", {"loss": "nan"}), (0, 13, "state", {"state": "paused"}))
    assert "Rank 3's loss became NaN or infinite at step 12" in describe_trouble(run)["title"]
    assert describe_trouble(noted(run, (0, 14, "state", {"state": "running"}))) == {}


def test_the_first_cause_since_the_last_resume_explains_a_pause() -> None:
    layer = {"loss": "nan", "layer": "b", "why": "the first whose output is not finite"}
    run = noted(Run({}, live=True), (3, 1, "nan", {"loss": "nan"}), (0, 2, "state", {"state": "running"}),
                (0, 5, "nan", {"loss": "", "skipped": True}), (2, 9, "nan", layer), (1, 10, "nan", {"loss": "nan"}),
                (0, 10, "state", {"state": "paused"}))  # fmt: skip
    title = "Rank 2's loss became NaN or infinite at step 9, in layer 'b' (the first whose output is not finite)"
    assert describe_trouble(run)["title"] == f"{title}; the run is paused."
    away = noted(Run({}, live=True), (1, 7, "diverged", {"loss": "500", "best": "1.5"}),
                 (0, 8, "state", {"state": "paused"}))  # fmt: skip
    assert "Rank 1's loss diverged at step 7: the loss is 500, after 1.5" in describe_trouble(away)["title"]


def test_copy_as_python_sends_code_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []
    lab = StillLab()
    transport = Transport(lab)
    monkeypatch.setattr(transport, "send", sent.append)
    transport.handle_button("copy")
    lab.run_now = Run(lab.experiment)
    transport.handle_button("copy")
    for message in sent:
        compile(message["python"], "copied", "exec")
    assert "lab.run()" in sent[0]["python"] and "ByteGPT" in sent[1]["python"]


def test_the_stacks_of_all_ranks_arrive_without_blocking_the_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []
    transport = Transport(StillLab())
    monkeypatch.setattr(transport, "send", sent.append)
    transport.handle_button("stacks")
    assert until(lambda: sent) and sent == [{"stacks": "rank 0: in forward of step 5"}]
    monkeypatch.setattr(transport.lab, "stacks", lambda: 1 / 0)
    transport.handle_button("stacks")
    assert until(lambda: "division by zero" in transport.error.get("text", ""))


def test_actions_on_single_ranks_are_done_or_refused_with_a_reason() -> None:
    run = recorded(steps=20)
    members = Members(StillLab(run))
    assert members.ranks == []
    run.live = True
    members.refresh()
    assert members.ranks == [0, 1, 3] and members.most == 4
    for message in ({"do": "freeze", "rank": 3}, {"do": "preempt", "rank": 1}, {"do": "resize", "ranks": "2"}):
        members.execute_request(message)
    assert members.lab.asked == ["freeze 3", "preempt 1", "resize 2"] and members.error == ""
    members.execute_request({"do": "evict", "rank": 1})
    assert members.error == "rank=1: the other ranks cannot go on without it"
    members.execute_request({"do": "resize", "ranks": "many"})
    assert "many" in members.error


def test_events_of_ranks_are_drawn_next_to_changes_and_listed() -> None:
    run = recorded(steps=30, ranks=4)
    known = len(all_marks(run))
    noted(run, (0, 5, "asked", {"ranks": [2], "text": "rank 2 was frozen, as asked"}),
          (0, 6, "hang", {"ranks": [2], "text": "rank 2 has said nothing for 12 s"}),
          (0, 7, "members", {"members": [0, 1, 3], "gone": [2], "text": "rank 2 is lost"}),
          (3, 8, "preempted", {"ranks": [3], "text": "rank 3 is preempted: it leaves after the current step"}),
          (0, 8, "members", {"text": "the run cannot go on"}),
          (0, 9, "rolled back", {"to": 4, "text": "all ranks went back"}))  # fmt: skip
    new = [mark for mark in all_marks(run) if mark.number == "!"]
    labels = ["rank 2 was frozen", "rank 2 hangs", "without rank 2", "rank 3 is preempted", "back to step 4"]
    assert sorted(mark.label for mark in new) == sorted(labels) and len(all_marks(run)) == known + 5
    html = Log().update(run).html
    said = ("as asked", "has said nothing", "is lost", "it leaves", "all ranks went back")
    assert html and all(text in html for text in said)


def test_the_timer_thread_ends_with_the_dashboard() -> None:
    others = threading.enumerate()
    dashboard = Dashboard(StillLab())
    (timer,) = (t for t in threading.enumerate() if t not in others and t.name == "dashboard refresh")
    dashboard.close()
    timer.join(60)
    assert dashboard.timer.errors == [] and not timer.is_alive()


def test_a_lab_is_watched_while_a_page_shows_its_dashboard_and_for_some_minutes_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = StillLab()
    board = Dashboard(lab).board
    (watches,) = lab.watchers
    assert not watches(), "a dashboard that was made and never shown is nobody's"
    board._receive_message(None, {"kind": "here", "page": "p"}, [])
    assert watches()
    board._receive_message(None, {"kind": "away", "page": "p"}, [])
    assert watches() and not board.shown
    monkeypatch.setattr("widgets.charts.board._ELSEWHERE", -1.0)
    assert not watches()
