"""Tests that an empty answer of a public query has a reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.unit import synthetic
from workbench.record.timeline import Span, Timeline
from workbench.run import Run

NO_STEP = "No step ended on every rank."
QUESTIONS: dict[str, tuple[Callable[[Run], Any], str]] = {
    "memory": (lambda run: run.memory(), NO_STEP),
    "lateness": (lambda run: run.lateness(), NO_STEP),
    "collectives": (lambda run: run.collectives(), NO_STEP),
    "critical_path": (lambda run: run.critical_path(), NO_STEP),
    "overlap": (lambda run: run.overlap(), NO_STEP),
    "entered": (lambda run: run.entered(), "The run is not live"),
    "clocks": (lambda run: run.clocks(), "No rank has reported its host"),
    "recording": (lambda run: run.recording(), "No rank has reported the cost of recording"),
    "gpus": (lambda run: run.gpus(), "have no reading of a GPU"),
    "advice": (lambda run: run.advice(), "Too few steps to say what costs a step most: 0 of the last 40"),
}  # fmt: skip


def run_under(strategy: str, timeline: Timeline, ranks: int = 2) -> Run:
    return Run({"strategy": {strategy: {}}, "ranks": ranks}, timeline=timeline, name="asked")


def without_exchange(ranks: int = 2, steps: int = 12) -> Timeline:
    """Steps with nothing but compute on the record."""
    tl = Timeline()
    for step in range(steps):
        for rank in range(ranks):
            tl.spans.add([Span(rank, step, "compute", "forward", step, step, step + 0.5, 0),
                          Span(rank, step, "step", "s", step, step, step + 0.9, 0)])  # fmt: skip
    return tl


@pytest.mark.parametrize("name", QUESTIONS)
def test_an_empty_answer_shows_why(name: str) -> None:
    ask, why = QUESTIONS[name]
    found = ask(Run({"ranks": 2}, name="nothing yet"))
    assert len(found) == 0 and why in repr(found)
    if hasattr(found, "attrs"):
        assert why in found.attrs["why"] and why in found._repr_html_()


def test_every_query_of_a_run_is_in_the_table() -> None:
    from workbench.analysis.summary.frames import RunFrames

    public = {name for name in vars(RunFrames) if not name.startswith("_")}
    assert public <= set(QUESTIONS)


@pytest.mark.parametrize("strategy", ["TorchDDP", "TorchFSDP"])
@pytest.mark.parametrize("name", ["lateness", "collectives", "overlap"])
def test_an_exchange_by_torch_is_named_as_the_reason(strategy: str, name: str) -> None:
    found = QUESTIONS[name][0](run_under(strategy, without_exchange()))
    why = f"torch itself performs the exchange of {strategy}, so the record shows it only on an emulated Link."
    assert why in repr(found) and "use the strategy DDP" in found.attrs["why"]


def test_ranks_without_meetings_and_a_single_rank_are_named_as_reasons() -> None:
    apart = run_under("LocalSGD", without_exchange()).lateness(5)
    assert "met in no collective of steps 7 to 11 under LocalSGD" in repr(apart) and "last=" in repr(apart)
    assert "One rank trains" in repr(run_under("DDP", without_exchange(1), 1).lateness())
    assert "last=0 must be 1 or more" in repr(run_under("DDP", without_exchange()).lateness(0))


def test_an_answer_shows_no_reason_if_it_is_not_empty() -> None:
    run = run_under("DDP", synthetic.timeline(steps=20, link=False))
    for name in ("lateness", "collectives", "critical_path", "overlap"):
        found = QUESTIONS[name][0](run)
        assert len(found) and "why" not in found.attrs and type(found).__name__ == "DataFrame"
    assert run.advice().unjudged == ""


def test_advice_distinguishes_too_few_steps_from_steps_without_costs() -> None:
    few, enough = (run_under("DDP", synthetic.timeline(steps=n, link=False)).advice() for n in (4, 40))
    assert few == [] and "Too few steps" in repr(few) and "6 must" in few._repr_html_()
    assert enough == [] and repr(enough).startswith("No single cause exceeds 5 %")


def test_a_hostile_name_of_a_strategy_becomes_no_html() -> None:
    shown = run_under("<script>", without_exchange()).lateness(5)._repr_html_()
    assert "<script>" not in shown and "&lt;script&gt;" in shown
