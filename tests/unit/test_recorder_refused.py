"""Tests rows that no file can hold: they are lost and counted, and all other rows are kept."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from tests.unit.test_recorder import Page, fill, until
from workbench.engine.record import recorder as module
from workbench.engine.record import row_spool as spool
from workbench.engine.record.recorder import Recorder
from workbench.record import store

BAD = "a\ud800"  # half a surrogate pair: a str, but no text for a file


@pytest.fixture(autouse=True)
def no_thread_dies(monkeypatch: pytest.MonkeyPatch) -> Any:
    died: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", died.append)
    yield
    assert not died


def ended(r: Recorder, path: Path, page: Page) -> None:
    """Checks that the last mark is on disk and was pushed."""
    r.mark(9, "end", 0.9, '{"state": "done"}')
    r.close()
    names = store.read(path).timeline.marks.rows().name.tolist()
    assert "end" in names and page.details("end") == [{"state": "done"}]


def test_a_row_that_no_file_can_hold_is_lost_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_INTERVAL", 30.0)
    page = Page()
    r = Recorder(0, tmp_path, page)
    fill(r, 10)
    r.sample(4, BAD, 0.05, 5.5)
    ended(r, tmp_path, page)
    loaded = store.read(tmp_path)
    assert len(loaded.timeline.spans) == 10 and r.lost_rows == 1 and not loaded.warnings
    assert page.values("samples", "value") == [5.5], "a page can show it"
    (said,) = page.details("spool")
    assert said["lost"] == 1 and "samples" in said["text"]


def test_later_rows_of_the_kind_are_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_INTERVAL", 0.02)
    monkeypatch.setattr(spool, "WRITE_INTERVAL", 0.02)
    page = Page()
    r = Recorder(0, tmp_path, page)
    for k, name in enumerate(["loss", BAD, BAD, "loss"]):
        r.sample(k, name, 0.1 * k, float(k))
        lost = [0, 1, 2, 2][k]
        until(lambda lost=lost: r.lost_rows == lost)
        until(lambda k=k: sum(r._sent.values()) > k and not r._spool._count_waiting())
    ended(r, tmp_path, page)
    loaded = store.read(tmp_path)
    assert loaded.timeline.samples.rows().value.tolist() == [0.0, 3.0]
    assert loaded.missing == r.lost_rows == 2 and len(page.details("spool")) == 1, "said once"


def test_a_row_of_the_wrong_type_is_dropped_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PUSH_INTERVAL", 30.0)
    page = Page()
    r = Recorder(0, tmp_path, page)
    r.sample(4, "loss", 0.05, "no number")  # type: ignore[arg-type]
    ended(r, tmp_path, page)
    assert r.dropped == 1 and page.values("samples", "name") == ["dropped"]


@pytest.mark.parametrize("part", ["write_rows", "take_reports", "_close_parts"])
def test_the_end_is_pushed_whatever_fails(part: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Any) -> None:
        raise RuntimeError(f"{part} failed")

    monkeypatch.setattr(spool.RowSpool, part, fails)
    page = Page()
    r = Recorder(0, tmp_path, page)
    r.mark(9, "end", 0.9, '{"state": "done"}')
    r.close()
    assert page.details("end") == [{"state": "done"}]
