"""Tests that growing memory of a rank is noticed, and ordinary runs give no alarm."""

from __future__ import annotations

from random import Random
from typing import Any

import numpy as np
import pytest

from workbench.engine.record.leak_detector import (
    MAX_READINGS,
    MIN_GROWTH_MB,
    SKIPPED_STEPS,
    LeakDetector,
    find_growth,
    read_host_mb,
)


class Memory:
    """Readings in MB, one per step, with a separate clock."""

    def __init__(self, mb: list[float]) -> None:
        self.mb, self.step, self.told, self.reads = mb, 0, list[dict[str, Any]](), 0
        growth = LeakDetector(1, self.told.append, self.read, lambda: float(self.step))
        for self.step in range(len(mb)):
            growth.take_reading(self.step)

    def read(self) -> float:
        self.reads += 1
        return self.mb[self.step]


def leak(each: float, steps: int, noise: float = 0.0, seed: int = 0) -> list[float]:
    rng = Random(seed)
    return [300 + each * step + rng.gauss(0.0, noise) for step in range(steps)]


@pytest.mark.parametrize(("each", "steps", "noise"), [(16.0, 30, 0.0), (16.0, 30, 5.0), (1.0, 200, 2.0),
                                                      (0.05, 4000, 3.0)])  # fmt: skip
def test_a_leak_is_reported_once_with_rank_and_megabytes_per_step(each: float, steps: int, noise: float) -> None:
    (said,) = Memory(leak(each, steps, noise)).told
    assert said["rank"] == 1 and said["mb_per_step"] == pytest.approx(each, rel=0.25) and said["mb"] >= MIN_GROWTH_MB
    assert said["text"].startswith("rank 1's memory grows by ") and " MB a step on its host" in said["text"]


def test_a_leak_that_begins_late_is_reported() -> None:
    flat = [300.0] * 100
    assert Memory([*flat, *(300 + 4.0 * step for step in range(200))]).told


@pytest.mark.parametrize("seed", range(20))
def test_ordinary_memory_gives_no_alarm(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 1200
    jumps = 300 + 400 * np.cumsum(rng.random(n) < 2 / n)  # a switch of strategy, an evaluation
    warm = 300 + 500 * (1 - np.exp(-np.arange(n) / rng.uniform(3, 20)))  # an allocator or a cache fills
    saw = 300 + 200 * ((np.arange(n) / rng.uniform(3, 12)) % 1)  # memory that is freed again and again
    noise = 300 + rng.normal(0, 40, n)
    walk = 300 + np.clip(np.cumsum(rng.normal(0, 1.0, n)), -50, 50)
    for name, mb in {"jumps": jumps, "warm": warm, "saw": saw, "noise": noise, "walk": walk}.items():
        assert not Memory(mb.tolist()).told, name


def test_small_growth_and_few_readings_give_no_report() -> None:
    assert not Memory(leak(0.05, 600)).told, "30 MB"
    assert find_growth(np.arange(15), np.arange(15) * 100.0) is None


def test_long_runs_keep_few_readings_and_the_first_steps_do_not_count() -> None:
    seen = Memory([300.0] * 20_000)
    assert seen.reads < 2 * MAX_READINGS * 8
    assert Memory([*(100.0 * step for step in range(SKIPPED_STEPS)), *[400.0] * 100]).told == []


def test_memory_is_read_of_this_process() -> None:
    before = read_host_mb()
    kept = np.ones(25_000_000)
    assert read_host_mb() - before > 150 and kept.all()
