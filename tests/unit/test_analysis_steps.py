"""Tests the parts of a step's time on timelines small enough to add up by hand."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tests.unit import synthetic
from workbench import analysis
from workbench.analysis.steps.cover import Cover
from workbench.record.timeline import Span, Timeline


def by_hand() -> Timeline:
    """Two ranks, one step: rank 1 arrives 2 s late at the only collective, which then takes 1 s."""
    tl = Timeline()
    for rank, ready in ((0, 4.0), (1, 6.0)):
        tl.spans.add(
            [
                Span(rank, 0, "compute", "forward", 0.0, 0.0, ready - 1, 0),
                Span(rank, 0, "compute", "backward", ready - 1, ready - 1, ready, 0),
                Span(rank, 0, "comm", "all_reduce bucket 0", ready - 0.5, ready, 7.0, 800),
                Span(rank, 0, "wait", "bucket 0", ready, ready, 7.0, 0),
                Span(rank, 0, "codec", "bucket 0", 0.0, ready - 0.25, ready, 0),
                Span(rank, 0, "compute", "update", 7.0, 7.0, 7.5, 0),
                Span(rank, 0, "step", "DDP", 0.0, 0.0, 8.0, 0),
            ]
        )
    return tl


def test_a_step_divides_into_compute_exposed_and_other() -> None:
    b = analysis.break_down(by_hand(), 0, 1)
    assert b.steps == 1 and b.seconds.tolist() == [8.0, 8.0]
    assert b.compute.tolist() == [4.5, 6.5] and b.exposed.tolist() == [3.0, 1.0]
    assert b.other.tolist() == [0.5, 0.5] and b.codec.tolist() == [0.25, 0.25]


def test_a_rank_waits_until_the_last_arrival_and_transfers_after_it() -> None:
    b = analysis.break_down(by_hand(), 0, 1)
    assert b.waiting.tolist() == [2.0, 0.0] and b.transferring.tolist() == [1.0, 1.0]
    assert b.held.tolist() == [2.0, 0.0]
    a = analysis.line_up(by_hand(), 0, 1)
    assert a.last.tolist() == [6.0] and a.late.tolist() == [[-2.0, 2.0]] and a.name.tolist() == ["all_reduce bucket 0"]


def test_the_parts_of_a_step_add_up_and_exposed_is_communication_outside_compute() -> None:
    tl = synthetic.timeline(steps=60)
    b, o = analysis.break_down(tl, 10, 50), analysis.measure_overlap(tl, 10, 50)
    np.testing.assert_allclose(b.compute + b.exposed + b.other, b.seconds, rtol=1e-9)
    np.testing.assert_allclose(o.hidden + o.exposed, o.communication, rtol=1e-9)
    np.testing.assert_allclose(b.waiting + b.transferring, o.communication / 40, rtol=0.05)
    assert (np.abs(o.exposed / 40 - b.exposed) < 0.05 * b.seconds).all(), "two ways to measure exposure"
    assert ((0.4 < o.share) & (o.share < 0.9)).all()


def test_bytes_are_those_of_steps_without_hand_overs() -> None:
    run = synthetic.run(steps=120)
    sent = analysis.bytes_per_step(run.timeline, 0, 120)
    assert sent.shape == (120, 4) and (sent[:100] == synthetic.BUCKETS * synthetic.NBYTES).all()
    assert sorted(set(sent[100:].ravel())) == [0, synthetic.BUCKETS * synthetic.NBYTES]


def test_a_collective_inside_an_evaluation_is_not_part_of_a_step() -> None:
    tl = by_hand()
    tl.spans.add([Span(r, 0, "eval", "evaluate", 8.0, 8.0, 9.0, 0) for r in (0, 1)])
    tl.spans.add([Span(r, 0, "comm", "all_reduce optimizer state", 8.1, 8.1, 8.9, 10**6) for r in (0, 1)])
    assert analysis.bytes_per_step(tl, 0, 1).tolist() == [[800, 800]]
    assert analysis.break_down(tl, 0, 1).transferring.tolist() == [1.0, 1.0]


def test_messages_do_not_count_as_collectives() -> None:
    tl = by_hand()
    tl.spans.add([Span(r, 0, "comm", "send bucket 0", t, t, t + 0.5, 100) for r, t in ((0, 1.0), (1, 5.0))])
    assert analysis.line_up(tl, 0, 1).name.tolist() == ["all_reduce bucket 0"]
    assert analysis.break_down(tl, 0, 1).waiting.tolist() == [2.0, 0.0]
    assert analysis.bytes_per_step(tl, 0, 1).tolist() == [[900, 900]]


def test_repeated_collectives_in_a_step_are_distinguished() -> None:
    tl = Timeline()
    for rank in (0, 1):
        tl.spans.add([Span(rank, 0, "comm", "all_reduce x", t, t + 0.1 * rank, t + 0.5, 1) for t in (1.0, 2.0)])
    a = analysis.line_up(tl, 0, 1)
    assert len(a.step) == 2 and a.last.tolist() == [1.1, 2.1] and a.full.all()


def test_step_times_hold_only_steps_that_ended_on_every_rank() -> None:
    rows = synthetic.timeline(ranks=3, steps=30).spans.rows()
    tl = Timeline()
    tl.spans.extend(rows[(rows.rank != 2) | (rows.step < 25)].columns)
    times = analysis.step_times(tl, last=10)
    assert times.steps.tolist() == list(range(15, 25)) and times.ranks.tolist() == [0, 1, 2]
    assert not np.isnan(times.seconds).any()
    assert analysis.last_steps(tl) == (0, 25)


def test_a_step_cut_off_by_a_kill_is_left_out_of_means() -> None:
    rows = synthetic.timeline(steps=20).spans.rows()
    tl = Timeline()
    tl.spans.extend(rows[rows.t1 < rows.t1.max() - 0.05].columns)
    whole = analysis.last_steps(tl)[1]
    assert whole < 20
    assert analysis.break_down(tl, 0, 20).steps == whole
    assert np.isnan(analysis.step_times(tl).seconds).sum() == 0


def test_an_empty_timeline_gives_no_numbers_and_no_errors() -> None:
    tl = Timeline()
    assert analysis.step_times(tl).seconds.shape == (0, 0)
    assert analysis.break_down(tl, 0, 10).steps == 0 and analysis.per_rank(tl, 0, 10) == []
    assert len(analysis.line_up(tl, 0, 5).step) == 0 and analysis.bytes_per_step(tl, 0, 5).shape == (5, 0)
    assert len(analysis.measure_overlap(tl, 0, 5).share) == 0


def test_a_single_rank_never_waits() -> None:
    tl = synthetic.timeline(ranks=1, steps=10)
    b = analysis.break_down(tl, 0, 10)
    assert b.waiting.tolist() == [0.0] and b.steps == 10 and b.seconds[0] > 0


def test_the_charts_table_has_a_row_per_rank() -> None:
    run = synthetic.run(steps=60, changes=())
    rows = analysis.per_rank(run.timeline, 40, 60)
    assert [r.rank for r in rows] == [0, 1, 2, 3] and {r.steps for r in rows} == {20}
    assert all(100 < r.step_ms < 200 and 80 < r.compute_ms < 120 for r in rows)
    assert all(r.nbytes == synthetic.BUCKETS * synthetic.NBYTES and 2.5 < r.loss < 5.5 for r in rows)


@pytest.mark.parametrize("seed", range(3))
def test_covers_measure_unions_of_intervals(seed: int) -> None:
    rng = np.random.default_rng(seed)
    begin = rng.integers(0, 900, 40)
    end = begin + rng.integers(0, 60, 40)
    inside = np.zeros(1000, bool)
    for b, e in zip(begin, end, strict=True):
        inside[b:e] = True
    cover = Cover(begin, end)
    assert cover.total_length == inside.sum()
    assert cover.length_between(np.array([100.0]), np.array([700.0]))[0] == pytest.approx(inside[100:700].sum())


def test_a_window_of_a_long_run_is_fast() -> None:
    tl = synthetic.timeline(ranks=8, steps=900)
    tl.spans.extend(tl.spans.rows().columns)
    analysis.break_down(tl, 880, 900)
    took = []
    for _ in range(5):
        began = time.process_time()  # of the processor: others may keep it busy
        analysis.break_down(tl, 880, 900)
        took.append(time.process_time() - began)
    assert min(took) < 0.05, "the one that nobody disturbed"
