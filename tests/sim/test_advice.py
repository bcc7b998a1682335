"""Tests the largest causes in a step and the advice: injected faults rank first, no cause is invented."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.sim.virtual import paced, stack
from tests.unit import synthetic
from workbench import Change, simulate
from workbench.analysis import step_times
from workbench.analysis.stragglers.causes import Cause, find_causes
from workbench.fabric import Freeze, Noisy, Slow, TransientStraggler
from workbench.record.timeline import Span, Timeline
from workbench.run import Run
from workbench.settings import KnobError
from workbench.sim.plan import advice as advising
from workbench.strategies import DDP, Gossip, LocalSGD, ZeRO3

pytestmark = pytest.mark.ranks
PACE = 0.02  # seconds of compute in a step
NOISE = Noisy(spread=0.05)
FAST = 10_000.0  # Mbit/s
LARGE = stack(4, 300)


def run(*faults: Any, ranks: int = 4, mbit: float = FAST, changes: tuple[Change, ...] = (), **rest: Any) -> Run:
    wanted = paced(ranks, 60, 1e3 * PACE, mbit, faults=(*faults, NOISE), **rest)
    return simulate(wanted, changes=changes)


def first(made: Run | Timeline) -> Cause:
    return find_causes(made if isinstance(made, Timeline) else made.timeline)[0]


@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=4), ZeRO3()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize(("phase", "share"), [("forward", 0.3), ("backward", 0.6)])
def test_a_rank_slow_in_one_phase_comes_first_with_what_it_costs(strategy: Any, phase: str, share: float) -> None:
    found = first(run(Slow(rank=1, factor=1.5, phase=phase), strategy=strategy))
    assert (found.cause, found.ranks) == (phase, (1,))
    assert found.seconds == pytest.approx(0.5 * share * PACE, rel=0.1)


@pytest.mark.parametrize("phase", ["forward", "backward", "update"])
def test_a_delay_of_10_percent_in_one_phase_is_named_despite_noise_and_hiccups(phase: str) -> None:
    cause = "optimizer" if phase == "update" else phase
    for seed in range(5):
        slow = (2, phase, synthetic.factor(phase, 0.1))
        found = first(synthetic.timeline(steps=60, slow=slow, link=False, noise=0.02, seed=seed))
        assert (found.cause, found.ranks) == (cause, (2,))


@pytest.mark.parametrize("noise", [0.02, 0.08])
@pytest.mark.parametrize("strategy", ["DDP", "LocalSGD"])
def test_no_rank_is_blamed_without_an_injected_fault(strategy: str, noise: float) -> None:
    for seed in range(6):
        tl = synthetic.timeline(strategy, steps=100, link=False, noise=noise, hiccups=0.02, seed=seed)
        assert not [c for c in find_causes(tl) if c.ranks and c.cause != "frozen"]


def test_a_run_without_a_fault_gets_no_advice() -> None:
    advised = run().advice()
    assert advised == [] and repr(advised) == "No single cause exceeds 5 % of the step."
    assert "No single cause" in advised._repr_html_()
    assert find_causes(Timeline()) == [] and run(ranks=1).advice() == []


def test_two_stragglers_at_once_are_two_rows_or_one_row_of_two() -> None:
    slow = Slow(rank=2, factor=1.6, phase="forward"), Slow(rank=3, factor=1.4, phase="backward")
    found = find_causes(run(*slow, ranks=5).timeline)
    assert [(c.cause, c.ranks) for c in found] == [("backward", (3,)), ("forward", (2,))]
    same = Slow(rank=2, factor=1.5, phase="forward"), Slow(rank=3, factor=1.5, phase="forward")
    assert (found := first(run(*same, ranks=5))).ranks == (2, 3) and found.cause == "forward"
    assert found.seconds == pytest.approx(0.5 * 0.3 * PACE, rel=0.1), "one alone would gain nothing"


def test_a_slow_link_of_one_rank_is_blamed_on_the_network_and_that_rank() -> None:
    found = find_causes(run(Slow(rank=2, factor=10.0, phase="link"), mbit=1000.0, task=LARGE).timeline)
    assert [(c.cause, c.ranks) for c in found] == [("network", (2,))]


def test_a_slow_network_is_blamed_without_naming_a_rank() -> None:
    found = first(run(mbit=100.0, task=LARGE))
    assert (found.cause, found.ranks) == ("network", ()) and found.share > 0.5


def test_a_slow_phase_hidden_by_communication_is_not_blamed() -> None:
    """A delay of 3 ms hides behind 160 ms of transfer. With gossip no rank waits for the transfer either."""
    rows = find_causes(
        run(Slow(rank=1, factor=1.5, phase="forward"), strategy=Gossip(), mbit=100.0, task=LARGE).timeline
    )
    assert not [c for c in rows if c.ranks]


def test_a_freeze_and_a_rank_with_hiccups_are_reported_as_frozen() -> None:
    paused = [Change(40, "fabric.faults", [NOISE, Freeze(rank=2, seconds=0.5)])]
    found = first(run(changes=tuple(paused)))
    assert (found.cause, found.ranks) == ("frozen", (2,)) and "once in 20 steps, for 500 ms at step 40" in found.text
    assert found.seconds == pytest.approx(0.5 / 20, rel=0.05)
    stumbles = first(run(TransientStraggler(rank=1, probability=0.1)))
    assert (stumbles.cause, stumbles.ranks) == ("frozen", (1,))


def test_the_longer_first_step_is_not_a_cause() -> None:
    """Ranks that do not meet in every step are judged by the mean over all steps."""
    made, tl = run(strategy=LocalSGD(every=8)).spans.query("step < 30"), Timeline()
    for row in made.itertuples():
        began = 0.8 * (row.step > 0)
        end = row.t1 + (0.8 if row.lane == "step" else began)
        span = Span(row.rank, row.step, row.lane, row.name, row.asked + began, row.t0 + began, end, row.nbytes)
        tl.spans.add([span])
    assert [c for c in find_causes(tl) if c.cause in ("frozen", "outside")] == []


def handmade(ranks: tuple[int, ...], **longer: float) -> Timeline:
    """Returns 20 steps of 3 ranks. On `ranks`, each phase in `longer` takes so many seconds more."""
    tl, at = Timeline(), 0.0
    took = {"input": 0.001, "forward": 0.03, "backward": 0.06, "codec": 0.001, "update": 0.01, "outside": 0.0005}
    for step in range(20):
        spans, came = [], []
        for rank in range(3):
            mine = {k: v + longer.get(k, 0.0) * (rank in ranks) for k, v in took.items()}
            begin = at + mine["outside"]
            forward = begin + mine["input"]
            backward = forward + mine["forward"]
            asked = backward + mine["backward"]
            came.append(asked + mine["codec"])
            spans.append((rank, begin, forward, backward, asked, mine))
        done = max(came) + 0.002
        ends = []
        for rank, begin, forward, backward, asked, mine in spans:
            end = done + mine["update"]
            ends.append(end)
            tl.spans.add([
                Span(rank, step, "compute", "forward", forward, forward, backward, 0),
                Span(rank, step, "compute", "backward", backward, backward, asked, 0),
                Span(rank, step, "codec", "encode", asked, asked, came[rank], 0),
                Span(rank, step, "comm", "all_reduce bucket 0", asked, came[rank], done, 8),
                Span(rank, step, "wait", "bucket 0", asked, asked, done, 0),
                Span(rank, step, "compute", "update", done, done, end, 0),
                Span(rank, step, "step", "DDP", begin, begin, end, 0),
            ])  # fmt: skip
        at = max(ends)
    return tl


@pytest.mark.parametrize("cause", ["input", "codec", "outside", "forward", "backward"])
def test_each_cause_on_one_rank_is_reported_by_its_name(cause: str) -> None:
    (found,) = find_causes(handmade((1,), **{cause: 0.02}))
    assert (found.cause, found.ranks) == (cause, (1,)) and found.seconds == pytest.approx(0.02, rel=0.01)
    assert "Rank 1" in found.text and "20 ms longer" in found.text


@pytest.mark.parametrize("cause", ["input", "codec", "outside"])
def test_a_cause_on_all_ranks_is_reported_without_a_rank(cause: str) -> None:
    (found,) = find_causes(handmade((0, 1, 2), **{cause: 0.02}))
    assert (found.cause, found.ranks) == (cause, ()) and found.seconds == pytest.approx(0.021, abs=0.001)


def test_slow_forward_and_backward_of_all_ranks_are_not_a_cause() -> None:
    assert find_causes(handmade((0, 1, 2), forward=0.05, backward=0.1)) == []


# -- advice


def test_suggestions_for_a_slow_network_hold_when_followed() -> None:
    made = run(mbit=1000.0, task=stack(12, 60), bucket_mb=0.015, latency=1.0)
    (row,) = made.advice()
    assert row.cause == "network" and row.suggestions
    for suggestion in row.suggestions:
        other = made.experiment
        for path, value in suggestion.settings.items():
            other = other.set(path, value)
        before, after = (np.mean(step_times(r.timeline, 48).seconds) for r in (made, simulate(other)))
        examples = other.strategy.batches(1) / made.experiment.strategy.batches(1)
        assert 1 - after / before / examples == pytest.approx(suggestion.faster, abs=0.05)
    assert not row.suggestions[0].learns and "bucket_mb" in row.suggestions[0].settings
    assert row.next.startswith(f"turn bucket_mb to {row.suggestions[0].settings['bucket_mb']:g}: the simulator says ")


def test_no_setting_is_suggested_against_a_slow_processor() -> None:
    (row,) = run(Slow(rank=1, factor=1.5, phase="backward")).advice()
    assert row.suggestions == () and row.next == "look at what else runs next to that rank"
    assert "backward" in repr(run(Slow(rank=1, factor=1.5, phase="backward")).advice())


@pytest.mark.parametrize("error", [KnobError("it runs on ranks alone"), ZeroDivisionError("division by zero")])
@pytest.mark.parametrize("fails", ["measuring", "simulating"])
def test_advice_lists_causes_although_nothing_can_be_simulated(
    fails: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Run.of(run(Slow(rank=1, factor=1.5, phase="forward")))

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(advising, "RunPredictor" if fails == "measuring" else "_best_suggestions", fail)
    told = made.advice()
    assert (told[0].cause, told[0].ranks, told[0].suggestions) == ("forward", (1,), ())
    assert f"No setting could be simulated: {error}." in repr(told) and f"{error}." in told._repr_html_()


def test_advice_names_the_causes_that_it_could_not_simulate_next_to_those_that_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = [Cause(cause, (), 0.01, 0.1, "Seen.") for cause in ("network", "codec")]

    def best(asked: Any, kind: str) -> tuple[advising.Suggestion, ...]:
        if kind == "codec":
            raise RuntimeError("a task's own function failed.")
        return (advising.Suggestion({"bucket_mb": 4.0}, 0.2, 0.0, False),)

    monkeypatch.setattr(advising, "find_causes", lambda timeline, last: found)
    monkeypatch.setattr(advising, "why_unjudged", lambda timeline, last: "")
    monkeypatch.setattr(advising, "RunPredictor", lambda run: None)
    monkeypatch.setattr(advising, "_best_suggestions", best)
    advised = advising.advise_run(SimpleNamespace(timeline=None))  # type: ignore[arg-type]
    for text in (repr(advised), advised._repr_html_()):
        assert "turn bucket_mb to 4" in text
        assert "No setting against codec could be simulated: a task" in text
