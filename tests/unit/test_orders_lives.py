"""Checks that an order only affects the session it is meant for, even if it arrives late."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.benched import begin, benched
from tests.waiting import until
from workbench.cluster.engines.engine_server import EngineServer
from workbench.cluster.run.command_queue import CommandQueue
from workbench.cluster.transport.rpc_client import RpcClient


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
def engine() -> Iterator[tuple[EngineServer, RpcClient]]:
    """An engine reachable as rank 0 and, after it rejoined, as rank 3."""
    with benched(0, 3) as it:
        yield it


def begun(bench: EngineServer, path: Path, generation: str, rank: int, kind: type[Brief] = Brief) -> Brief:
    return begin(bench, kind, path, generation, rank)  # type: ignore[no-any-return]


def orders(line: RpcClient, generation: str) -> CommandQueue:
    """Returns the orders of a run. An order that raises fails the test."""

    def failed(failure: BaseException) -> None:
        raise failure

    ending = SimpleNamespace(
        living_ranks={0}, dead_ranks=set(), outlives=lambda: False, note_removed=lambda ranks, step: None
    )
    return CommandQueue(
        SimpleNamespace(cluster=SimpleNamespace(rpc=line), run_id=generation, ending=ending, step=0, note_error=failed)
    )  # type: ignore[arg-type]


def carried(o: CommandQueue) -> None:
    while not o._queue.empty():
        o.send_next_command()


def test_orders_of_a_finished_run_do_not_affect_the_next_one(
    engine: tuple[EngineServer, RpcClient], tmp_path: Path
) -> None:
    bench, line = engine
    first = begun(bench, tmp_path, "a", 0)
    first.over = True
    second = begun(bench, tmp_path, "b", 0)
    late = orders(line, "a")
    late.put_command("abort", everyone=True, asked=True)
    late.put_command("hurry", everyone=True)
    late.put_command("request", request={"kind": "stop"})
    carried(late)
    assert (second.over, second.hurried, second.asked) == (False, False, [])
    own = orders(line, "b")
    own.put_command("request", request={"kind": "stop"})
    own.put_command("hurry", everyone=True)
    own.put_command("abort", everyone=True, asked=True)
    carried(own)
    assert (second.over, second.hurried, second.asked) == (True, True, ["stop"])


def test_a_dismissed_rank_that_rejoined_with_another_number_stays(
    engine: tuple[EngineServer, RpcClient], tmp_path: Path
) -> None:
    bench, line = engine
    begun(bench, tmp_path, "a", 0).over = True  # it left by itself before the order
    again, o = begun(bench, tmp_path, "a", 3), orders(line, "a")
    o.dismiss_ranks([0])
    carried(o)
    assert not again.over
    o.dismiss_ranks([3])
    carried(o)
    assert again.over


def test_a_rank_dismissed_before_its_start_does_not_wait_for_an_invitation(
    engine: tuple[EngineServer, RpcClient], tmp_path: Path
) -> None:
    """Its session starts through the controller, where the connection's orders neither overtake it nor wait for it."""
    bench, line = engine
    o = orders(line, "a")
    o.dismiss_ranks([0])
    carried(o)
    assert begun(bench, tmp_path, "a", 0).over
    assert until(lambda: line.ask_rank(0, "status", timeout=10)[0]["over"])
    assert not begun(bench, tmp_path, "a", 3).over and not begun(bench, tmp_path, "b", 0).over


class NeverStarts(Brief):
    """A session whose start fails."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_an_engine_whose_session_did_not_start_answers_every_order(
    engine: tuple[EngineServer, RpcClient], tmp_path: Path
) -> None:
    bench, line = engine
    with pytest.raises(RuntimeError, match="can't start new thread"):
        begun(bench, tmp_path, "a", 0, NeverStarts)
    late = orders(line, "a")
    late.put_command("request", request={"kind": "stop"})
    late.put_command("hurry", everyone=True)
    late.put_command("abort", everyone=True, asked=True)
    carried(late)
    assert line.ask_rank(0, "request", request={"kind": "stop"})[0] is None
    assert line.ask_rank(0, "outlive")[0] == "its engine has no run"
    assert line.ask_rank(0, "status")[0]["state"] == "idle" and line.ask_rank(0, "files")[0] == []
    assert not begun(bench, tmp_path, "b", 0).over
