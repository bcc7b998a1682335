"""Checks that a report is one file with the run's data that needs no network."""

from __future__ import annotations

import base64
import gzip
import json
import re
from pathlib import Path

from tests.unit.synthetic import run as recorded
from widgets.export.report import write_report
from workbench.run import Run


def kept(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="run">(.*?)</script>', page)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_a_report_stands_alone_and_holds_run_tables_and_windows(tmp_path: Path) -> None:
    run = recorded(steps=120)
    page = write_report(run, tmp_path / "run.html").read_text()
    assert not re.search(r'(src|href)="(https?:)?//', page) and page.count('id="plotly"') == 1
    assert len(page) < 4e6
    held = kept(page)
    content, _ = held["open"]
    assert {"timeline", "loss", "cards", "straggler"} <= set(content["views"])
    assert len(content["marks"]) == len(run.changes) == 1
    assert held["tables"]["loss"]["rows"] and held["tables"]["timeline"]["rows"]
    firsts = [window["first"] for window in held["windows"]]
    assert firsts[0] == 0 and {98, 99, 100} <= set(firsts)


def test_a_report_of_a_run_without_rows_does_not_fail(tmp_path: Path) -> None:
    page = write_report(Run({"ranks": 2, "note": "<script>"}, name="a<b"), tmp_path / "run.html").read_text()
    assert "Run a&lt;b" in page and "&lt;script&gt;" in page
    assert kept(page)["windows"] == []
