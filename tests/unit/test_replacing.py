"""Tests replacements for lost ranks: the lab requests them again if a fault kept them from joining."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest

from tests.waiting import until
from workbench.cluster.run import evictions
from workbench.cluster.run.run_changes import PendingChange
from workbench.settings import Change

LOST = "ranks=3: a rank or a connection was lost in the join; ask again"


class Lab:
    """A live run of two ranks, with the interface that `Evictions` uses.

    refusals: of the requested ranks, in turn
    """

    def __init__(self, patch: pytest.MonkeyPatch, refusals: list[str], dead: tuple[int, ...] = ()) -> None:
        self.asked: list[int] = []
        self.refusals = refusals
        live: Any = SimpleNamespace(state="running", over=threading.Event(), members=(0, 1), note_error=pytest.fail,
                                    ending=SimpleNamespace(is_stop_requested=False),
                                    cluster=SimpleNamespace(describe_death=lambda rank: rank in dead))  # fmt: skip
        patch.setattr(evictions, "find_start_obstacle", lambda cluster, count: False)
        patch.setattr(evictions, "resize_run", self._resize)
        self.evictions = evictions.Evictions(live)

    def _resize(self, live: Any, ranks: int) -> PendingChange:
        change = PendingChange(Change(0, "ranks", ranks))
        change.joining = [2 + len(self.asked)]
        self.asked.append(ranks)
        refused = self.refusals.pop(0) if self.refusals else None
        change.answer(applied_at=None if refused else 7, refused=refused)
        return change


def test_ranks_are_requested_again_until_they_join(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, [LOST, LOST])
    lab.evictions._begin_replacing(1)
    assert until(lambda: lab.asked == [3, 3, 3] and not lab.evictions._retries)


@pytest.mark.parametrize(
    ("refusals", "dead", "asked"),
    [([LOST] * 9, (), 4), (["group=2 does not divide 3 ranks"], (), 1), ([LOST], (2,), 1)],
    ids=["three times", "never possible", "the new rank died, so that its death is counted"],
)
def test_requests_for_ranks_end_after_a_limit(
    refusals: list[str], dead: tuple[int, ...], asked: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab = Lab(monkeypatch, refusals, dead)
    lab.evictions._begin_replacing(1)
    assert until(lambda: len(lab.asked) == asked and not _replacing())
    assert len(lab.asked) == asked


def test_ranks_are_requested_again_if_one_dies_before_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    lab, notes = Lab(monkeypatch, []), []
    lab.evictions.live.note_error = notes.append  # type: ignore[method-assign]
    begin = lab._resize

    def fails_once(live: Any, ranks: int) -> PendingChange:
        if not notes:
            raise evictions.RankNotBegun("rank 2 did not join")
        return begin(live, ranks)

    monkeypatch.setattr(evictions, "resize_run", fails_once)
    lab.evictions._begin_replacing(1)
    assert until(lambda: lab.asked == [3] and not _replacing()) and len(notes) == 1


def _replacing() -> bool:
    return any(thread.name == "run replacing" for thread in threading.enumerate())


def test_one_request_for_new_ranks_is_under_way_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(monkeypatch, [LOST])
    waits, fails = threading.Event(), threading.Event()
    monkeypatch.setattr(PendingChange, "wait", _wait_for(waits, fails))
    lab.evictions._begin_replacing(1)
    assert until(waits.is_set)
    lab.evictions._begin_replacing(2)  # two more ranks are lost while one joins
    time.sleep(0.2)
    assert lab.asked == [3]
    fails.set()
    assert until(lambda: lab.asked == [3, 5] and not _replacing()), "the rank that did not come is counted, too"


def _wait_for(waits: threading.Event, fails: threading.Event) -> Any:
    def wait(change: PendingChange, timeout: float | None = None) -> PendingChange:
        waits.set()
        if not fails.wait(timeout):
            raise TimeoutError
        return answered(change, timeout)

    answered = PendingChange.wait
    return wait
