"""Tests the judge of fast and fitting settings, and the figures of a step."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from widgets.lesson import Fastest, what_it_takes, worksheet
from widgets.teach import worksheet as sheets
from workbench import Experiment, analysis, simulate
from workbench.fabric import Fabric, Link
from workbench.tasks import ByteGPT

WIRE = Fabric(link=Link(bandwidth=400, latency=2))
START = Experiment(task=ByteGPT(), ranks=4, batch=2, pace=50, eval_every=0, fabric=WIRE)


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sheets, "_done", {})
    yield


def test_only_settings_near_the_fastest_are_accepted() -> None:
    found = Fastest(START, [{"bucket_mb": size} for size in (0.1, 1, 10)], where=", on a slow wire")
    assert found.check({"bucket_mb": 0.1}).startswith("Not yet:"), "each bucket pays its latency"
    assert found.check({"bucket_mb": 1}).startswith("Found:")
    assert found.best <= found.took({"bucket_mb": 1}) <= 1.05 * found.best
    assert "You may set strategy, bucket_mb" in found.check({"batch": 1})
    assert found.check({"strategy": "DPP"}).startswith("It cannot be:")
    assert ", on a slow wire; 4 tries, 0 hints; solved" in repr(worksheet("05"))


def test_settings_that_do_not_fit_are_refused_and_the_best_fits() -> None:
    needs = max(m.peak for m in simulate(START.set("steps", 4)).memory()) / 1e6
    tight = Fastest(START.set("memory_mb", 0.95 * needs), [{"strategy": name} for name in ("DDP", "ZeRO1", "ZeRO2")])
    assert "needs" in tight.check({}) and "memory_mb" in tight.check({})
    answers = {name: tight.check({"strategy": name}) for name in ("ZeRO1", "ZeRO2")}
    assert any(said.startswith("Found:") for said in answers.values()), answers


def test_the_figures_of_a_step_come_from_the_record() -> None:
    run = simulate(START.set("steps", 6))
    found, held = what_it_takes(run), run.memory(5)[0]
    assert found["peak"] == round(held.peak / 1e6, 1) and "evaluation" not in found
    assert found["sent"] == round(float(analysis.bytes_per_step(run.timeline, 1, 6).mean()) / 1e6, 2)
    assert found["ms"] >= 20
