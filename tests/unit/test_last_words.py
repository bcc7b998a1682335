"""The record has the last text of a rank, even without a newline."""

from __future__ import annotations

import threading
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from tests.benched import benched
from tests.ranks import experiment
from workbench.engine.rank import session
from workbench.engine.rank.session import Session
from workbench.rank import Rank
from workbench.strategies import Strategy

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Prints(Strategy):
    """Prints the number of the step, and no newline."""

    async def step(self, rank: Rank, state: Any) -> None:
        await rank.forward()
        await rank.backward()
        await rank.update()
        print(f"step {rank.step}", end=";")


def test_what_a_rank_prints_last_is_recorded_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    marks: list[tuple[str, Any]] = []
    marked = Session.mark

    def note(self: Session, name: str, detail: dict[str, Any], t: float | None = None) -> None:
        marks.append((name, detail))
        marked(self, name, detail, t)

    monkeypatch.setattr(Session, "mark", note)
    with benched(0) as (bench, _):
        begin_session(bench, tmp_path)
        assert bench.session.join(60) and bench.session.error is None
    said = [detail["text"] if name == "log" else name for name, detail in marks if name in ("log", "end")]
    assert said[-2:] == ["step 0;step 1;", "end"]


def test_a_session_that_does_not_start_keeps_no_recorder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(session, "put_off_compiler", fail)
    with benched(0) as (bench, _):
        with pytest.raises(RuntimeError, match="can't start new thread"):
            begin_session(bench, tmp_path)
        assert not any(thread.name == "rank 0 recorder" for thread in threading.enumerate()) and not bench.is_busy
    assert not caplog.records


def begin_session(bench: Any, run_dir: Path) -> None:
    """Begins a run of one rank on this engine."""
    (run_dir / "run.json").write_text("{}")
    bench.secret = b"ours".hex()
    job = {"session": "workbench.engine.rank.session:Session", "run_id": uuid.uuid4().hex, "epoch": 0.0,
           "run_dir": str(run_dir), "rank": 0, "size": 1, "device": "cpu", "kind": "gloo", "loopback": True,
           "store": bench.host_store("workbench.engine.rank.session:Session", "127.0.0.1")}  # fmt: skip
    bench.begin_session(job, cloudpickle.dumps((experiment(1, 2, strategy=Prints()), (), [])))
