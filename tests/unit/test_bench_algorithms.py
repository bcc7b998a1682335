"""Tests the evaluation of the all-reduce bench."""

from __future__ import annotations

from typing import Any

import pytest

from tests.bench import between
from tests.bench.algorithms import CLOSE, EMULATED, RANKS, Wires, cells, fitted, predicted, section
from workbench.fabric import Fabric, Link
from workbench.fabric.algorithms import Ring

WIRES = Wires(mbit=20.0, latency=20.0)


def test_a_link_is_recovered_from_the_times_of_rings() -> None:
    fabric = Fabric(link=Link(bandwidth=37.0, latency=2.5))
    rings = {n: Ring().seconds(fabric, range(RANKS), 4 * n) for n in (250, 4_000, 64_000)}
    assert fitted(rings) == pytest.approx((2.5, 37.0))


def test_sizes_on_each_emulated_link_have_different_fastest_algorithms() -> None:
    for wires, sizes in EMULATED.items():
        by_time = [sorted(said, key=lambda way: said[way]) for said in (predicted(wires, n) for n in sizes)]
        if wires.site:
            assert {ways.pop(0) for ways in by_time} == {"hierarchical"}, "sites of three: TwoLevel is never before it"
        assert len({ways[0] for ways in by_time}) > 1, wires


def test_a_prediction_holds_if_its_choice_is_about_as_fast_as_the_fastest() -> None:
    sizes = (4_000, 256_000)
    said = {str(n): predicted(WIRES, n) for n in sizes}
    took: dict[str, Any] = {name: {n: [said[n][name] * 1.1] * 3 for n in said} for name in said["4000"]}
    chosen = {n: min(said[n], key=lambda way: said[n][way]) for n in said}
    other = next(name for name in took if name not in chosen.values())
    took[other]["256000"] = [said["256000"][chosen["256000"]] * 1.1 / (CLOSE + 0.01)] * 3
    found = {"wires": vars(WIRES), "about": str(WIRES), "link": None, "took": took, "predicted": said}
    small, large = cells(found)
    assert small["chosen"] == small["first"] == chosen["4000"] and small["over"] == 1.0
    assert (large["chosen"], large["first"]) == (chosen["256000"], other) and large["over"] > CLOSE
    assert large["off"] == pytest.approx(1 - 1 / 1.1)
    assert "On emulated Links it holds in 1 of 2 cells" in " ".join(section([found]).split())


def test_compression_between_sites_is_predicted_and_shown_next_to_measurements() -> None:
    kept = between.predicted(between.SLOW, "compressed between sites", 16_000)
    inside, across = 16_000 * 32e-6 / 200, 8 * 800 * 8e-6 / 10  # seconds of all data, and of 5 % with their indices
    assert inside < kept < 0.5 * between.predicted(between.SLOW, "whole, in two levels", 16_000)
    assert kept > across + 0.01
    found = {"about": "wires", "numel": 1000, "predicted": dict(zip(between.WAYS, (0.4, 0.3, 0.2, 0.1), strict=True)),
             "took": dict(zip(between.WAYS, ([0.5], [0.3], [0.2], [0.1]), strict=True))}  # fmt: skip
    said = between.section([found])
    assert "| wires | 4 | 500 (400) | 300 (300) | 200 (200) | 100 (100) | compressed between sites |" in said
    assert "is the fastest in 1 of 1 cells. Predictions are off by 0.0% in the median and by 20.0% at most." in said
