"""Tests the evaluation of raw samples of our pipelines and torch's."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch.distributed.pipelining")

from tests.bench.schedules import bubbles
from tests.bench.schedules_page import section


def test_the_bubble_is_the_idle_time_between_the_first_and_the_last_pass() -> None:
    """Two ranks, a block of two steps: 3 and 2 of 4 seconds are computed, then all of 2."""
    one = [(10.0, 13.0, 3.0), (20.0, 22.0, 2.0)]
    other = [(11.0, 14.0, 2.0), (20.0, 22.0, 2.0)]
    assert bubbles([[one], [other]]) == [pytest.approx((1 - 2.5 / 4) / 2)]


def cell(apart: float) -> dict[str, Any]:
    rows = [[r, side, k, 0.5 if side == "ours" else 0.6, 0.3 if side == "ours" else 0.4]
            for r in range(3) for k, side in enumerate(("ours", "torch", "torch"))]  # fmt: skip
    return {"name": "GPipe", "pieces": 1, "stages": 4, "micros": 8, "apart": apart, "rows": rows}


def test_the_page_shows_both_bubbles_and_different_gradients() -> None:
    text, alike = section([cell(1e-9)]), "1.000 (1.000 to 1.000)"
    assert f"| GPipe | 600 ms | 1.200 (1.200 to 1.200) | {alike} | 0.300 | 0.400 | 0.273 | 1.0e-09 |" in text
    assert "at most 1.0e-09 (goal: within 1e-06): kept" in text and "MISSED" in section([cell(1e-9), cell(1e-3)])
