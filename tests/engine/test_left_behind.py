"""Tests a hanging rank on an engine that this lab cannot end: the other ranks go on without it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.labs import BOUND, apart, endless, reached, rows
from tests.waiting import until
from workbench.cluster.processes.lab_place import ClusterError
from workbench.cluster.run import evictions, run_resize
from workbench.lab import Lab
from workbench.strategies import LocalSGD

pytestmark = pytest.mark.engine


@pytest.fixture
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A lab on engines that another lab started."""
    with apart(tmp_path_factory), Lab(ranks=3, name="theirs") as theirs:
        theirs.wait(120)
        file = theirs.cluster.place.path / "security" / "ipcontroller-client.json"
        with Lab(ranks=3, name="ours", cluster=str(file)) as made:
            yield made.wait(120)


def test_survivors_go_on_and_the_stopped_rank_leaves_with_a_message_and_returns(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = lab.run(endless(ranks=3, strategy=LocalSGD(every=4), on_hang="evict", hang_after=4.0))
    reached(lab, 8)
    pid = lab.status[2]["pid"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert until(lambda: lab.members == (0, 1), BOUND), lab.notes
        (said,) = [detail for *_, detail in run.details("members")]
        assert said["gone"] == [2] and "rank 2 is lost; ranks 0, 1 went on" in said["text"]
        reached(lab, said["step"] + 8)
        assert any("rank 2 put out" in detail["text"] for *_, detail in run.details("evicted"))
    finally:
        os.kill(pid, signal.SIGCONT)

    def over() -> bool:
        answer = lab.cluster.rpc.ask_rank(2, "status")[0]
        return bool(answer["over"]) and "the other ranks went on without rank 2" in (answer["error"] or {}).get(
            "text", ""
        )

    assert until(over, BOUND), lab.cluster.rpc.ask_rank(2, "status")
    assert lab.live and lab.members == (0, 1), "that it has failed ends nothing"
    before = rows(run, 2)
    begin = run_resize.begin_sessions

    def late(*args: Any, **more: Any) -> Any:
        time.sleep(3.0)  # the lab asks for its status in this time, and the engine knows only its previous session
        return begin(*args, **more)

    monkeypatch.setattr(run_resize, "begin_sessions", late)
    lab.resize(3).wait(BOUND)
    assert until(lambda: lab.members == (0, 1, 3), BOUND), lab.notes
    assert [(row["rank"], row["pid"]) for row in lab.status][2] == (3, pid), "the engine is there once"
    assert until(lambda: rows(run, 3) > 20, BOUND), "it trains"
    lab.stop()
    assert run.wait(BOUND).state == "stopped"
    assert rows(run, 2) >= before
    assert not run.missing, "what it had recorded as rank 2 is there"


def test_a_rank_that_hosts_the_store_cannot_be_evicted_on_another_machine(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evictions, "spans_hosts", lambda engines: True)
    run = lab.run(endless(ranks=3, on_hang="wait"))
    reached(lab, 3)
    with pytest.raises(ClusterError, match=r"rank=0: engine 0 on .*"):
        lab.evict(0)
    lab.stop()
    assert run.wait(BOUND).state == "stopped"
