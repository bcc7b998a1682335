"""Tests whether compression pays, on runs that can be added up by hand."""

from __future__ import annotations

import numpy as np
import pytest

from tests.unit.encoded import DENSE, HIDDEN, NBYTES, QUICK, SLOW, TOPK, WHOLE, Author, compressed
from widgets.controls.progress import RunProgress
from widgets.views.ranks import PARTS, Ranks
from workbench import analysis
from workbench.analysis import BreakEven, break_even, measure_compression
from workbench.analysis.steps.settings import with_value
from workbench.analysis.steps.window import Window
from workbench.run import Run


def told(run: Run) -> BreakEven:
    found = break_even(run)
    assert found is not None
    return found


def test_the_effective_ratio_is_fp32_bytes_over_sent_bytes_without_measuring() -> None:
    what = measure_compression(compressed(SLOW).timeline, 0, 40)
    assert what.dense == sum(NBYTES) and what.sent == 10_000  # 2 (p-1)/p is 1 for two ranks
    assert what.ratio == 100.0
    steps, ratio = analysis.compression_ratios(compressed(SLOW).timeline, 0, 40)
    assert steps.tolist() == list(range(40)) and ratio.tolist() == [100.0] * 40


def test_a_model_in_16_bits_is_compared_with_32() -> None:
    half = Author(TOPK, width=2)
    half.steps(5, SLOW)
    assert measure_compression(half.run.timeline, 0, 5).dense == 2 * sum(NBYTES)


def test_new_buckets_count_from_the_next_step_on() -> None:
    author = Author(TOPK)
    author.steps(3, SLOW)
    author.now -= 1e-4  # as when the bucket order is learned: at the end of a step, before the next one begins
    author.step -= 1
    author.mark("buckets", nbytes=[2 * n for n in NBYTES])
    author.now += 1e-4
    author.step += 1
    author.steps(2, SLOW)
    _, ratio = analysis.compression_ratios(author.run.timeline, 0, 5)
    assert ratio.tolist() == [100.0, 100.0, 100.0, 200.0, 200.0]


def test_measurements_are_medians_and_unknown_ones_are_nan() -> None:
    author = Author(TOPK)
    for value in (0.5, 0.6, 9.0):
        author.steps(2, SLOW, 2, (value, 0.8, 2.0))
    what = measure_compression(author.run.timeline, 0, 6)
    assert (what.error, what.cosine, what.residual, what.measured) == (0.6, 0.8, 2.0, 3)
    nothing = measure_compression(compressed(SLOW, measure=0).timeline, 0, 40)
    assert np.isnan([nothing.error, nothing.cosine, nothing.residual]).all() and nothing.measured == 0


def test_compression_that_costs_more_than_it_saves_is_reported() -> None:
    found = told(compressed(SLOW))
    assert (found.verdict, found.known) == ("costs", "predicted")
    assert found.codec == pytest.approx(0.040) and found.beside == pytest.approx(0.010)
    assert found.exposed == pytest.approx(0.002) and found.dense == pytest.approx(0.006)
    assert found.text == (
        "TopK(density=0.01) takes 40 ms per step to encode and decode, 10 ms of it behind compute, and saves 4 ms of "
        "waiting: on this link Dense would be faster. "
        "With Dense: predicted from 16 dense all-reduces made while measuring."
    )


def test_compression_that_pays_is_reported() -> None:
    found = told(compressed(QUICK))
    assert found.verdict == "pays" and found.dense == pytest.approx(0.090)  # 20 + 50 + 50 - 30 ms
    assert found.text.startswith("TopK(density=0.01) saves 89 ms of waiting per step and takes 2 ms to encode")
    assert "it pays on this link." in found.text


def test_encoding_hidden_by_compute_pays_only_with_idle_cores() -> None:
    found = told(compressed(HIDDEN))
    assert found.verdict == "depends" and found.beside == pytest.approx(0.009)
    assert "it costs more than it saves, unless cores would be idle otherwise" in found.text


def test_recorded_steps_with_dense_are_compared_as_whole_steps() -> None:
    author = Author(DENSE)
    author.steps(30, WHOLE)
    author.set("compressor", TOPK)
    author.steps(30, SLOW)
    found = told(author.run)
    assert (found.verdict, found.known, found.dense) == ("costs", "measured", pytest.approx(0.006))
    assert "Measured: a step takes 67 ms and took 41 ms with Dense, in steps 2 to 29." in found.text
    again = Author(DENSE)
    again.steps(30, WHOLE)
    again.set("compressor", TOPK)
    again.steps(30, WHOLE._replace(codec=(0.0, 0.1), wire=5.9))
    assert told(again.run).verdict == "even" and "no clear difference from Dense" in told(again.run).text


def test_dense_on_another_link_does_not_count() -> None:
    author = Author(DENSE)
    author.steps(30, WHOLE)
    author.set("fabric.link.bandwidth", 50.0)
    author.set("compressor", TOPK)
    author.steps(30, SLOW)
    found = told(author.run)
    assert (found.verdict, found.known) == ("unknown", "") and np.isnan(found.dense)
    assert "The time with Dense is unknown: set measure_every to 20" in found.text


def test_no_verdict_without_compression_or_just_after_a_change() -> None:
    plain = Author({"ErrorFeedback": {"of": DENSE}})
    plain.steps(20, WHOLE)
    assert break_even(plain.run) is None
    assert break_even(Run({"ranks": 2})) is None
    fresh = Author(DENSE)
    fresh.steps(20, WHOLE)
    fresh.set("compressor", TOPK)
    fresh.steps(1, SLOW)
    assert break_even(fresh.run) is None


def test_measured_steps_are_left_out_of_every_comparison() -> None:
    with_, without = compressed(SLOW, 60, 5), compressed(SLOW, 60, 0)
    every = [analysis.break_down(run.timeline, 0, 60) for run in (with_, without)]
    for a, b in zip(*every, strict=True):
        if np.ndim(a):
            np.testing.assert_allclose(a, b, atol=1e-9)
    assert [b.steps for b in every] == [48, 60]
    sent = [analysis.bytes_per_step(run.timeline, 0, 60).tolist() for run in (with_, without)]
    assert sent[0] == sent[1]
    assert with_.summary()["step_s"] == without.summary()["step_s"] == pytest.approx(0.067)
    assert RunProgress().follow_run(with_).step_rate == pytest.approx(1 / 0.067)
    assert [r.step_ms for r in analysis.per_rank(with_.timeline, 0, 60)] == [67.0, 67.0]


def test_measured_steps_are_left_out_of_a_changes_card() -> None:
    author = Author(TOPK)
    author.steps(36, SLOW, 3)
    author.set("lr", 0.1)
    author.steps(31, SLOW)
    card = analysis.before_after(author.run.timeline, 36)
    step = card.rows[0]
    assert step.before.n == 24 - 2 and step.before.value == pytest.approx(step.after.value) == pytest.approx(67.0)


def test_with_rare_exchanges_a_measured_one_counts_without_the_measuring() -> None:
    """One step of 4 exchanges, and every second exchange is measured, so every round counts."""
    author, alone = Author(TOPK), Author(TOPK)
    for round_ in range(4):
        for writer, measure in ((author, round_ % 2), (alone, 0)):
            writer.steps(1, SLOW, measure)
            for _ in range(3):
                quiet = Author(TOPK)
                quiet.now, quiet.step = writer.now, writer.step
                quiet.steps(1, SLOW)
                rows = quiet.run.timeline.spans.rows()
                kept = rows[(rows.lane == "step") | (rows.lane == "compute")]
                writer.run.timeline.spans.extend(kept.columns)
                writer.now, writer.step = quiet.now, quiet.step
    a, b = (analysis.break_down(x.run.timeline, 0, 16) for x in (author, alone))
    assert a.steps == b.steps == 16
    np.testing.assert_allclose(a.exposed, b.exposed, atol=1e-9)
    np.testing.assert_allclose(a.seconds, b.seconds, atol=1e-9)


def test_a_run_measured_throughout_still_has_numbers() -> None:
    w = Window(compressed(SLOW, 10, 1).timeline, 0, 10)
    assert w.measured.all() and w.usual.all()


@pytest.mark.parametrize(
    ("path", "value", "found"),
    [
        ("compressor", "Dense", {"Dense": {}}),
        ("compressor", DENSE, DENSE),
        ("density", 0.5, {"ErrorFeedback": {"of": {"TopK": {"density": 0.5}}}}),
        ("compressor.of.density", 0.5, {"ErrorFeedback": {"of": {"TopK": {"density": 0.5}}}}),
        ("compressor.of", "OneBit", {"ErrorFeedback": {"of": {"OneBit": {}}}}),
        ("no.such.knob", 1, TOPK),
    ],
)
def test_a_changed_knob_is_found_among_plain_settings(path: str, value: object, found: object) -> None:
    settings = {"strategy": {"LocalSGD": {"every": 8}}, "compressor": TOPK, "lr": 0.1}
    assert with_value(settings, path, value) == {**settings, "compressor": found}


def test_steps_between_two_changes_have_the_right_compressor() -> None:
    author = Author(DENSE)
    author.steps(3, WHOLE)
    author.set("compressor", TOPK)
    author.set("compressor.of.density", 0.1)
    author.steps(3, SLOW)
    author.set("compressor", {"PowerSGD": {"rank": 4}})
    found = [(s.first, s.compressor) for s in analysis.list_stretches(author.run)]
    assert found == [(0, ""), (3, "TopK(density=0.1)"), (6, "PowerSGD(rank=4)")]


@pytest.mark.parametrize("times", [0.5, 0.9, 0.97, 1.0, 1.03, 1.1, 2.0])
def test_a_changes_card_and_the_panel_agree(times: float) -> None:
    """Dense, then TopK with steps `times` as long, both with autocorrelated noise."""
    opposite = {"more": "costs", "less": "pays", "same": "even", "": "unknown"}
    for seed in range(3):
        rng, noise = np.random.default_rng(seed), 0.0
        author = Author(DENSE)
        for k in range(80):
            if k == 40:
                author.set("compressor", TOPK)
            noise = 0.5 * noise + rng.normal(0, 1.5)
            wire = max(20.0 * (times if k >= 40 else 1.0) + noise, 1.0)
            author.steps(1, WHOLE._replace(wire=wire, codec=(0.1, 0.1) if k >= 40 else (0.0, 0.0)))
        card = analysis.before_after(author.run.timeline, 40)
        assert told(author.run).verdict == opposite[card.rows[0].verdict], (seed, card.rows[0])


def test_few_steps_give_numbers_without_a_verdict() -> None:
    author = Author(DENSE)
    author.steps(40, WHOLE)
    author.set("compressor", TOPK)
    author.steps(4, SLOW)
    found = told(author.run)
    assert found.verdict == "short" and found.codec == pytest.approx(0.040)
    assert found.text.endswith("No verdict yet: too short: 4 steps, 2 of them undisturbed; needs 20.")
    assert analysis.before_after(author.run.timeline, 40).rows[0].verdict == ""


def test_waiting_for_encoding_is_not_called_transfer() -> None:
    """A step of SLOW stands still for 32 ms: 30 ms of encoding and 2 ms of transfer."""
    found = analysis.break_down(compressed(SLOW, measure=0).timeline, 0, 40)
    assert found.packing == pytest.approx(0.030) and found.exposed - found.packing == pytest.approx(0.002)
    patch = Ranks().update(compressed(SLOW, measure=0))
    told = {name: float(patch.replace[i]["x"][0]) for i, (_, name, *_) in enumerate(PARTS)}
    assert told == pytest.approx({"compute": 35, "exposed transfer": 2, "exposed waiting": 0,
                                  "exposed packing": 30, "other": 0}, abs=1e-6)  # fmt: skip
