"""Checks every sentence of the views on extreme runs: it exists, has no NaN, and agrees with the rows."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from html import unescape
from typing import Any

import numpy as np
import pytest

from tests.sim.virtual import paced, stack
from tests.unit import synthetic
from tests.unit.encoded import SLOW, TOPK, Author
from widgets.views import all_views
from widgets.views._base import View, draw_view
from workbench import Change, simulate
from workbench.analysis import find_straggler
from workbench.fabric import Noisy, Slow
from workbench.record.timeline import Mark, Sample, Span, Timeline
from workbench.run import Run
from workbench.strategies import DDP, AsyncServer, Gossip, LocalSGD

pytestmark = pytest.mark.ranks
KINDS = {kind.name: kind for kind in all_views().values()}


def told(*values: float, ranks: int = 2, changes: tuple[int, ...] = ()) -> Run:
    """Returns steps of 100 ms with these losses."""
    run = Run({"ranks": ranks})
    for s, loss in enumerate(values):
        at = 0.1 * s
        run.timeline.spans.add([Span(r, s, lane, name, at, at, at + 0.1, 0) for r in range(ranks)
                                for lane, name in (("compute", "forward"), ("step", "DDP"))])  # fmt: skip
        run.timeline.samples.add([Sample(r, s, "loss", at + 0.1, loss) for r in range(ranks)])
    marks = [Mark(0, s, "change", 0.1 * s, json.dumps({"path": "lr", "value": 1.0})) for s in changes]
    run.timeline.marks.add(marks)
    return run


def one_rank_each(*slow: tuple[int, int, float], steps: int = 60, ranks: int = 4) -> Run:
    """Returns a run with slow ranks: `slow` is (rank, from step, factor) of all compute."""
    host = synthetic.Host(ranks, 0.1, link=True, seed=1, noise=0.03, hiccups=0.0)
    seconds = host.seconds
    for step in range(steps):
        now = [(rank, factor) for rank, begin, factor in slow if begin <= step][-1:]
        host.seconds = lambda r, phase, now=now: seconds(r, phase) * dict(now).get(r, 1.0)  # type: ignore[misc]
        host.step(step)
    run = Run({"ranks": ranks})
    run.timeline = host.timeline()
    return run


def of(strategy: Any, *faults: Any, ranks: int = 4, steps: int = 80, changes: tuple[Change, ...] = ()) -> Run:
    wanted = paced(ranks, steps, 20.0, strategy=strategy, task=stack(3, 100), faults=(*faults, Noisy(spread=0.05)))
    return simulate(wanted, changes=changes)


LATE = Slow(rank=1, factor=1.6, phase="compute")
SWITCHES = (Change(30, "strategy", LocalSGD(every=4)), Change(55, "strategy", Gossip()))
RUNS: dict[str, Callable[[], Run]] = {
    "empty": lambda: Run({"ranks": 4}),
    "empty and live": lambda: Run({"ranks": 4}, live=True),
    "one step": lambda: told(2.0),
    "one rank": lambda: told(*np.linspace(3, 2, 50), ranks=1, changes=(25,)),
    "constant loss": lambda: told(*[2.0] * 60, changes=(30,)),
    "loss rises": lambda: told(*np.linspace(2, 3, 60), changes=(30,)),
    "NaN from the first step": lambda: told(*[float("nan")] * 60, changes=(30,)),
    "NaN after a change": lambda: told(*[2.0] * 30, *[float("nan")] * 30, changes=(30,)),
    "change before the first step": lambda: told(*[2.0] * 30, changes=(0,)),
    "change that no step followed": lambda: told(*[2.0] * 30, changes=(30,)),
    "changes in every step": lambda: told(*np.linspace(3, 2, 40), changes=tuple(range(1, 40))),
    "two steps after a change": lambda: synthetic.run(steps=102, changes=((100, "strategy", "LocalSGD"),)),
    "all equally slow": lambda: one_rank_each(),
    "one slow": lambda: one_rank_each((2, 0, 1.5)),
    "another slow later": lambda: one_rank_each((2, 0, 1.5), (3, 30, 1.5)),
    "compressed": lambda: _compressed(40),
    "compressed for two steps": lambda: _compressed(2),
    "accumulate": lambda: of(DDP(accumulate=4), LATE),
    "LocalSGD": lambda: of(LocalSGD(every=8), LATE),
    "LocalSGD before it meets": lambda: of(LocalSGD(every=200), LATE),
    "gossip": lambda: of(Gossip(), LATE),
    "async": lambda: of(AsyncServer(), LATE),
    "switched": lambda: of(DDP(), changes=SWITCHES),
}


def _compressed(steps: int) -> Run:
    author = Author(TOPK)
    author.steps(steps, SLOW)
    return author.run


@pytest.fixture(scope="module")
def runs() -> Iterator[dict[str, Run]]:
    yield {}


def given(runs: dict[str, Run], name: str) -> Run:
    return runs.setdefault(name, RUNS[name]()) if name not in runs else runs[name]


def text(view: View, run: Run) -> str:
    """Returns the text that a reader sees."""
    html = view.update(run).html
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split()) if html else ""


@pytest.mark.parametrize("name", RUNS)
def test_every_view_has_sound_text_or_a_figure_for_every_run(runs: dict[str, Run], name: str) -> None:
    run = given(runs, name)
    for kind in KINDS.values():
        figure, said = draw_view(kind(), run), text(kind(), run)
        assert figure is not None or said or kind.quiet, kind.name
        for wrong in ("nan", "inf ", "None", " -0 ", ", 0 % of its", "[+0, +0]"):
            assert wrong not in said.replace("finite", ""), (kind.name, wrong, said)
        if kind.name != "log":
            assert not re.search(r"\d %(?! of | bootstrap)", said), f"a percentage says of what: {said}"
        grid = kind().table(run)
        assert grid is None or all(len(row) == len(grid.head) for row in grid.rows)


@pytest.mark.parametrize("name", RUNS)
def test_a_rank_named_as_slow_is_slower_by_the_stated_amount(runs: dict[str, Run], name: str) -> None:
    run = given(runs, name)
    verdict, said = find_straggler(run.timeline), text(KINDS["straggler"](), run)
    assert ("is the cause" in said) == (verdict is not None)
    if verdict is None:
        return
    compute = computed(run.timeline, 20)
    others = np.median(np.delete(compute, verdict.rank))
    assert compute[verdict.rank] > 1.2 * others, "independently: its compute was longer"
    assert verdict.rank == int(np.argmax(compute)) and verdict.rank not in verdict.victims
    assert verdict.seconds == pytest.approx(compute[verdict.rank] - others, rel=0.3)
    assert 0 < verdict.share <= 1 and verdict.phase == "compute"
    assert all(phase in said for phase in verdict.phases)
    assert ("No rank has waited for it yet" in said) == (not verdict.victims)


def computed(tl: Timeline, last: int) -> np.ndarray:
    """Returns (p,) mean seconds of compute per step in the last steps, straight from the rows."""
    rows = tl.spans.rows()
    out = []
    for rank in np.unique(rows.rank):
        mine = rows[rows.equal("lane", "compute") & (rows.rank == rank)]
        mine = mine[mine.step > mine.step.max() - last]
        out.append(float((mine.t1 - mine.t0).sum()) / len(np.unique(mine.step)))
    return np.array(out)


SPOKEN = {
    "empty": ("straggler", "Too few steps since the start or the last change to find a slow rank."),
    "empty and live": ("straggler", "appears here a few steps after the start and after each change."),
    "one rank": ("straggler", "A single rank cannot delay other ranks."),
    "all equally slow": ("straggler", "No rank delays the other ranks."),
    "one slow": ("straggler", "Rank 2 is the cause: its compute as a whole (forward, backward and update) takes "),
    "another slow later": ("straggler", "Rank 3 is the cause: its compute as a whole"),
    "LocalSGD": ("straggler", "Rank 1 is the cause: its compute as a whole"),
    "accumulate": ("straggler", "Rank 1 is the cause: its compute as a whole"),
    "gossip": ("straggler", "Rank 1 is the cause: its compute as a whole"),
    "constant loss": ("cards", "before: does not change"),
    "switched": ("cards", "before: no loss on the record"),
    "change before the first step": ("cards", "No verdict. Before: no steps."),
    "loss rises": ("cards", "after: rises by 1.69 per 100 steps [1.69, 1.69]"),
    "NaN from the first step": ("cards", "before: never finite after: never finite"),
    "NaN after a change": ("cards", "after: never finite"),
    "two steps after a change": ("cards", "No verdict. After: too short: 2 steps, 0 of them undisturbed; needs 20."),
    "change that no step followed": ("cards", "A card for each change appears here"),
    "compressed for two steps": ("pays", "The run has too few steps with TopK(density=0.01)"),
    "compressed": ("pays", "The time with Dense is unknown"),
}


@pytest.mark.parametrize("name", SPOKEN)
def test_views_show_the_expected_text_on_extreme_runs(runs: dict[str, Run], name: str) -> None:
    view, words = SPOKEN[name]
    assert words in text(KINDS[view](), given(runs, name))


@pytest.mark.parametrize("name", RUNS)
def test_a_card_reports_only_true_increases_and_decreases(runs: dict[str, Run], name: str) -> None:
    """Compares each row's text with medians of the record; fewer than twenty steps give no verdict."""
    run = given(runs, name)
    html = str(KINDS["cards"]().update(run).html)
    for table in re.findall(r"<table.*?</table>", html, re.S):
        spans = re.search(r"steps (\d+)-(\d+) against (\d+)-(\d+)", table)
        if "No verdict" in table:
            assert not re.search("up, |down, ", table)
        for word, sign in (("up, &times;", 1), ("down, &divide;", -1)):
            if re.search(rf"<th scope=\"row\">step</th>.*?{word}.*?</tr>", table.split("</tr>")[1]):
                assert spans, "steps are named where a verdict is given"
                a, b, c, d = map(int, spans.groups())
                assert b - a >= 20 and d - c >= 20
                assert sign * (lasted(run, c, d) - lasted(run, a, b)) > 0


def lasted(run: Run, first: int, last: int) -> float:
    rows = run.timeline.spans.rows()
    rows = rows[rows.equal("lane", "step") & (rows.step >= first) & (rows.step <= last)]
    return float((rows.t1 - rows.t0).mean())


def test_a_changing_straggler_is_never_mistaken_for_a_third_rank(runs: dict[str, Run]) -> None:
    rows = given(runs, "another slow later").timeline.spans.rows()
    named = []
    for stop in range(10, 61, 2):
        until = Timeline()
        until.spans.extend(rows[rows.step < stop].columns)
        verdict = find_straggler(until)
        named.append(verdict.rank if verdict else None)
    assert set(named) <= {2, 3, None} and named[5] == 2 and named[-1] == 3
    assert sorted(n for n in named if n is not None) == [n for n in named if n is not None], "and never back"
