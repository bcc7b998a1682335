"""Checks that an order only affects the session it is meant for, even if it arrives late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benched import begin, benched
from tests.waiting import until
from workbench.cluster.engines.worker import Bench
from workbench.cluster.run.orders import Orders
from workbench.cluster.transport.line import Line


class Brief:
    """A session that waits until a test ends it."""

    def __init__(self, experiment: Any, **rest: Any) -> None:
        self.started = self.over = self.hurried = False
        self.asked: list[str] = []

    def start(self) -> None:
        self.started = True

    def join(self, timeout: float | None = None) -> bool:
        return self.over

    def status(self) -> dict[str, Any]:
        return {"state": "waiting", "step": 0, "busy": "", "error": None}

    def request(self, what: dict[str, Any]) -> None:
        self.asked.append(what["kind"])

    def hurry(self) -> None:
        self.hurried = True

    def abort(self, asked: bool = False) -> None:
        self.over = True

    def mark(self, name: str, detail: dict[str, Any]) -> None: ...


@pytest.fixture
def engine() -> Iterator[tuple[Bench, Line]]:
    """An engine reachable as rank 0 and, after it rejoined, as rank 3."""
    with benched(0, 3) as it:
        yield it


def begun(bench: Bench, path: Path, generation: str, rank: int, kind: type[Brief] = Brief) -> Brief:
    return begin(bench, kind, path, generation, rank)  # type: ignore[no-any-return]


def orders(line: Line, generation: str) -> Orders:
    """Returns the orders of a run. An order that raises fails the test."""
    def failed(failure: BaseException) -> None:
        raise failure

    ending = SimpleNamespace(living={0}, dead=set(), outlives=lambda: False, outlived=lambda ranks, step: None)
    return Orders(SimpleNamespace(cluster=SimpleNamespace(line=line), generation=generation, ending=ending, step=0,
                                  note=failed))  # type: ignore[arg-type]  # fmt: skip


def carried(o: Orders) -> None:
    while not o._queue.empty():
        o.carry()


def test_orders_of_a_finished_run_do_not_affect_the_next_one(engine: tuple[Bench, Line], tmp_path: Path) -> None:
    bench, line = engine
    first = begun(bench, tmp_path, "a", 0)
    first.over = True
    second = begun(bench, tmp_path, "b", 0)
    late = orders(line, "a")
    late.put("abort", everyone=True, asked=True)
    late.put("hurry", everyone=True)
    late.put("request", request={"kind": "stop"})
    carried(late)
    assert (second.over, second.hurried, second.asked) == (False, False, [])
    own = orders(line, "b")
    own.put("request", request={"kind": "stop"})
    own.put("hurry", everyone=True)
    own.put("abort", everyone=True, asked=True)
    carried(own)
    assert (second.over, second.hurried, second.asked) == (True, True, ["stop"])


def test_a_dismissed_rank_that_rejoined_with_another_number_stays(engine: tuple[Bench, Line], tmp_path: Path) -> None:
    bench, line = engine
    begun(bench, tmp_path, "a", 0).over = True  # it left by itself before the order
    again, o = begun(bench, tmp_path, "a", 3), orders(line, "a")
    o.dismiss([0])
    carried(o)
    assert not again.over
    o.dismiss([3])
    carried(o)
    assert again.over


def test_a_rank_dismissed_before_its_start_does_not_wait_for_an_invitation(
    engine: tuple[Bench, Line], tmp_path: Path
) -> None:
    """Its session starts through the controller, where the connection's orders neither overtake it nor wait for it."""
    bench, line = engine
    o = orders(line, "a")
    o.dismiss([0])
    carried(o)
    assert begun(bench, tmp_path, "a", 0).over
    assert until(lambda: line.ask(0, "status", timeout=10)[0]["over"])
    assert not begun(bench, tmp_path, "a", 3).over and not begun(bench, tmp_path, "b", 0).over


class NeverStarts(Brief):
    """A session whose start fails."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_an_engine_whose_session_did_not_start_answers_every_order(
    engine: tuple[Bench, Line], tmp_path: Path
) -> None:
    bench, line = engine
    with pytest.raises(RuntimeError, match="can't start new thread"):
        begun(bench, tmp_path, "a", 0, NeverStarts)
    late = orders(line, "a")
    late.put("request", request={"kind": "stop"})
    late.put("hurry", everyone=True)
    late.put("abort", everyone=True, asked=True)
    carried(late)
    assert line.ask(0, "request", request={"kind": "stop"})[0] is None
    assert line.ask(0, "outlive")[0] == "its engine has no run"
    assert line.ask(0, "status")[0]["state"] == "idle" and line.ask(0, "files")[0] == []
    assert not begun(bench, tmp_path, "b", 0).over
