"""Tests each rank's lateness by step: equal to the injected delay, with every way to meet."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from tests.sim.virtual import paced
from tests.unit import synthetic
from widgets.charts.feed import Feed
from widgets.export.report import write_report
from widgets.views._base import draw_view
from widgets.views.causes import Causes
from widgets.views.lateness import Late
from workbench import Change, simulate
from workbench.analysis import LatenessStrips, measure_lateness
from workbench.compressors import PowerSGD
from workbench.fabric import Freeze, Noisy, Slow
from workbench.record.timeline import Span, Timeline
from workbench.run import Run
from workbench.strategies import DDP, AsyncServer, LocalSGD, ZeRO1, ZeRO3
from workbench.strategies.gossip import Gossip

PACE = 20.0  # ms of compute in a step
FORWARD, BACKWARD = 0.3 * PACE, 0.6 * PACE


def milliseconds(tl: Timeline, **some: int) -> np.ndarray:
    """Returns lateness in the steps in which ranks met: (meetings, p)."""
    found = measure_lateness(tl, **some)
    return 1e3 * found.seconds[found.met]


def played(strategy: Any, *faults: Any, ranks: int = 4, steps: int = 12, **rest: Any) -> Run:
    return simulate(paced(ranks, steps, PACE, strategy=strategy, faults=faults, **rest))


@pytest.mark.parametrize("strategy", [DDP(), ZeRO1(), ZeRO3()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("phase", "lost"), [("forward", 0.5 * FORWARD), ("backward", 0.5 * BACKWARD)])
def test_a_rank_has_the_injected_lateness_with_any_number_of_meetings(strategy: Any, phase: str, lost: float) -> None:
    late = milliseconds(played(strategy, Slow(rank=1, factor=1.5, phase=phase)).timeline)
    assert len(late) == 12
    assert late == pytest.approx(np.tile([0, lost, 0, 0], (12, 1)), abs=0.01)


def test_a_slow_update_shows_at_the_next_meeting() -> None:
    slow = (2, "update", synthetic.factor("update"))
    late = milliseconds(synthetic.timeline(steps=40, slow=slow, noise=0.0, hiccups=0.0))
    assert late[1:] == pytest.approx(np.tile([0, 0, 20, 0], (39, 1)), abs=0.2)


def test_lateness_of_a_round_shows_at_its_end() -> None:
    run = played(LocalSGD(every=4), Slow(rank=1, factor=1.5, phase="backward"))
    found = measure_lateness(run.timeline)
    assert found.steps[found.met].tolist() == [3, 7, 11]
    assert 1e3 * found.seconds[found.met] == pytest.approx(np.tile([0, 4 * 0.5 * BACKWARD, 0, 0], (3, 1)), abs=0.01)


def test_two_slow_ranks_have_separate_lateness() -> None:
    faults = Slow(rank=1, factor=1.5, phase="forward"), Slow(rank=3, factor=1.25, phase="backward")
    late = milliseconds(played(DDP(), *faults, ranks=5).timeline)
    assert late[:, [1, 3]] == pytest.approx(np.tile([0.5 * FORWARD, 0.25 * BACKWARD], (12, 1)), abs=0.01)
    assert late[:, [0, 2, 4]].max() < 0.01, "half of the others are late, so these come before their median"


def test_a_slow_link_makes_no_rank_late() -> None:
    run = played(DDP(), Slow(rank=1, factor=20.0, phase="link"))
    assert np.abs(milliseconds(run.timeline)).max() < 0.01


def test_a_pause_shows_in_one_step_only() -> None:
    changes = [Change(5, "fabric.faults", [Freeze(rank=2, seconds=0.5)])]
    late = milliseconds(simulate(paced(4, 12, PACE), changes=changes).timeline)
    assert late[5] == pytest.approx([0, 0, 500, 0], abs=0.01) and np.abs(np.delete(late, 5, axis=0)).max() < 0.01


def test_packing_that_blocks_the_step_counts() -> None:
    """Rank 1's spans of packing are 7 ms longer, so all later spans move by 7 ms."""
    run = played(DDP(), compressor=PowerSGD(rank=1), steps=3)
    assert np.abs(milliseconds(run.timeline)).max() < 0.01
    tl = Timeline()
    for step, at in enumerate((0.0, 0.1)):
        for rank, packs in ((0, 0.003), (1, 0.010), (2, 0.003)):
            came = at + 0.05 + packs
            tl.spans.add([
                Span(rank, step, "compute", "forward", at, at, at + 0.05, 0),
                Span(rank, step, "codec", "encode", at + 0.05, at + 0.05, came, 0),
                Span(rank, step, "comm", "all_reduce bucket 0", at + 0.05, came, at + 0.09, 8),
                Span(rank, step, "wait", "bucket 0", at + 0.05, at + 0.05, at + 0.09, 0),
                Span(rank, step, "step", "DDP", at, at, at + 0.1, 0),
            ])  # fmt: skip
    assert milliseconds(tl) == pytest.approx(np.tile([-3.5, 7, -3.5], (2, 1)), abs=4)
    assert milliseconds(tl)[:, 1] == pytest.approx([7, 7])


def test_different_clocks_make_no_rank_late() -> None:
    rows = synthetic.timeline(steps=30, noise=0.0, hiccups=0.0).spans.rows()
    tl = Timeline()
    ahead = np.where(rows.rank == 2, 5.0, 0.0)
    tl.spans.extend(rows.replaced(asked=rows.asked + ahead, t0=rows.t0 + ahead, t1=rows.t1 + ahead).columns)
    assert np.abs(milliseconds(tl)).max() < 0.5


@pytest.mark.parametrize("strategy", [Gossip(), AsyncServer()], ids=lambda s: type(s).__name__)
def test_ranks_that_only_send_messages_never_meet(strategy: Any) -> None:
    assert not measure_lateness(played(strategy).timeline).met.any()
    assert not Late().update(played(strategy))


def test_a_rank_that_left_is_never_late() -> None:
    rows = synthetic.timeline(steps=20, noise=0.0, hiccups=0.0).spans.rows()
    tl = Timeline()
    tl.spans.extend(rows[(rows.rank != 3) | (rows.step < 10)].columns)
    gone = Timeline()
    gone.spans.extend(rows[(rows.rank != 3) | (rows.step < 19)].columns)
    assert measure_lateness(tl).met.sum() == 10, "steps count once they have ended on every rank known"
    assert not np.isnan(measure_lateness(gone).seconds).any()


@pytest.mark.parametrize("every", [1, 8, 100])
def test_incremental_lateness_equals_the_whole(every: int) -> None:
    tl = synthetic.timeline("LocalSGD", ranks=3, steps=330, every=every, slow=(1, "forward", 1.5))
    whole = measure_lateness(tl)
    for first in (0, 1, 7, 99, 100, 101, 329):
        np.testing.assert_allclose(measure_lateness(tl, first).seconds, whole.seconds[first:], atol=1e-9)
    at_once, bit_by_bit, live = LatenessStrips(3), LatenessStrips(3), Timeline()
    at_once.add_steps(tl)
    rows = tl.spans.rows()
    for piece in range(40):
        live.spans.extend(rows[len(rows) * piece // 40 : len(rows) * (piece + 1) // 40].columns)
        bit_by_bit.add_steps(live)
    np.testing.assert_allclose(at_once.seconds, bit_by_bit.seconds, atol=1e-9)
    np.testing.assert_allclose(at_once.recent, bit_by_bit.recent, atol=1e-9)
    assert at_once.size == bit_by_bit.size == 4 and (at_once.steps == bit_by_bit.steps).all()
    assert at_once.most_at.tolist() == bit_by_bit.most_at.tolist()


def test_a_frame_has_a_row_per_rank_and_a_column_per_step() -> None:
    run = played(LocalSGD(every=4), Slow(rank=1, factor=1.5, phase="backward"))
    frame = run.lateness(5)
    assert frame.shape == (4, 5) and frame.columns.tolist() == [7, 8, 9, 10, 11]
    assert frame.loc[1, 11] == pytest.approx(0.024, abs=1e-5) and frame[8].isna().all()
    assert run.lateness().shape == (4, 12) and Run({"ranks": 2}).lateness().shape == (0, 0)


# -- on the board


def test_the_map_shows_the_injected_delay_in_its_row_only() -> None:
    slow = (2, "backward", synthetic.factor("backward"))
    run = synthetic.run(steps=60, slow=slow, slow_from=30, changes=(), hiccups=0.0)
    figure = draw_view(Late(), run)
    assert figure is not None
    x, y, z = (np.asarray(figure.data[0][k], float) for k in "xyz")
    late = (y == 2) & (x >= 30)
    assert np.median(z[late]) == pytest.approx(20, abs=2) and np.median(z[~late]) == pytest.approx(0, abs=1)
    assert figure.layout.coloraxis.cmax in (20, 50), "noise alone is pale"
    assert "meetings: rank 2, 19.3 ms" in figure.layout.xaxis.title.text
    grid = Late().table(run)
    assert grid is not None and [row[0] for row in grid.rows] == [0, 1, 2, 3]
    assert float(grid.rows[2][1]) == pytest.approx(20, abs=2) and grid.rows[2][4] >= 30


def test_columns_of_a_long_run_average_several_steps() -> None:
    run = synthetic.run(steps=500, slow=(1, "forward", synthetic.factor("forward")), noise=0.0, hiccups=0.0, changes=())
    figure = draw_view(Late(), run)
    assert figure is not None
    x, y, z = (np.asarray(figure.data[0][k], float) for k in "xyz")
    assert len(set(x)) == 63 and len(z) == 4 * 63 and set(np.diff(np.unique(x))) == {8.0}
    assert z[y == 1] == pytest.approx(20, abs=0.5) and np.abs(z[y != 1]).max() < 0.5


def test_the_column_of_a_round_is_as_wide_as_its_steps() -> None:
    run = synthetic.run("LocalSGD", steps=40, noise=0.0, hiccups=0.0, changes=(), slow=(1, "forward", 2.0))
    x, y, z = (Late().update(run).replace[0][k] for k in "xyz")
    assert sorted(set(x.tolist())) == list(range(40)) and z[y == 1] == pytest.approx(8 * 30, abs=1)


def test_the_map_is_empty_for_one_rank_and_in_a_riddle(tmp_path: Any) -> None:
    assert not Late().update(synthetic.run(ranks=1, steps=30, changes=()))
    run = synthetic.run(steps=60, slow=(2, "backward", 1.5), changes=())
    run.secret = "A riddle."
    feed = Feed(run, (Late,))
    sent = feed.make_opening()[0]["views"]["lateness"]
    assert "replace" not in sent and feed.make_table("lateness") == {}
    assert write_report(run, tmp_path / "r.html").exists()
    run.secret = ""
    assert feed.make_news()[0]["views"]["lateness"]["replace"] and feed.make_table("lateness")["rows"]  # type: ignore[index]


def test_sixty_four_ranks_are_sent_rarely_and_in_few_bytes() -> None:
    host = synthetic.Host(64, 0.1, link=False, seed=0, noise=0.05, hiccups=0.0)
    for step in range(125):
        host.step(step)
    run = Run({"ranks": 64}, live=True)
    run.timeline = host.timeline()
    feed, late = Feed(run, (Late,)), Late()
    size = sum(map(len, feed.make_opening()[1]))
    assert size < 64 * 64 * 9, "a step more than 120 made 63 strips of them"
    late.update(run)
    run.timeline.spans.add([Span(0, 125, "step", "DDP", 99.0, 99.0, 99.1, 0)])
    assert not late.update(run), "asked again at once"
    assert json.dumps(feed.make_opening()[0]["specs"])


def test_noise_alone_is_pale_on_the_map() -> None:
    run = played(DDP(), Noisy(spread=0.05), steps=60)
    figure = draw_view(Late(), run)
    assert figure is not None
    assert np.max(figure.data[0].z) < 0.3 * figure.layout.coloraxis.cmax


def test_causes_are_listed_and_disappear_without_one() -> None:
    slow = synthetic.run(steps=60, slow=(2, "backward", synthetic.factor("backward")), changes=(), link=False)
    said = Causes().update(slow).html
    assert said is not None and said.startswith('<ol class="wb-causes"><li><b>backward, ')
    assert "Rank 2: its backward takes" in said
    assert Causes().update(synthetic.run(steps=60, changes=(), link=False, hiccups=0.0)).html == ""
    slow.live, watching = True, Causes()
    assert watching.update(slow) and not watching.update(slow)
