"""Tests the hour of training with eight ranks: growth is found, flat values are not, the page is read."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests import looking
from tests.bench import soak_page
from tests.looking import Page, Texts, disk, grown, process, record
from tests.soak import TURNED, drawn, written
from tests.unit import synthetic
from tests.waiting import until
from widgets.charts.board import Board


def looks(minutes: int, leak: float = 0.0) -> list[dict[str, Any]]:
    """Returns a look per minute: the record grows by 1 MB, one engine by `leak`, another is killed half-way."""

    def of(t: int) -> dict[str, Any]:
        flat = {"pss": 100.0, "anonymous": 90.0, "descriptors": 50, "threads": 9}
        engines = {"0 100": {**flat, "pss": 200.0 + leak * t}, f"{4 + 4 * (t > minutes / 2)} 104": flat}
        return {"t": 60.0 * t, "step": 10 * t, "kernel": {**flat, "pss": 100.0 + t}, "controller": flat,
                "engines": engines, "record": {"rows": 1000 * t, "mb": float(t)}, "disk": 2.0 * t}  # fmt: skip

    return [of(t) for t in range(minutes)]


def test_growth_is_distinguished_from_the_records_size() -> None:
    found = grown(looks(60, leak=1.0))
    assert found["kernel pss"] == [114.5, 154.5, round(154.5 / 114.5, 4)]
    assert found["kernel pss without the record"] == [100.0, 100.0, 1.0]
    assert found["rank 0 pss"][:2] == [214.5, 254.5] and found["rank 0 threads"] == [9, 9, 1.0]
    assert not any(name.startswith(("rank 4", "rank 8")) for name in found), "they were not there all the time"
    assert grown(looks(25)) == {}, "the last ten minutes are to begin after the first window"
    assert "Grew by more than 5 %: the engine that grew most, of 1: MB (1.19)." in soak_page.verdict(found)
    assert soak_page.verdict(grown(looks(60))) == "Nothing grew by more than 5 %, except for the record."


def test_the_page_has_the_actions_of_the_hour() -> None:
    found = {"minutes": 60.0, "ranks": 8, "done": {"applied": 700, "killed": 2}, "wrong": [], "back": [20.0, 30.0],
             "page": {"messages": 9000, "mb": 80.5, "longest": 2_000_000, "opened": 12}, "steps": 12345,
             "grown": grown(looks(60)), "looks": []}  # fmt: skip
    text = soak_page.text(found).replace("\n", " ")
    assert "8 ranks train for 60 minutes" in text and "The ranks applied 700 live changes and refused 0." in text
    assert "2 engines were killed and replaced (25 s until" in text and "again 11 times.  Nothing went wrong.  " in text
    assert "| the kernel without the record, MB | 100 | 100 | 1.00 |" in text
    assert "1 went wrong:\n\n- Stuck: at" in soak_page.text({**found, "wrong": ["Stuck: at\nstep 3"]})
    assert soak_page.text({}) == "Not run yet: `make soak`."


def test_the_written_results_are_read_back() -> None:
    import json

    found = {"seed": 7, "looks": looks(3)}
    assert json.loads(written(found)) == found and len(written(found).splitlines()) == 8


def test_a_process_a_record_and_a_folder_are_measured(tmp_path: Path) -> None:
    me, run = process(os.getpid()), synthetic.run(ranks=2, steps=30)
    assert 10 < me["anonymous"] and 10 < me["pss"] and me["threads"] >= 1
    with open(tmp_path / "one", "wb") as file:
        file.write(bytes(2**20))
        assert process(os.getpid())["descriptors"] == me["descriptors"] + 1
    assert disk(tmp_path) == 1.0
    texts = Texts()
    first, again = record(run.timeline, texts), record(run.timeline, texts)
    assert first == again and first["rows"] == sum(map(len, (run.spans, run.samples, run.marks)))
    spans = len(run.spans) * 46 / 2**20
    assert spans < first["mb"] < 3 * spans + 1


def test_the_page_greets_acknowledges_and_is_reloaded() -> None:
    board = Board(synthetic.run(ranks=2, steps=30))
    page = Page(board, again=0.5)
    try:
        assert until(lambda: page.opened >= 2, 20) and page.nbytes > 1000 and page.longest <= page.nbytes
        assert until(lambda: not board._waiting, 5), "what it drew it has said"
    finally:
        page.close()
    time.sleep(0.1)
    assert not page._thread.is_alive()


def test_the_drawn_changes_depend_on_the_seed() -> None:
    turns = [drawn(random.Random(seed)) for seed in range(60)]
    assert turns == [drawn(random.Random(seed)) for seed in range(60)]
    assert {what for what, _ in turns} <= set(TURNED) and len({what for what, _ in turns}) >= 5


def test_a_failed_look_is_reported_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "EVERY", 0.05)
    said: list[str] = []
    run = synthetic.run(ranks=1, steps=30)
    lab: Any = SimpleNamespace(run_now=run, _live=None)
    seen = looking.Looking(lab, said.append)
    assert until(lambda: said, 10)
    started = {"controller": SimpleNamespace(pid=os.getpid())}
    lab.cluster = SimpleNamespace(engines=[SimpleNamespace(pid=os.getpid()), SimpleNamespace(pid=2**22 + 1)],
                                  processes=SimpleNamespace(started=started))  # fmt: skip
    lab.members, lab._live = (0, 1), SimpleNamespace(step=3)
    assert until(lambda: seen.looks, 10)
    seen.close()
    assert seen.looks[0]["step"] == 3 and seen.looks[0]["late"] > 0
    assert list(seen.looks[0]["engines"]) == [f"0 {os.getpid()}"], "the other is gone"
