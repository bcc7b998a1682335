"""Tests that a dashboard's state is plain JSON and comes back, and that watchers control nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.unit import synthetic
from tests.unit.synthetic import run as recorded
from tests.unit.test_dashboard import StillLab
from tests.waiting import until
from widgets import Dashboard
from widgets.charts.feed import Feed
from widgets.page import display
from widgets.views.causes import Causes
from workbench.settings import KnobError
from workbench.sim.plan.advice import Advice, AdviceTable, Suggestion


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keeps dashboards from refreshing by themselves."""
    monkeypatch.setattr("widgets.charts.refresh.RefreshTimer.start", lambda self: None)


class Steered(StillLab):
    """Notes the settings that it receives."""

    name = "steered"

    def set(self, path: str, value: Any) -> None:
        if path == "bad":
            raise KnobError("bad: there is no such knob")
        self.asked.append(f"{path}={value}")


def training() -> Steered:
    run = recorded(steps=60)
    run.live = True
    return Steered(run, "running")


def test_what_is_open_chosen_and_held_still_comes_back_on_another_dashboard() -> None:
    first = Dashboard(training())
    first.board.looks = {"tables": ["loss"], "rank": 2, "pin": {"view": "timeline", "row": 7, "lane": -0.3}}
    first.board._receive_message(None, {"kind": "hello", "page": "p"}, [])
    first.board.send_news()
    first.board._receive_message(None, {"kind": "ask", "page": "p", "view": "timeline", "request": {"at": 12}}, [])
    first.board._receive_message(None, {"kind": "ask", "page": "p", "view": "timeline", "request": {"steps": 4}}, [])
    first.handles[1].opened, first.handles[3].opened = ["link"], True
    first.what_if.set_fixed(16, 2.0, 0.5)
    first.fold.selected_index = 0
    said = json.dumps(first.state())
    second = Dashboard(training())
    second.restore(said)
    assert second.state() == json.loads(said) and json.loads(said)["what_if"]["bandwidth"] == 100.0
    second.board._receive_message(None, {"kind": "hello", "page": "p"}, [])
    second.board.send_news()
    timeline = second.board._feed.find_view("timeline") if second.board._feed else None
    assert timeline is not None and (timeline.at, timeline.steps) == (12, 4)  # type: ignore[attr-defined]


def test_another_run_is_followed_from_its_first_step_with_nothing_pinned() -> None:
    dashboard = Dashboard(training())
    dashboard.restore({"version": 1, "at": 9, "steps": 2, "pin": {"view": "timeline", "row": 7}, "rank": 1})
    dashboard.board.show(recorded(steps=20))
    now = dashboard.state()
    assert (now["at"], now["steps"], now["pin"], now["rank"]) == (None, 2, None, 1)


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ("{", "JSON text"),
        ({}, "version 1"),
        ([], "version 1"),
        ({"version": 1, "tables": "loss"}, "state tables='loss'"),
        ({"version": 1, "rank": True}, "state rank=True"),
        ({"version": 1, "theme": "blue"}, "'light', 'dark'"),
        ({"version": 1, "what_if": {"ranks": -1}}, "numbers >= 0"),
    ],
)
def test_an_invalid_state_is_refused_with_a_reason(state: Any, said: str) -> None:
    dashboard = Dashboard(recorded(steps=20))
    before = dashboard.state()
    with pytest.raises(KnobError, match=said):
        dashboard.restore(state)
    assert dashboard.state() == before


def test_who_watches_has_nothing_to_steer_by_and_whatever_a_page_says_changes_nothing() -> None:
    lab = training()
    watched = display.lab(lab, read_only=True)
    assert watched is display.lab(lab, read_only=True) and watched is not display.lab(lab)
    bar, *rest = watched.handles
    assert [type(part).__name__ for part in rest] == ["Requests"] and bar.may == {} and "running" in bar.line
    for what in ("stop", "pause", "checkpoint", "start", "copy", "stacks"):
        bar.handle_button(what)
    assert lab.asked == []
    watched.board._receive_message(None, {"kind": "hello", "page": "p"}, [])
    watched.board.send_news()
    assert watched.board._feed is not None
    assert all(view.setter is None for view in watched.board._feed.views)


def test_docking_without_sidecar_is_refused_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("widgets.page.side.has_sidecar", lambda: False)
    monkeypatch.setattr("widgets.page.dashboard.has_sidecar", lambda: False)
    dashboard = Dashboard(training())
    assert not dashboard.handles[0].docks
    with pytest.raises(KnobError, match=r"training-workbench\[dock\]"):
        dashboard.dock()
    with pytest.raises(KnobError, match="split-right"):
        dashboard.dock("left")


def advice(*settings: dict[str, Any]) -> AdviceTable:
    tries = tuple(Suggestion(s, 0.14, 0.02, False) for s in settings)
    return AdviceTable([Advice("network", (), 0.02, 0.2, "Standing still while data move.", tries)])


def asked(view: Causes, run: Any, request: dict[str, Any]) -> str:
    """Returns the panel's text once the answer to a request has arrived."""
    view.ask(request)
    assert until(lambda: not view._is_asking)
    return view._said if (html := view.update(run).html) is None else html  # type: ignore[return-value]


def test_a_line_of_advice_is_tried_by_its_button_as_a_change_like_any_other(monkeypatch: pytest.MonkeyPatch) -> None:
    run, lab = synthetic.run(steps=60, slow=(2, "backward", 1.5), changes=()), Steered()
    monkeypatch.setattr(type(run), "advice", lambda self: advice({"bucket_mb": 4.0}, {"strategy.every": 8}))
    feed = Feed(run, (Causes,), lab.set)
    (view,) = feed.views
    assert isinstance(view, Causes)
    feed.make_opening()
    said = asked(view, run, {"advise": True})
    assert said.count("Try this</button>") == 1 and "turn bucket_mb to 4: the simulator says 14 % faster" in said
    assert "Try another</button>" in said and lab.asked == []
    said = asked(view, run, {"try": [0, 1]})
    assert lab.asked == ["strategy.every=8"] and "Tried: turn strategy.every to 8" in said and "Try this" not in said
    view.ask({"try": [0, 0]})  # the advice was for other settings
    assert lab.asked == ["strategy.every=8"]


def test_refused_advice_is_reported_and_watchers_cannot_try_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run, lab = synthetic.run(steps=60, slow=(2, "backward", 1.5), changes=()), Steered()
    monkeypatch.setattr(type(run), "advice", lambda self: advice({"bad": 1}))
    view, watching = Causes(), Causes()
    view.setter = lab.set
    for each in (view, watching):
        each.update(run)
        assert ("Try this" in asked(each, run, {"advise": True})) == (each is view)
    assert "Refused: bad: there is no such knob" in asked(view, run, {"try": [0, 0]}) and lab.asked == []
    watching.ask({"try": [0, 0]})
    monkeypatch.setattr(type(run), "advice", lambda self: 1 / 0)
    assert "division by zero" in asked(view, run, {"advise": True})
