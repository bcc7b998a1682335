"""The card of a change: before against after, with spread, never across another change."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.unit import synthetic
from workbench.analysis import Card, Effect, before_after
from workbench.timeline import Mark, Sample, Timeline


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
        assert r.before.low <= r.before.value <= r.before.high and r.before.n > 3 and "95 %" in r.spread


def test_a_change_that_does_nothing_shows_overlapping_intervals() -> None:
    card = before_after(synthetic.timeline(steps=160, changes=((80, "lr", 0.001),)), 80)
    step = row(card, "step")
    assert step.before.low < step.after.high and step.after.low < step.before.high


def test_windows_end_at_the_neighbouring_changes() -> None:
    tl = synthetic.timeline(steps=120, changes=((40, "lr", 1.0), (60, "lr", 2.0), (75, "lr", 3.0)))
    card = before_after(tl, 60)
    assert card.before == (40, 60) and card.after == (60, 75)


def test_steps_beside_an_evaluation_a_hand_over_or_a_pause_are_left_out() -> None:
    tl = synthetic.timeline(steps=120, changes=((60, "lr", 1.0),), eval_every=10)
    tl.marks.add([Mark(0, 73, "state", 20.0, json.dumps({"state": "paused"}))])
    card = before_after(tl, 60, window=30)
    assert row(card, "step").before.n == 30 - 3, "evaluations before steps 30, 40 and 50"
    assert row(card, "step").after.n == 31 - 5, "the change, evaluations before 70, 80 and 90, a pause at 73"


def test_rounds_longer_than_the_window_are_still_compared_as_rounds() -> None:
    changes = ((100, "strategy", "LocalSGD"), (200, "strategy.every", 32))
    card = before_after(synthetic.run(steps=400, changes=changes, every=16).timeline, 200)
    sent = row(card, "sent per step and rank")
    assert sent.before.value == pytest.approx(6e6 / 16) and sent.after.value == pytest.approx(6e6 / 32, rel=0.35)
    assert sent.after.n >= 3


def test_just_after_a_change_the_card_says_that_it_knows_little() -> None:
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
