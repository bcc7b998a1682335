"""Tests cut connections where no rank is lost. Ranks that stored each part once continue from their last common
boundary.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from tests.ranks import ended, live, run, shipped
from tests.unit.test_parts_lost import PARTS, Seen, alike, same, setting
from tests.waiting import until
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.strategies import DDP, LocalSGD, Strategy

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]

AWAY = ("TorchFSDP", "ZeROInfinity", "ZeROOffload")  # part of the state of a rank is elsewhere, or off the device
ONCE = [name for name in PARTS if name not in ("HSDP", *AWAY) and not shipped(Strategy)[name].tables]


@pytest.fixture
def put(monkeypatch: pytest.MonkeyPatch) -> Seen:
    return Seen(monkeypatch)


def cut(e: Experiment, victim: int, at: int) -> tuple[list[Session], list[dict[str, object]]]:
    """Runs `e` and cuts all connections of one rank at about step `at`; returns all sessions and the record's
    messages.
    """
    sessions, end = live(e), time.monotonic() + 150
    while sessions[victim].rank.step < at and not sessions[victim].join(0.001):
        assert time.monotonic() < end
    sessions[victim].cut_connections()
    ended(sessions, 150)
    return sessions, [json.loads(m[3]) for s in sessions for m in s.record.noted("members")]


def settled(e: Experiment, victim: int, put: Seen) -> None:
    sessions, said = cut(e, victim, at=7)
    for s in sessions:
        assert s.error is None, s.error["traceback"]
    assert {(s.phase, s.rank.step) for s in sessions} == {("done", e.steps)}
    (mark,) = said
    assert mark["members"] == list(range(e.ranks)) and mark["gone"] == []
    assert 0 <= mark["back"] <= 1, "no more than the step in hand is made again"  # type: ignore[operator]
    assert "went on from step" in str(mark["text"]) and "with the parts of each rank" in str(mark["text"])
    (step,) = {one.step for one in put.values()}
    clean = run(replace(e, steps=step, pace=0.0))
    for one in put.values():
        same(one, clean, mean=e.strategy.periodic)


@pytest.mark.parametrize("name", ONCE)
def test_shards_stored_once_among_ranks_survive_a_cut(name: str, put: Seen) -> None:
    settled(setting(shipped(Strategy)[name](), task=alike(Whole()), bucket_mb=0.01, steps=14, pace=10.0), 1, put)


@pytest.mark.parametrize("way", [Pipeline(), Tensor()], ids=str)
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4)], ids=lambda s: type(s).__name__)
def test_stages_and_slices_survive_a_cut(strategy: DDP | LocalSGD, way: Pipeline | Tensor, put: Seen) -> None:
    settled(setting(strategy, partition=way, ranks=2, task=alike(way), bucket_mb=0.01, steps=14, pace=10.0), 0, put)


@pytest.mark.parametrize("name", AWAY)
def test_a_cut_fails_the_run_where_state_is_stored_elsewhere(name: str) -> None:
    sessions, said = cut(setting(shipped(Strategy)[name](), task=alike(Whole()), steps=0), 1, at=7)
    assert {s.phase for s in sessions} == {"failed"}
    assert said and f"strategy={name}: no other rank has its shard" in str(said[0]["text"])


@pytest.mark.parametrize("name", AWAY)
def test_a_cut_between_two_steps_fails_the_run_where_state_is_stored_elsewhere(name: str) -> None:
    sessions = live(setting(shipped(Strategy)[name](), task=alike(Whole()), steps=0))
    try:
        assert until(lambda: all(s.rank.step >= 3 for s in sessions), 150)
        sessions[0].request({"kind": "pause", "id": "pause"})
        assert until(lambda: all(s.status()["state"] == "paused" for s in sessions), 150)
        assert [s.set_up_already.rollback.list_bounds() for s in sessions] == [[]] * 4
    finally:
        for s in sessions:
            s.abort(asked=True)
    ended(sessions, 150)
