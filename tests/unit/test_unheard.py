"""Tests late or missing messages of lost ranks: the kernel follows the newest generation."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.unit.test_ending import came
from workbench.analysis.compare.effect import _list_changes
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.experiment import Experiment
from workbench.host.core.request_answers import MAX_ANSWERS, MAX_NAMES, RequestAnswer, remember_answer
from workbench.run import Run
from workbench.strategies import DDP


def live_of(ranks: int) -> tuple[Experiment, RunController, list[tuple[str, str]]]:
    """Returns a run whose connection accepts every order, and the list of sent orders."""
    sent: list[tuple[str, str]] = []

    def ask(rank: int, what: str, **rest: Any) -> None:
        sent.append((what, rest.get("request", {}).get("kind", "")))

    e = Experiment(ranks=ranks, on_death="go on")
    line = SimpleNamespace(ask_rank=ask, ask_all=lambda what, ranks, **rest: ask(0, what, **rest))
    there: Any = SimpleNamespace(describe_death=lambda rank: None, rpc=line)
    return e, RunController(Run({}, live=True), there, Changes(e, []), "g"), sent


def went_on(e: Experiment, gone: list[int], members: list[int], step: int, turn: int) -> dict[str, Any]:
    return {"members": members, "gone": gone, "step": step, "text": f"ranks {members} went on", "turn": turn,
            "settings": e.set("ranks", len(members)).plain()}  # fmt: skip


def test_a_late_report_of_an_older_generation_answers_but_does_not_take_effect() -> None:
    e, live, _ = live_of(2)
    asked = live.changes.request_resize([0, 1, 2], [2])
    live.admit_ranks([2])
    came(live, 1, 7, 2.0, "members", went_on(e.set("bucket_mb", 0.5), [0], [1, 2], 7, 2))
    late = {**went_on(e, [], [0, 1, 2], 5, 1), "new": [2], "id": asked.id}
    came(live, 0, 5, 1.0, "members", late)
    assert asked.applied_at == 5 and live.members == (1, 2) and live.commands.leader == 1
    assert live.changes.experiment.bucket_mb == 0.5 and live.ending.ranks == {1, 2}
    came(live, 0, 5, 1.0, "state", {"state": "paused"})
    assert live.state != "paused"


def test_an_unreported_loss_does_not_end_a_run_that_goes_on() -> None:
    e, live, _ = live_of(4)
    died = {"step": 5, "op": "", "type": "EngineDied", "text": "gone", "consequence": False}
    for rank in (0, 1):  # rank 1 reported that they went on without rank 0, and was lost with its report
        live.ending.note_error(rank, {**died, "rank": rank})
    came(live, 2, 7, 2.0, "members", went_on(e, [1], [2, 3], 7, 2))
    now = live.ending.clock()
    live.ending.clock = lambda: now + 40
    assert live.ending.next_action() == "" and live.ending.ranks == {2, 3}


def test_the_kernel_does_not_wait_for_a_removed_rank_whose_report_was_lost() -> None:
    e, live, _ = live_of(3)
    asked = live.changes.request_resize([0, 1], [])
    came(live, 1, 7, 2.0, "members", went_on(e, [0], [1], 7, 2))
    came(live, 1, 5, 1.0, "resized", {"id": asked.id, "text": "rank 2 is taken out", "again": True})
    came(live, 1, 9, 3.0, "end", {"rank": 1, "state": "done"})
    assert asked.applied_at == 5 and live.ending.ranks == {1} and live.ending.find_outcome()[0] == "done"


def test_the_kernel_does_not_wait_for_a_new_rank_whose_loss_was_unreported() -> None:
    e, live, _ = live_of(2)
    live.admit_ranks([2])
    asked = live.changes.request_resize([0, 1, 2], [2])
    came(live, 1, 7, 2.0, "members", went_on(e, [0], [1], 7, 3))
    came(live, 1, 5, 1.0, "resized", {"id": asked.id, "text": "rank 2 is added", "again": True})
    assert asked.applied_at == 5 and live.ending.ranks == {1}


def test_a_repeated_message_counts_once() -> None:
    _, live, _ = live_of(3)
    said = {"path": "bucket_mb", "value": 0.5, "id": "c1", "text": "bucket_mb = 0.5"}
    for more in ({"again": True}, {"again": True}, {}, {"again": True}):
        came(live, 1, 3, 1.5, "change", {**said, **more})
        assert len(live.run.changes) == 1 == len(_list_changes(live.run.timeline, 3))


def test_late_reports_of_planned_changes_are_listed() -> None:
    e, live, _ = live_of(3)
    came(live, 0, 2, 0.5, "change", {"path": "bucket_mb", "value": 0.5, "id": ""})
    came(live, 1, 7, 2.0, "members", went_on(e, [0], [1, 2], 7, 1))
    came(live, 0, 5, 1.0, "change", {"path": "bucket_mb", "value": 0.25, "id": ""})
    assert [c.value for c in live.changes.history] == [0.5, 0.25] and live.changes.experiment.bucket_mb == e.bucket_mb


def test_a_pending_request_is_not_repeated_before_its_dependencies() -> None:
    e, live, sent = live_of(3)
    came(live, 1, 7, 2.0, "members", went_on(e, [0], [1, 2], 7, 1))
    live.request_change("strategy", type("Mine", (DDP,), {"__module__": "__main__"})())
    for _ in range(3):
        live.commands.send_next_command()
    assert sent == [("learn", ""), ("request", "change")]
    live.commands.follow_leader(2, [1])
    live.commands.send_next_command()
    assert sent[2:] == [("request", "change")], "has gone out, and has no answer"


def test_answers_are_only_kept_for_the_latest_requests() -> None:
    done: dict[str, Any] = {}
    for n in range(2 * MAX_NAMES):
        remember_answer(done, f"change {n}", RequestAnswer("change", n, 0.0, {}))
    assert list(done) == [f"change {n}" for n in range(MAX_NAMES, 2 * MAX_NAMES)]
    assert [n for n, answer in enumerate(done.values()) if answer] == list(range(MAX_NAMES - MAX_ANSWERS, MAX_NAMES))
