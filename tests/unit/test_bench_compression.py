"""The compressors' campaign: times are products of steps and their length, and the page says who wins and who loses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.bench import compression, compression_page
from tests.bench.cells import Results
from workbench.compressors import Compressor
from workbench.knobs import from_plain

LINK = "1 Gbit/s"


def write(folder: Path, part: str, row: str, where: str, seed: int, **found: Any) -> None:
    about = {"part": part, "row": row, "where": where, "seed": seed, "method": "DDP", "key": ""}
    (folder / f"{part}-{row}-{seed}.json").write_text(json.dumps({**about, "found": found}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Dense is at 3.0 after 200 of 300 steps of 0.1 s; QSGD after 210 of half that; SIDCo never."""
    for row, middle, step in (("Dense", 3.0, 0.1), ("QSGD", 3.05, 0.05), ("SIDCo", 3.5, 0.01)):
        for seed in (0, 1, 2):
            curve = [[0, 0.0, 5.0], [200, 1.0, middle], [220, 1.1, middle - 0.1], [300, 1.5, middle - 0.2]]
            write(tmp_path, "loss", row, "any link", seed, curve=curve, bytes=1e6 if row == "Dense" else 1e5)
        write(tmp_path, "step", row, LINK, 0, step_s=step, bytes=1e5, codec_s=0.001, wait_s=0.0)
    return tmp_path


def test_time_to_the_loss_is_steps_times_their_length(folder: Path) -> None:
    found = Results.of(folder)
    assert compression_page.target(found) == 3.0
    rows = compression_page.ranking(found, LINK)
    assert [r.label for r in rows] == ["QSGD", "Dense", "SIDCo"]
    assert [r.time for r in rows] == pytest.approx([210 * 0.05, 200 * 0.1, 0.0])


def test_the_page_says_who_wins_who_loses_and_what_is_lacking(folder: Path) -> None:
    page = compression_page.text(folder, folder)
    assert f"**{LINK}**: QSGD is quickest, 1.90 times as fast as dense fp32; 1 of 2 win, 1 lose: SIDCo." in page
    assert "| SIDCo | 10.0 | not by 3 of 3 |" in page and "Not measured yet: `python -m tests.bench.codecs" in page
    assert "| QSGD | 50 ms | 2.00 | 100.0 kB | 1.0 ms | 1.90 |  |" in page, "bf16 was not measured, so nothing is said"


def test_every_shipped_compressor_has_a_row_that_can_be_made() -> None:
    rows = compression.rows()
    assert {"Dense", "Cast(to=bf16)", "PowerSGD", "Zen", "DGC"} <= set(rows)
    assert all(isinstance(from_plain(plain, Compressor), Compressor) for plain in rows.values())
    assert len(compression.possible(compression.losses())) == 3 * len(rows)
