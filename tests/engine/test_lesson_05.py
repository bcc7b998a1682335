"""Runs lesson 05: the best bucket size on two links, and the order in which gradients are sent."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook

NOTED = """[ddp, scheduled, each, measured, on_near.check({"strategy": "ByteScheduler", "bucket_mb": 0.5}),
 on_middle.check({"strategy": "ByteScheduler", "bucket_mb": 0.5}), on_middle.check({"strategy": "DDP", "bucket_mb": 2}),
 on_middle.check({"latency": 0}), repr(worksheet("05"))]"""


def test_no_bucket_size_is_best_on_both_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(answers[0])", "order = Prediction": "order.choose(where[0])",
            "worksheet(": NOTED}  # fmt: skip
    shown = texts("05_buckets.ipynb", tmp_path, monkeypatch, **more)
    assert any("The record says: small on the near one, large on the far one." in text for text in shown), shown
    assert any("You predicted: on both links. The record says: on the near one only." in text for text in shown), shown
    ddp, scheduled, each, measured, near, alike, middle, fixed, sheet = eval(shown[-1])
    assert ddp["near"]["8 MB"] > 1.15 * ddp["near"]["0.25 MB"] and ddp["far"]["0.25 MB"] > 1.5 * ddp["far"]["8 MB"]
    in_order, as_they_come = (min(scheduled[f"near, {way}"].values()) for way in ("first layers first", "as they come"))
    assert in_order < 0.95 * as_they_come, "the order alone is worth something"
    assert min(measured[f"far, {size} MB"]["step"] for size in ("8", "0.25")) > 0, "seen on real ranks as well"
    assert each["far, accumulate=4"]["ms per batch"] < each["far, accumulate=1"]["ms per batch"]
    assert sum(text.startswith("Not yet:") for text in shown[:-1]) == 2, "neither is right to begin with"
    assert near.startswith("Found:") and middle.startswith("Found:"), (near, middle)
    assert alike.startswith("Not yet:") and "cannot be changed here" in fixed
    assert sheet.count("; solved") == 2
