"""Checks that the lab does not ask a silent rank with a remote disk for its missing rows."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from workbench.cluster.run import last_rows
from workbench.cluster.run import run_watch as watch_module
from workbench.cluster.run.run_changes import Changes
from workbench.cluster.run.run_controller import RunController
from workbench.cluster.run.run_watch import RunWatch
from workbench.cluster.transport import row_encoding
from workbench.engine.record.recorder import Recorder
from workbench.experiment import Experiment
from workbench.record.timeline import columns_of
from workbench.run import Run


class Line:
    """A connection on which rank 1 does not answer; `asked` lists the requests to it alone."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def ask_rank(self, rank: int, what: str, **rest: Any) -> Any:
        self.asked.append(what)
        raise RuntimeError(f"rank {rank} does not answer")

    def ask_all(self, what: str, **rest: Any) -> dict[int, Any]:
        return {1: RuntimeError("rank 1 does not answer")}


@pytest.fixture
def live(tmp_path: Path) -> RunController:
    run = Run(Experiment(ranks=2), path=tmp_path / "run", epoch=1.0)
    run.save()
    made = RunController(run, SimpleNamespace(rpc=Line()), Changes(Experiment(ranks=2), []), "g")
    made.spool_folders[1] = "/on/another/host"
    late = columns_of("marks", [(1, 5, "log", 0.5, json.dumps({"text": "late"}))])
    made.reorder_buffer._waiting_pieces["marks", 1] = [(1, late)]  # waits for a lost message
    return made


def asks(live: RunController) -> list[str]:
    return live.cluster.rpc.asked


def test_the_watch_skips_the_silent_rank_and_passes_on_later_rows(
    live: RunController, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "SILENCE_LIMIT", -1.0)
    RunWatch(live).request_status()
    assert asks(live) == [] and live.reorder_buffer.next_seq["marks", 1] == 2


def test_the_end_skips_the_silent_rank_and_passes_on_later_rows(live: RunController) -> None:
    last_rows.gather_last_rows(live, {0, 1})
    assert asks(live) == [] and live.reorder_buffer.next_seq["marks", 1] == 2


def test_rows_are_read_from_a_disk_that_is_visible(live: RunController) -> None:
    del live.spool_folders[1]
    record = Recorder(1, live.run.path)
    record.mark(3, "log", 0.1, json.dumps({"text": "on disk"}))
    record.close()
    last_rows.read_silent_rows(live, "marks", 1)
    assert [d["text"] for _, _, d in live.run.details("log")] == ["on disk", "late"]


def test_an_answering_rank_is_asked_for_lost_rows(live: RunController) -> None:
    live.reorder_buffer.put_batch(
        row_encoding.RowBatch("g", "marks", 1, 2, columns_of("marks", [(1, 6, "log", 0.6, "{}")]))
    )
    assert asks(live) == ["rows"]


def test_the_last_rows_are_fetched_though_the_last_status_is_older(live: RunController) -> None:
    rows = columns_of("spans", [(0, 7, "step", "step", 0.0, 0.0, 0.1, 0)])
    about = {"run_id": "g", "as": 0, "state": "running", "step": 7, "over": False}
    live.status[0] = {**about, "sent": {"spans": 0}}
    live.cluster.rpc.ask_all = lambda what, **rest: {0: {**about, "sent": {"spans": 1}}}
    live.reorder_buffer._read_missing = lambda kind, rank, start: (
        [(0, rows)] if (kind, rank, start) == ("spans", 0, 0) else []
    )
    last_rows.gather_last_rows(live, {1})
    assert len(live.run.spans) == 1
