"""Completes a record with last rows, and with ends that ranks could not record."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from workbench.cluster.observe.run_folder import DISK_TIMEOUT, run_with_timeout
from workbench.cluster.processes.lab_processes import wait_for
from workbench.cluster.run.run_state import RunState
from workbench.cluster.transport import disk_rows
from workbench.record.timeline import KINDS
from workbench.settings.describe_error import text_of

ARRIVAL_TIMEOUT = 1.0  # seconds for a message
ALL_ROWS = 1 << 62

Marks = list[tuple[int, str, float, dict[str, Any]]]


def gather_last_rows(live: RunState, silent: set[int]) -> None:
    """Fetches missing rows; those of `silent` ranks only from visible disks."""
    _update_sent_counts(live, silent)
    time.sleep(0.1)  # for messages on their way
    wait_for(lambda: _have_arrived(live, silent), ARRIVAL_TIMEOUT)  # these need not be on a disk
    for rank in live.ranks:
        sent = live.status.get(rank, {}).get("sent", {})
        for kind in KINDS:
            if rank in silent:
                read_silent_rows(live, kind, rank)
            else:
                live.reorder_buffer.fetch_missing(kind, rank, sent.get(kind, ALL_ROWS))
        if rank not in silent and live.is_elsewhere(rank):
            _fetch_rows(live, rank)


def _update_sent_counts(live: RunState, silent: set[int]) -> None:
    """The last status may be older than the counts."""
    asked = [rank for rank in live.ranks if rank not in silent and not live.status.get(rank, {}).get("over")]
    for rank, answer in live.cluster.rpc.ask_all("status", timeout=ARRIVAL_TIMEOUT, ranks=asked).items():
        if isinstance(answer, dict) and (answer["run_id"], answer["as"]) == (live.run_id, rank):
            live.status[rank] = answer


def _have_arrived(live: RunState, silent: set[int]) -> bool:
    sent_counts = {rank: live.status.get(rank, {}).get("sent", {}) for rank in live.ranks if rank not in silent}
    return all(
        live.reorder_buffer.next_seq[kind, rank] >= n for rank, sent in sent_counts.items() for kind, n in sent.items()
    )


def read_silent_rows(live: RunState, kind: str, rank: int) -> None:
    """Reads a silent rank's rows, if its disk is visible. Waiting rows pass in any case.

    It does not ask the rank: each missing answer delays all rows for seconds.
    """
    if live.is_elsewhere(rank):
        live.reorder_buffer.release_rows(kind, rank)
    else:
        live.reorder_buffer.fetch_missing(kind, rank, ALL_ROWS)


def fetch_departed_rows(live: RunState, rank: int, sent: dict[str, int]) -> None:
    """Fetches the last rows of a rank left behind."""
    for kind in KINDS:
        live.reorder_buffer.fetch_missing(kind, rank, sent.get(kind, ALL_ROWS))
    if live.is_elsewhere(rank):
        _fetch_rows(live, rank)


def _fetch_rows(live: RunState, rank: int) -> None:
    def read(name: str, start: int) -> bytes:
        return live.cluster.rpc.ask_rank(rank, "file", name=name, start=start)[1]

    try:
        disk_rows.copy_files(live.cluster.rpc.ask_rank(rank, "files")[0], read, Path(live.run.path or "."))
    except OSError:
        live.hang_monitor.record_monitor.note_failure()


def record_deaths(live: RunState, dead: set[int]) -> None:
    """Records dead ranks' errors."""
    for rank in sorted(dead):
        about = {k: v for k, v in (live.ending.errors.get(rank) or live.ending.lost[rank] or {}).items() if k != "t"}
        _add_marks(live, rank, [(about["step"], "error", time.time() - live.run.epoch, about)])


def record_state(live: RunState, state: str, error: BaseException | None) -> None:
    """Records the run's end, unless rank 0 has."""
    state_marks = live.run.details("state")
    if live.run.path is None or (state_marks and state_marks[-1][2].get("state") == state):
        return
    now = max(time.time() - live.run.epoch, state_marks[-1][1] if state_marks else 0.0)
    _add_marks(
        live, 0, [(live.step, "state", now, {"state": state, "detail": "" if error is None else text_of(error)})]
    )


def _add_marks(live: RunState, rank: int, marks: Marks) -> None:
    steps, names, times, details = zip(*marks, strict=True)
    columns = {"rank": [rank] * len(marks), "step": steps, "name": names, "t": times}
    columns["detail"] = [json.dumps(d) for d in details]
    live.run.append("marks", rank, live.reorder_buffer.next_seq["marks", rank], columns)
    live.reorder_buffer.next_seq["marks", rank] += len(marks)
    try:
        run_with_timeout(DISK_TIMEOUT, lambda: disk_rows.add_marks(Path(live.run.path or "."), rank, marks))
    except OSError:
        live.hang_monitor.record_monitor.note_failure()
