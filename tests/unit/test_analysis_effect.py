"""Tests a change's card: before and after with spread, never across another change."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit import synthetic
from workbench.analysis import Card, Effect, before_after
from workbench.record.timeline import Mark, Sample, Span, Timeline


def row(card: Card, name: str) -> Effect:
    return next(r for r in card.rows if r.name == name)


def test_a_switch_to_local_sgd_shows_in_every_row() -> None:
    card = before_after(synthetic.run(steps=150, changes=((100, "strategy", "LocalSGD"),)).timeline, 100)
    assert card.text == "strategy = LocalSGD" and card.before == (50, 100) and card.after == (100, 150)
    sent = row(card, "sent per step and rank")
    assert sent.before.value == 6e6 and sent.after.value == 6e6 / 8
    assert row(card, "step").after.high < row(card, "step").before.low
    assert row(card, "exposed communication").ratio < 0.5
    for r in card.rows:
        assert r.before.low <= r.before.value <= r.before.high and r.before.n > 3
        assert ("99 %" if r.name == "loss slope" else "95 %") in r.spread


def test_a_change_that_does_nothing_shows_overlapping_intervals() -> None:
    card = before_after(synthetic.timeline(steps=160, changes=((80, "lr", 0.001),)), 80)
    step = row(card, "step")
    assert step.before.low < step.after.high and step.after.low < step.before.high


def test_windows_end_at_the_neighbouring_changes() -> None:
    tl = synthetic.timeline(steps=120, changes=((40, "lr", 1.0), (60, "lr", 2.0), (75, "lr", 3.0)))
    card = before_after(tl, 60)
    assert card.before == (40, 60) and card.after == (60, 75)


def test_steps_next_to_an_evaluation_a_hand_over_or_a_pause_are_left_out() -> None:
    tl = synthetic.timeline(steps=120, changes=((60, "lr", 1.0),), eval_every=10)
    tl.marks.add([Mark(0, 73, "state", 20.0, json.dumps({"state": "paused"}))])
    card = before_after(tl, 60, window=30)
    assert row(card, "step").before.n == 30 - 3, "evaluations before steps 30, 40 and 50"
    assert row(card, "step").after.n == 31 - 6, "the change and the step after it, 70, 80, 90, and 73"


def test_rounds_longer_than_the_window_are_still_compared_as_rounds() -> None:
    changes = ((100, "strategy", "LocalSGD"), (200, "strategy.every", 32))
    card = before_after(synthetic.run(steps=400, changes=changes, every=16).timeline, 200)
    sent = row(card, "sent per step and rank")
    assert sent.before.value == pytest.approx(6e6 / 16) and sent.after.value == pytest.approx(6e6 / 32, rel=0.35)
    assert sent.after.n >= 3


def test_just_after_a_change_the_card_reports_that_it_knows_little() -> None:
    card = before_after(synthetic.timeline(steps=101, changes=((100, "lr", 1.0),)), 100)
    assert row(card, "step").after.n <= 1 and np.isnan(row(card, "step").after.low)
    assert np.isnan(row(card, "loss slope").after.value)


def test_the_loss_slope_is_robust_to_outliers() -> None:
    tl = synthetic.timeline(steps=80, changes=((40, "lr", 1.0),))
    line = Timeline()
    line.spans.extend(tl.spans.rows().columns)
    line.marks.extend(tl.marks.rows().columns)
    noise = np.random.default_rng(0).normal(0, 0.01, 80)
    values = [5.0 - 0.02 * s + noise[s] + (50.0 if s % 13 == 0 else 0.0) for s in range(80)]
    line.samples.add([Sample(r, s, "loss", float(s), values[s]) for s in range(80) for r in range(4)])
    slope = row(before_after(line, 40, window=40), "loss slope")
    assert slope.before.value == pytest.approx(-2.0, rel=0.1) and slope.before.low < -2.0 < slope.before.high


def test_a_card_of_an_empty_timeline_has_rows_without_numbers() -> None:
    card = before_after(Timeline(), 10)
    assert all(r.before.n == r.after.n == 0 and np.isnan(r.before.value) for r in card.rows)


def test_the_same_record_gives_the_same_card() -> None:
    tl = synthetic.timeline(steps=100, changes=((50, "lr", 1.0),))
    assert repr(before_after(tl, 50)) == repr(before_after(tl, 50))


def lossy(
    values: list[float], changes: tuple[int, ...] = (), ranks: int = 2, rates: dict[int, float] | None = None
) -> Timeline:
    """Makes steps of 100 ms with these losses on all ranks, changes before some steps, and learning rates."""
    tl = Timeline()
    for s, loss in enumerate(values):
        for r in range(ranks):
            tl.spans.add([Span(r, s, "step", "DDP", 0.1 * s, 0.1 * s, 0.1 * s + 0.1, 0)])
            tl.samples.add([Sample(r, s, "loss", 0.1 * s + 0.1, loss)])
    tl.samples.add([Sample(0, s, "lr", 0.1 * s, rate) for s, rate in (rates or {}).items()])
    tl.marks.add([Mark(0, s, "change", 0.1 * s, json.dumps({"path": "lr", "value": 1.0})) for s in changes])
    return tl


def slopes(tl: Timeline, change: int) -> tuple[str, str]:
    trends = row(before_after(tl, change), "loss slope").trends
    assert trends is not None
    return str(trends[0]), str(trends[1])


def test_two_steps_are_too_few_for_a_verdict() -> None:
    tl = synthetic.timeline(steps=102, changes=((100, "strategy", "LocalSGD"),), link=True)
    step = row(before_after(tl, 100), "step")
    assert step.verdict == "" and not step.change.clear
    assert step.change.lacks == "After: too short: 2 steps, 0 of them undisturbed; needs 20"


def test_steps_after_a_start_new_buckets_or_a_standstill_are_left_out() -> None:
    tl = synthetic.timeline(steps=120, changes=((60, "bucket_mb", 2.0),), eval_every=0)
    assert row(before_after(tl, 60, window=60), "step").before.n == 60 - 2
    tl.marks.add([Mark(0, 62, "buckets", 9.0, json.dumps({"nbytes": [1]}))])
    tl.marks.add([Mark(1, 80, "fault", 12.0, json.dumps({"text": "stood still for 1.0 s"}))])
    assert row(before_after(tl, 60, window=59), "step").after.n == 60 - 5, "60 to 63, and 80"


def test_slow_first_steps_do_not_reach_the_verdict() -> None:
    """A segment that began in a transient: without skipping it, half of these steps would be slow."""
    host = synthetic.Host(2, 0.1, link=False, seed=0, noise=0.02, hiccups=0.0)
    seconds = host.seconds
    for step in range(64):
        host.seconds = lambda r, phase, s=step: seconds(r, phase) * (10 if s in (30, 31) else 1)  # type: ignore[misc]
        host.step(step)
    host.mark(0, 30, "change", path="lr", value=1.0)
    card = before_after(host.timeline(), 30)
    assert row(card, "step").verdict == "same" and row(card, "step").after.high < 120


def test_if_every_step_is_disturbed_none_is_left_out() -> None:
    tl = synthetic.timeline(steps=80, changes=((40, "lr", 1.0),), eval_every=1)
    assert row(before_after(tl, 40), "step").verdict == "same"


@pytest.mark.parametrize("every", [2, 8, 64])
def test_rounds_of_any_length_come_to_a_verdict(every: int) -> None:
    steps = 100 + max(100, 8 * every)
    turned = ((100, "strategy.every", every),)
    tl = synthetic.timeline("LocalSGD", steps=steps, every=every, changes=turned, eval_every=0)
    step = row(before_after(tl, 100), "step")
    assert step.after.n >= 5
    assert step.change.lacks == ("Before: too short: 1 round, 0 of them undisturbed; needs 5" if every == 64 else "")


def test_falling_rising_and_flat_losses_are_described() -> None:
    noise = np.random.default_rng(0).normal(0, 0.01, 200)
    falls = [5.0 - 0.004 * s + noise[s] for s in range(100)]
    rises = [falls[-1] + 0.003 * s + noise[100 + s] for s in range(100)]
    before, after = slopes(lossy(falls + rises, (100,)), 100)
    assert before.startswith("falls by 0.4") and "per 100 steps [0.3" in before
    assert after.startswith("rises by 0.") and "per 100 steps [0.2" in after
    flat, _ = slopes(lossy([2 + x for x in noise], (100,)), 100)
    assert flat.startswith("no clear trend: ")
    assert slopes(lossy([2.0] * 100, (50,)), 50) == ("does not change", "does not change")


def test_a_slope_is_given_for_one_side_if_the_other_is_too_short() -> None:
    values = [5.0 - 0.02 * s for s in range(10)] + [4.8 + 0.00264 * s for s in range(60)]
    tl = lossy(values, (10,))
    assert slopes(tl, 10) == (
        "too short: 10 steps, 8 of them undisturbed; needs 20",
        "rises by 0.264 per 100 steps [0.264, 0.264]",
    )
    assert row(before_after(tl, 10), "loss slope").verdict == ""


def test_the_verdict_waits_for_a_rising_learning_rate() -> None:
    values = [5.0 - 0.01 * s for s in range(120)]
    rising = {s: 0.01 * s for s in range(40, 60)}
    assert slopes(lossy(values[:60], (40,), rates=rising), 40)[1] == "waits: the learning rate still changes"
    tl = lossy(values, (40,), rates=rising)
    assert row(before_after(tl, 40), "loss slope").after.n == 91 - 59, "from the last of these steps on"


def test_losses_that_are_not_finite_are_counted_and_left_out() -> None:
    values = [5.0 - 0.01 * s for s in range(100)]
    values[70] = values[80] = float("nan")
    assert slopes(lossy(values, (50,)), 50)[1].startswith("not finite in 2 steps; falls by 1 per 100 steps")
    gone = [2.0] * 50 + [float("inf")] * 50
    assert slopes(lossy(gone, (50,)), 50)[1] == "never finite"


def test_autocorrelated_noise_makes_no_trend() -> None:
    rng, said = np.random.default_rng(4), 0
    for _ in range(60):
        x = np.zeros(120)
        for s in range(1, 120):
            x[s] = 0.8 * x[s - 1] + rng.standard_normal()
        said += "no clear trend" not in slopes(lossy((3 + 0.01 * x).tolist(), (60,), ranks=1), 60)[1]
    assert said <= 9, "widened: without that it is 30 of 60"
