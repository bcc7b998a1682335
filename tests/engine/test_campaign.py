"""Runs a short round of the random campaign of `make torture`, and tests that its checks find errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.campaign import KERNELS, doubled, round_of, summary
from tests.unit import synthetic
from workbench.run import Run


def altered(run: Run, change: Callable[[np.ndarray], np.ndarray]) -> Any:
    """Returns the record of `run` with the spans that `change` picks from their time order."""
    spans = run.timeline.spans.rows()
    chosen = spans[change(np.argsort(spans.t1, kind="stable"))]
    timeline = SimpleNamespace(spans=SimpleNamespace(rows=lambda: chosen), samples=run.timeline.samples)
    return SimpleNamespace(timeline=timeline, details=run.details)


def test_the_checks_find_a_repeated_or_missing_step() -> None:
    run = synthetic.run(ranks=3, steps=30, changes=())
    spans = run.timeline.spans.rows()
    one = int(np.flatnonzero(spans.equal("lane", "step") & (spans.rank == 1) & (spans.step == 7))[0])
    assert list(doubled(run)) == list(doubled(altered(run, lambda order: order))) == []
    assert list(doubled(altered(run, lambda order: order[order != one]))) == ["rank 1 has step 8 after 6"]
    twice = list(doubled(altered(run, lambda order: np.append(order, one))))
    assert twice == ["rank 1 has step 7 after 29"]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [4 * KERNELS, 5 * KERNELS - 1], ids=["engines", "kernels"])
def test_a_round_of_random_changes_and_faults(seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_RUNTIME_DIR", str(tmp_path / "runtime"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    found = round_of(seed, print)
    assert found["wrong"] == "" and summary([found])["done"]
