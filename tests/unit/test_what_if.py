"""Tests `what_if`: a run is simulated with other settings; also tests its panel."""

from __future__ import annotations

import math
import re

import pytest

from widgets.controls.asking import slider_bandwidth, slider_position
from widgets.controls.what_if import WhatIf
from workbench import simulate
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link
from workbench.run import Run
from workbench.settings import Change, KnobError
from workbench.strategies import LocalSGD


@pytest.fixture(scope="module")
def run() -> Run:
    link = Link(bandwidth=200, latency=0.5)
    return simulate(Experiment(ranks=4, pace=50, steps=60, eval_every=0, fabric=Fabric(link=link)))


def test_the_simulator_reproduces_its_calibration_data(run: Run) -> None:
    found = run.what_if()
    assert found.same == pytest.approx(found.measured, rel=1e-3) and found.other == pytest.approx(found.same)
    assert abs(found.error) < 1e-3


def test_a_faster_link_helps_until_only_compute_remains(run: Run) -> None:
    slow, same, fast = (run.what_if({"link.bandwidth": b}).other for b in (50, 200, 100_000))
    assert slow > 2 * same > same > fast >= 0.05


def test_bytes_per_rank_follow_the_ring_formula(run: Run) -> None:
    few, many = run.what_if({"ranks": 2}), run.what_if({"ranks": 32})
    assert many.sent / few.sent == pytest.approx((2 * 31 / 32) / (2 * 1 / 2), rel=1e-3)


def test_it_uses_the_current_settings_of_the_run() -> None:
    experiment = Experiment(ranks=2, pace=20, steps=120, eval_every=0, fabric=Fabric(link=Link(bandwidth=50)))
    changed = simulate(experiment, changes=[Change(40, "strategy", LocalSGD(every=8))])
    found = changed.what_if()
    assert isinstance(found.experiment.strategy, LocalSGD)
    assert found.same == pytest.approx(found.measured, rel=0.05)


def test_invalid_settings_are_refused_with_the_reason(run: Run) -> None:
    with pytest.raises(KnobError, match="ranks=0"):
        run.what_if({"ranks": 0})
    with pytest.raises(KnobError, match="TorchDDP"):
        run.what_if({"strategy": "TorchDDP"})
    with pytest.raises(ValueError, match="no step"):
        Run(Experiment(pace=1)).what_if()


def test_the_panel_starts_at_the_runs_settings_and_shows_the_result(run: Run) -> None:
    panel = WhatIf(lambda: run)
    panel.follow_run()
    assert panel.chosen_settings() == {"ranks": 4, "link.bandwidth": 200.0, "link.latency": 0.5}
    panel.ranks.value = 8
    assert panel.working is not None
    panel.working.join(600)
    assert "With 8 ranks, 200 Mbit/s, 0.5 ms" in panel.said.value and panel.board is not None
    assert panel.board.run.settings["ranks"] == 8
    panel.follow_run()
    assert panel.ranks.value == 8, "a slider that was moved stays where it is"
    panel.close()


def test_the_answer_describes_the_simulated_settings_even_if_a_slider_moves_meanwhile(run: Run) -> None:
    panel = WhatIf(lambda: run)
    said: list[str] = []
    panel.said.observe(lambda change: said.append(change.new), "value")
    asked: list[int] = []

    class Moved:
        """A run whose answer takes so long that the slider is moved again."""

        def __getattr__(self, name: str) -> object:
            return getattr(run, name)

        def what_if(self, settings: dict[str, int]) -> object:
            asked.append(settings["ranks"])
            if len(asked) == 1:
                panel.ranks.value = 8
            return run.what_if(settings)

    panel.present = Moved
    panel.ranks.value = 5
    assert panel.working is not None
    panel.working.join(600)
    told = [int(m[1]) for text in said if (m := re.search(r"With (\d+) rank", text))]
    assert told == asked == [5, 8]


def test_the_panel_says_when_there_is_no_run() -> None:
    panel = WhatIf(lambda: None)
    panel.start_simulation()
    assert panel.working is not None
    panel.working.join(60)
    assert "no run yet" in panel.said.value
    panel.close()


@pytest.mark.parametrize("bandwidth", [1.0, 300.0, 25_000.0, 0.0])
def test_the_bandwidth_slider_shows_its_value(bandwidth: float) -> None:
    assert slider_bandwidth(slider_position(bandwidth)) == pytest.approx(bandwidth, rel=0.01)


def test_a_named_network_sets_alpha_and_beta_and_is_listed_in_the_assumptions(run: Run) -> None:
    found = run.what_if({"ranks": 8}, "100 GbE")
    assert found.experiment.fabric.link == Link(bandwidth=100_000, latency=0.014)
    assert any("alpha 14 us, beta 0.08 ns/B (100 Gbit/s)" in a and "802.3ba" in a for a in found.assumptions)
    assert run.what_if({"ranks": 8, "fabric.link.latency": 5.0}, "100 GbE").other > found.other
    sites = run.what_if({"ranks": 8}, "two sites over a WAN").experiment.fabric
    assert (sites.site, sites.between_bandwidth, sites.between_latency) == (4, 1000.0, 15.0)
    with pytest.raises(KnobError, match=r"network='100GbE': no such network; did you mean 100 GbE\?"):
        run.what_if({}, "100GbE")


def test_a_step_of_4096_ranks_takes_compute_plus_ring_messages(run: Run) -> None:
    rows = run.scaling({}, "10 GbE", [8, 4096])
    few, many = rows
    buckets = math.ceil(few.sent / (2 * 7 / 8) / 1e6)
    ring = 2 * 4095 * 14e-6  # of each bucket, one after the other
    assert few.computing > 0.9 > many.computing
    assert few.seconds + (buckets - 1) * ring < many.seconds < few.seconds + 1.05 * buckets * ring
    assert many.sent == pytest.approx(few.sent * (2 * 4095 / 4096) / (2 * 7 / 8), rel=1e-3)
    assert run.what_if({"ranks": 4096}, "10 GbE").other == pytest.approx(many.seconds)
    assert any("one replica is simulated for all" in a for a in rows.assumptions) and "4,096" in repr(rows)
    refused = run.scaling({"strategy": "AsyncServer"}, "10 GbE", [4096])[0]
    assert "its ranks do different work" in refused.refused and refused.refused in repr([refused])


def test_the_panel_applies_all_fields_and_draws_the_curve_with_its_assumptions(run: Run) -> None:
    panel = WhatIf(lambda: run)
    panel.follow_run()
    panel._setting = True  # all in one question
    panel.network.value, panel.kinds["strategy"].value, panel.bucket.value = "NVLink", "LocalSGD", "0.5"
    panel.more.value, panel.site.value = "strategy.every=4", "2"
    panel._setting = False
    asked = {"ranks": 4, "strategy": "LocalSGD", "bucket_mb": 0.5, "fabric.site": 2, "strategy.every": 4}
    assert panel.chosen_settings() == asked
    panel.start_simulation(over=True)
    assert panel.working is not None
    panel.working.join(600)
    assert "With 4 ranks, NVLink, strategy LocalSGD, bucket_mb 0.5" in panel.said.value, panel.said.value
    assert panel.curve.value.count("<circle") == 12 and "4,096 ranks: " in panel.curve.value
    assert "450 one way" in panel.assumed.value and panel.bandwidth.disabled
    panel.more.value = "every"
    panel.working.join(600)
    assert "every: must be path=value" in panel.said.value
    panel.close()
