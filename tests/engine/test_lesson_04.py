"""Runs lesson 04: FLOPs and bytes of a step, the roofline of a core and of a wire, and MFU of two real ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.lessons import texts

pytestmark = pytest.mark.notebook

NOTED = """[{name: (count(t), t.layers, t.width, t.context) for name, t in models.items()},
 {name: (found[name]["FLOPs per byte"], share(t, texts)) for name, t in models.items()}, peak, memory, points, reached,
 choose.check(small=10, slow=40, large=10), choose.check(small=10, slow=10, large=100),
 choose.check(small=0, slow=40, large="ten"), repr(worksheet("04"))]"""


def test_the_models_size_cancels_and_tokens_per_rank_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"guess = Prediction": "guess.choose(more)", "grows = Prediction": "grows.choose(full)",
            "worksheet(": NOTED}  # fmt: skip
    shown = texts("04_roofline.ipynb", tmp_path, monkeypatch, **more)
    assert any("it sends more bytes. The record says: about the same share." in text for text in shown), shown
    assert any("The record says: clearly, but less than 16-fold." in text for text in shown), shown
    assert sum(text.startswith("'Not yet") or text.startswith("Not yet") for text in shown) == 1, "wrong to begin with"
    counts, shares, peak, memory, points, reached, right, wrong, invalid, sheet = eval(shown[-1])
    for (flops, params), layers, width, context in counts.values():
        looked_up = (256 + context) * width
        by_formula = 6 * (params - looked_up) + 12 * layers * width * context
        assert flops / context == pytest.approx(by_formula, rel=0.01), "6 N per token, and attention"
    assert counts["large"][0][1] > 9 * counts["small"][0][1]
    (small, small_waits), (large, large_waits) = shares["small"], shares["large"]
    assert large == pytest.approx(small, rel=0.1) and large_waits == pytest.approx(small_waits, rel=0.1)
    assert small_waits > 0.5, "on this wire communication counts"
    by_token = [rate for name, (_, rate) in points.items() if "token" in name]
    assert by_token[-1] > 2 * by_token[0] > 3 * points["x * 2"][1], "more FLOPs per byte, more FLOP/s"
    for intensity, rate in points.values():
        assert rate < 1.5 * min(peak, intensity * memory), "no point is far above the roof"
    for intensity, rate in reached.values():
        assert rate < 1.1 * min(peak, intensity * 100e6 / 8), "MFU stays below the wire's roof"
    assert right.startswith("Found") and wrong == "Not yet: {'slow': 'too small', 'large': 'too large'}."
    assert "whole number" in invalid and "; solved" in sheet
