"""Tests the virtual cost of codecs that share a core with compute."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.sim.virtual import paced, rows, seconds, stack
from workbench import Costs, simulate
from workbench.compressors import Cast, Dense
from workbench.experiment import Experiment
from workbench.settings import Change
from workbench.sim import Line
from workbench.sim.costs.measure_codecs import measure_slowdown, price_codecs
from workbench.strategies import DDP, LocalSGD

pytestmark = pytest.mark.ranks

NBYTES = 40_000  # bytes of each of 4 buckets; each fills in 25 % of a backward
BACK = 0.08  # seconds
CAST = {"codec": {"Cast": (0.002 / NBYTES, 0.0)}, "beside": {"Cast": (0.004 / NBYTES, 0.0)}}


def made(strategy: Any = None, compressor: Any = None, steps: int = 6, **rest: Any) -> Experiment:
    """Makes an experiment with 4 buckets over links that take almost no time."""
    return paced(3, steps, 0.0, 1e6, strategy=strategy or DDP(), compressor=compressor or Cast(to="bf16"),
                 task=stack(4), bucket_mb=0.03, **rest)  # fmt: skip


def test_encoding_during_backward_has_its_own_price() -> None:
    """3 of 4 buckets are encoded during backward. The step waits only for the last one."""
    run = simulate(made(), costs=Costs(backward=BACK, **CAST))
    spans = rows(run, "codec", 0)
    spans = spans[spans.step == 3]
    assert (spans.t1 - spans.t0).tolist() == pytest.approx([0.004, 0.004, 0.004, 0.002])
    assert seconds(run)[3] == pytest.approx(BACK + 0.002, abs=1e-4)
    alone = rows(simulate(made(LocalSGD(every=1)), costs=Costs(backward=BACK, **CAST)), "codec", 0)
    assert (alone.t1 - alone.t0).tolist() == pytest.approx([0.002] * len(alone)) and len(alone)


def test_a_codec_on_the_same_core_makes_backward_longer() -> None:
    """Backward grows by a share of the encoding during it. Encoding while the step waits delays nothing."""
    for slow in (0.0, 0.5, 1.0):
        run = simulate(made(), costs=Costs(backward=BACK, slows=slow, **CAST))
        spans = rows(run, "compute", 0, "backward")
        assert (spans.t1 - spans.t0)[3] == pytest.approx(BACK + slow * 3 * 0.004)
        assert seconds(run)[3] == pytest.approx(BACK + slow * 3 * 0.004 + 0.002, abs=1e-4)


def test_compute_and_codec_are_measured_from_steps_with_and_without_a_codec() -> None:
    """The measured costs of compute and of the codec predict the same run."""
    given = Costs(backward=BACK, forward=0.01, slows=0.5, **CAST)
    run = simulate(made(compressor=Dense(), steps=24), costs=given, changes=[Change(12, "compressor", Cast(to="bf16"))])
    found = Costs.measured(run)
    assert found.slows == pytest.approx(0.5) and found.backward[0].seconds == pytest.approx(BACK)
    assert found.codec["Cast"][0] == pytest.approx(CAST["codec"]["Cast"][0])
    assert found.beside["Cast"][0] == pytest.approx(CAST["beside"]["Cast"][0])
    np.testing.assert_allclose(seconds(simulate(made(), costs=found))[2:], seconds(simulate(made(), costs=given))[2:],
                               rtol=1e-3)  # fmt: skip
    # without uncompressed steps, backward's own time is unknown
    without = Costs.measured(simulate(made(), costs=given))
    assert without.slows == 0.0 and without.backward[0].seconds == pytest.approx(BACK + 0.5 * 3 * 0.004)


def test_a_stretch_takes_as_long_as_the_slowest_rank_in_the_mean() -> None:
    """All ranks wait for it: in every second step one of 3 ranks is delayed and takes 5 times as long."""
    e = made(LocalSGD(every=1), steps=20)
    spans = rows_of(simulate(e, costs=Costs(backward=BACK, codec={"Cast": (0.002 / NBYTES, 0.0)})))
    held = spans.equal("lane", "codec") & (spans.rank == spans.step % 3) & (spans.step % 2 == 0)
    spans.columns["t1"][held] += 0.008
    found, _ = price_codecs(spans, lambda step: e, lambda step, name: NBYTES if name.startswith("bucket") else 0)
    assert 0.005 < found["Cast"][0] * NBYTES < 0.006  # the mean without the most disturbed 5 %; the median is 0.002


def test_a_stretch_that_is_rarely_recorded_costs_nothing() -> None:
    """The engine leaves out short spans. The few long ones were disturbed."""
    e = made(LocalSGD(every=1), compressor=Dense(), steps=20)
    spans = rows_of(simulate(e, costs=Costs(backward=BACK, codec={"Dense": (0.002 / NBYTES, 0.0)})))
    spans = spans[~spans.equal("lane", "codec") | (spans.step == 7)]
    assert price_codecs(spans, lambda step: e, lambda step, name: NBYTES if name.startswith("bucket") else 0) == (
        {},
        {},
    )


def test_slowdown_by_codecs_is_not_measured_if_other_settings_changed_too() -> None:
    """A pace that changed with the compressor would count as the codec's effect."""
    given = Costs(backward=BACK, slows=0.5, **CAST)
    changes = [Change(12, "compressor", Cast(to="bf16")), Change(12, "pace", 400.0)]
    run = simulate(made(compressor=Dense(), steps=24), costs=given, changes=changes)
    before, after = run.experiment, run.experiment.set("compressor", Cast(to="bf16"))
    spans, at = rows_of(run), lambda step: before if step < 12 else after
    nbytes = lambda step, name: NBYTES if name.startswith("bucket") else 0  # noqa: E731
    assert measure_slowdown(spans, at, nbytes)[0] == 1.0 and Costs.measured(run).slows == 0.0


def test_cost_per_stretch_and_cost_per_byte_are_measured_separately() -> None:
    """Buckets of different sizes separate the cost per stretch from the cost per byte."""
    line, beside = Line(0.001, 2e-8), Line(0.002, 5e-8)
    given = Costs(backward=BACK, forward=0.01, codec={"Cast": (line, line)}, beside={"Cast": (beside, line)})
    sizes = {0.03: NBYTES, 0.1: 3 * NBYTES}
    turns = [Change(15, "bucket_mb", 0.1), Change(30, "strategy", LocalSGD(every=1))]
    record = simulate(made(steps=45), costs=given, changes=turns)
    assert {b for *_, d in record.details("buckets") for b in d["nbytes"]} == set(sizes.values())
    found = Costs.measured(record)
    assert found.codec["Cast"][0] == pytest.approx(line) and found.beside["Cast"][0] == pytest.approx(beside)
    for mb, nbytes in sizes.items():
        e = made(LocalSGD(every=1)).set("bucket_mb", mb)
        spans = rows(simulate(e, costs=found), "codec", 0)
        assert (spans.t1 - spans.t0)[0] == pytest.approx(0.001 + 2e-8 * nbytes)
    alike = Costs.measured(simulate(made(steps=15), costs=given))  # buckets of one size define no line
    assert alike.codec["Cast"][0] == pytest.approx(line.byte + line.stretch / NBYTES)


def rows_of(run: Any) -> Any:
    return run.timeline.spans.rows()
