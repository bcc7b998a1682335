"""Tests pipeline cuts: the best cuts, their time on real ranks, and live changes."""

from __future__ import annotations

import json
import random
import time
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch import nn

from tests.piped import WIDTH, alone, batches, deep, loss, piped, same, seen
from tests.ranks import experiment, run, toy
from widgets.controls.rows import ControlState, make_rows
from workbench import KnobError, balance, simulate
from workbench.analysis import measure_bubble, step_times
from workbench.fabric import Fabric, Link, Slow
from workbench.host.placement.balancing import find_balanced_cut, find_pareto_cuts
from workbench.partitions import Pipeline, Tensor, Whole
from workbench.partitions.schedules import GPipe, Interleaved, OneFOneB, PipeDream
from workbench.settings import Change
from workbench.sim import Costs
from workbench.sim.plan.balancer import BalanceProposal

pytestmark = pytest.mark.ranks


def slowest(times: list[list[int]], cuts: tuple[int, ...]) -> int:
    return max(sum(times[k % len(times)][a:b]) for k, (a, b) in enumerate(pairwise((0, *cuts, len(times[0])))))


def allowed(cuts: tuple[int, ...], n: int, together: set[int], barren: set[int]) -> bool:
    return not together & {*cuts} and all({*range(a, b)} - barren for a, b in pairwise((0, *cuts, n)))


def test_no_cut_has_a_faster_slowest_piece() -> None:
    """Compares with all cuts, for parts that are free and parts that are not."""
    rng, impossible = random.Random(3), 0
    for _ in range(400):
        n, stages = rng.randint(2, 8), rng.randint(1, 3)
        count = stages * rng.randint(1, 2)
        times = [[rng.randint(0, 9) for _ in range(n)] for _ in range(rng.choice((1, stages)))]
        together, barren = ({k for k in range(low, n) if rng.random() < 0.15} for low in (1, 0))
        every = [c for c in combinations(range(1, n), count - 1) if allowed(c, n, together, barren)]
        if not every:
            impossible += 1
            with pytest.raises(ValueError, match="cannot be cut"):
                find_balanced_cut(times, count, together, barren)
            continue
        found = find_balanced_cut(times, count, together, barren)
        assert found in every and slowest(times, found) == min(slowest(times, c) for c in every)
    assert 20 < impossible < 200


def test_no_cuts_beat_the_front_in_both_slowest_stage_and_traffic() -> None:
    """Compares with all cuts, for stages of one or two pieces with different ranks and links."""
    rng, whole = random.Random(5), 0
    for _ in range(300):
        stages, n = rng.randint(1, 3), rng.randint(6, 9)
        count = stages * rng.randint(1, 2)
        times, crossing = ([[rng.randint(0, 9) for _ in range(n)] for _ in range(stages)] for _ in "ab")

        def cost(cuts: tuple[int, ...]) -> tuple[int, int]:
            each = [0] * stages  # noqa: B023
            for k, (a, b) in enumerate(pairwise((0, *cuts, n))):  # noqa: B023
                each[k % stages] += sum(times[k % stages][a:b])  # noqa: B023
            return max(each), sum(crossing[k % stages][at] for k, at in enumerate(cuts, 1))  # noqa: B023

        every = {cost(cuts) for cuts in combinations(range(1, n), count - 1)}
        best = [c for c in sorted(every) if not any(o[0] <= c[0] and o[1] <= c[1] and o != c for o in every)]
        found, exact = find_pareto_cuts(times, count, stages=stages, crossing=crossing)
        assert [cost(way.cuts) for way in found] == [(way.slowest, way.crosses) for way in found]
        assert not exact or [(way.slowest, way.crosses) for way in found] == best
        assert exact or count > stages, "stages of one piece are always weighed in full"
        whole += exact
    assert whole > 250


def test_the_pieces_of_a_stage_are_balanced_as_a_whole() -> None:
    """Judged piece by piece, all cuts into 4 pieces are equally good. Too many cuts give an inexact answer."""
    (way,), exact = find_pareto_cuts([[1, 1, 9, 1, 9, 1, 1, 1]], 4, stages=2)
    assert exact and way.slowest == 12, "a heavy part on each stage"
    (long,), exact = find_pareto_cuts([[1.0 + k * k % 7 for k in range(40)]], 12, stages=4)
    assert not exact and long.slowest <= 1.1 * sum(1.0 + k * k % 7 for k in range(40)) / 4


ALIKE = Costs(forward=0.012, backward=0.024)  # type: ignore[arg-type]  # and updates take no time


def simulated(cuts: tuple[int, ...], micros: int, costs: Costs = ALIKE, **rest: Any) -> Any:
    """Simulates 4 layers of one size on 2 stages with these cuts."""
    layers = lambda: nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])  # noqa: E731
    task = toy(model=layers, data=lambda *_: [(torch.ones(8, WIDTH), torch.zeros(8, WIDTH))], evaluate=None)
    e = experiment(2, 6, task=task, partition=Pipeline(micros=micros, cuts=cuts, **rest))
    return measure_bubble(simulate(e, costs=costs).timeline)


@pytest.mark.parametrize("micros", [1, 4, 8])
@pytest.mark.parametrize("schedule", [GPipe(), OneFOneB()], ids=str)
def test_uneven_stages_idle_for_the_expected_time(schedule: Any, micros: int) -> None:
    """One layer, then 3: the first micro-batch passes one layer before the second stage has work."""
    found = simulated((1,), micros, schedule=schedule)
    lasts = 1 + 3 * micros  # in layer times, forward and backward alike: the last stage never waits again
    assert found.share == pytest.approx(1 - (4 * micros / 2) / lasts, abs=2e-3)
    assert found.busy[1] == pytest.approx(3 * found.busy[0], rel=1e-6)


def test_parts_take_their_measured_times() -> None:
    """The last of 4 equal layers takes as long as the other 3, so 3 and 1 are even."""
    costs = Costs(forward=0.03, backward=0.06, parts=((1, 2), (1, 2), (1, 2), (3, 6)))  # type: ignore[arg-type]
    found = simulated((3,), 4, costs)
    assert found.share == pytest.approx(1 / 5, abs=2e-3)
    assert found.busy == pytest.approx([0.045, 0.045], rel=1e-6)
    other = simulated((), 4, costs)
    assert other.busy == pytest.approx([0.03, 0.06], rel=1e-6)
    with pytest.raises(KnobError, match="costs: has times of 2 parts, but the model has 4"):
        simulated((), 4, replace(costs, parts=((1, 2), (1, 2))))


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grad, None


class Slowly(nn.Module):
    """A layer that sleeps for given seconds in forward, and twice that in backward, and uses little CPU."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.layer, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Sleeps.apply(self.layer(x), self.seconds)


def uneven() -> nn.Module:
    """6 layers of one size; the first 3 take 6 times as long as the last 3."""
    rng = torch.Generator().manual_seed(7)
    model = nn.Sequential(*[Slowly(ms * 1e-3) for ms in (24, 24, 24, 4, 4, 4)], nn.Linear(WIDTH, 4))
    for p in model.parameters():
        p.data = 0.4 * torch.randn(p.shape, generator=rng)
    return model


HEAVY = piped(2, 8, task=toy(model=uneven, data=batches, evaluate=None, loss=loss), partition=Pipeline())


def seconds_per_step(sessions: list[Any]) -> float:
    """Returns the shortest time between the last passes of two steps, because the machine may be busy."""
    ends: dict[int, float] = {}
    for row in sessions[0].record:
        if row[1] == "compute":
            ends[row[0]] = max(ends.get(row[0], 0.0), row[5])
    return min(b - a for a, b in pairwise([ends[k] for k in sorted(ends)][2:]))


def test_balanced_cuts_speed_up_real_ranks_as_predicted() -> None:
    found = balance(HEAVY, rounds=5)
    assert found.cuts == (2,) and found.even is not None and found.even.cuts == (3,)
    assert [u.forward > 14e-3 for u in found.units] == [True] * 3 + [False] * 4
    took = [seconds_per_step(run(replace(HEAVY, partition=way))) for way in (HEAVY.partition, found.partition)]
    assert took[0] > 1.25 * took[1] and found.gain == pytest.approx(took[0] / took[1], rel=0.15)
    assert f"cuts=[{found.cuts[0]}]" in repr(found) and repr(found).count("\n") == 7


def test_live_changes_of_cuts_keep_the_state_exactly() -> None:
    """Three cuts, one with pieces of different sizes, are bit-identical to one process and to the simulator."""
    pieces = Pipeline(schedule=Interleaved(), cuts=(1, 2, 6))
    e = piped(2, 16, partition=Pipeline())
    changes = [Change(4, "partition.cuts", (6,)), Change(8, "partition", pieces),
               Change(12, "partition.cuts", "1, 5, 6")]  # fmt: skip
    sessions = run(e, *changes)
    assert not sessions[0].record.noted("refused")
    marks = [json.loads(mark[3]) for mark in sessions[0].record.noted("partition")]
    texts = [mark["text"].partition("parts ")[2] for mark in marks]
    assert texts == ["0–2 | 3–6", "0–5 | 6", "0, 2–5 | 1, 6", "0, 5 | 1–4, 6"]
    assert all(mark["nbytes"] > 0 for mark in marks[1:])
    same(sessions, 2, alone(e, (16, 1, 4)))
    samples = simulate(e, changes=changes, real=True, costs=ALIKE).timeline.samples.rows()
    mine = (samples.rank == 0) & samples.equal("name", "loss")
    assert samples.value[mine].tolist() == seen(sessions[0], "loss")


REFUSED = [
    ({"cuts": (1, 2)}, "2 stages need 1 cuts, and there are 2"),
    ({"cuts": (2, 2), "stages": 3}, "cuts must increase and begin at 1 or more"),
    ({"cuts": (0,)}, "begin at 1 or more"),
    ({"cuts": (3,), "schedule": Interleaved()}, "2 stages of 2 pieces each need 3 cuts"),
]


@pytest.mark.parametrize(("given", "words"), REFUSED, ids=[words[:12] for _, words in REFUSED])
def test_invalid_cuts_are_refused_with_a_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=words):
        experiment(12, partition=Pipeline(**given))


@pytest.mark.parametrize("value", ["a", "1.5", [1.5], [True], 3, [[1]], [{"a": 1}], [float("inf")], None])
def test_cuts_must_be_a_list_of_integers(value: Any) -> None:
    with pytest.raises(KnobError, match=r"cuts=.*must be a list of integers, such as 2, 5"):
        experiment(2, partition=Pipeline()).set("partition.cuts", value)


def test_cuts_outside_the_model_are_refused_and_the_run_goes_on() -> None:
    task = toy(model=lambda: nn.Sequential(*deep(), nn.Tanh()), data=batches, loss=loss, evaluate=None)
    sessions = run(piped(2, 8, partition=Pipeline(), task=task), Change(2, "partition.cuts", [8]),
                   Change(4, "partition.cuts", [7]), Change(6, "partition.cuts", [1]))  # fmt: skip
    said = [json.loads(mark[3])["reason"] for mark in sessions[0].record.noted("refused")]
    assert len(said) == 2 and "the model has 8 parts" in said[0] and "take smaller numbers" in said[0]
    assert "stage 1 would have no parameters to train; take other cuts" in said[1]
    assert len(sessions[0].layout.order) == 2 and len(seen(sessions[0], "loss")) == 8


def test_controls_show_cuts_as_text_that_can_be_typed() -> None:
    e = experiment(2, partition=Pipeline(stages=2, cuts=(3,)))
    (row,) = [row for row in make_rows(e, ControlState()) if row["path"] == "partition.cuts"]
    assert (row["kind"], row["value"], row["allowed"]) == ("text", "3", "a list of integers, such as 2, 5")
    typed = [e.set("partition.cuts", text).partition.cuts for text in ("2", "[2]", " 2 ,", "", "()")]  # type: ignore[attr-defined]
    assert typed == [(2,), (2,), (2,), (), ()]


EQUAL = [(0.01, 0.02)] * 7


def found_with(way: Any, times: Any = EQUAL, **rest: Any) -> BalanceProposal:
    slow = rest.pop("slow", None)
    return balance(replace(piped(4, partition=way), **rest), times=times, slow=slow)


def test_a_slow_stage_gets_fewer_parts() -> None:
    alike = found_with(Pipeline())
    assert alike.cuts in ((3,), (4,)) and alike.gain == pytest.approx(1.0)
    slow = found_with(Pipeline(), fabric=Fabric(faults=(Slow(rank=3, factor=3.0),)))
    assert slow.cuts == (5,), "3 times 2 parts against 5; rank 3 computes stage 1 of the second replica"
    assert slow.even is not None and slow.even.step_s > 1.2 * slow.best.step_s
    assert found_with(Pipeline(), slow=(1.0, 3.0)).cuts == (5,)
    paced = found_with(Pipeline(), [(0.0, 0.0), (1e-9, 0.0)] + [(0.0, 0.0)] * 5, pace=70.0, slow=(1.0, 3.0))
    assert paced.cuts == (5,), "under a pace parts take what their parameters say"


def test_a_recorded_run_shows_which_stage_is_slow() -> None:
    """The record has its own cuts, a change of them, and a fault that the experiment does not contain."""
    fault = Fabric(faults=(Slow(rank=1, factor=3.0),))
    e = replace(piped(4, 8, partition=Pipeline(cuts=(2,)), fabric=fault), pace=70.0)
    recorded = simulate(e, changes=[Change(4, "partition.cuts", (4,))])
    weights = [(0.3 * w, 0.6 * w) for w in [157.0] * 6 + [53.0]]  # as the pace weighs parts: by parameters, plus one
    found = found_with(Pipeline(), weights, slow=recorded)
    assert found.cuts == found_with(Pipeline(), weights, slow=(1.0, 3.0)).cuts != found_with(Pipeline(), weights).cuts
    first, second = (found.costs.forward[rank].seconds for rank in (0, 1))
    assert second == pytest.approx(3.0 * first, rel=1e-6)
    with pytest.raises(KnobError, match="its last steps do not have 4 stages; take a run with so many"):
        found_with(Pipeline(stages=4), weights, slow=recorded)


def test_pieces_and_slices_are_cut_too() -> None:
    times = [(0.01, 0.02)] * 6 + [(0.05, 0.1)]
    several = found_with(Pipeline(schedule=Interleaved()), times)
    assert several.cuts[-1] == 6 and len(several.cuts) == 3 and several.gain > 1.0
    assert simulate(replace(piped(4), partition=several.partition, steps=3), costs=several.costs).timeline
    sliced = found_with(Pipeline(of=Tensor()), times, task=toy(model=pairs, data=batches, loss=loss, evaluate=None))
    assert sliced.cuts == (6,)


def pairs() -> nn.Module:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, n)) for n in (*[WIDTH] * 6, 4)])


def test_cuts_respect_parts_without_parameters_and_tied_parts() -> None:
    layers = lambda: nn.Sequential(nn.Tanh(), *deep())  # noqa: E731
    task = toy(model=layers, data=batches, loss=loss, evaluate=None)
    found = found_with(Pipeline(), [(0.9, 0.0), *EQUAL], task=task)
    assert found.cuts == (2,), "a Tanh trains nothing, and is not alone"

    def tied() -> nn.Module:
        model = deep()
        model[2][0].weight = model[0][0].weight  # type: ignore[index]
        return model

    task = toy(model=tied, data=batches, loss=loss, evaluate=None)
    assert found_with(Pipeline(), [(0.1, 0.0), *EQUAL[1:]], task=task).cuts == (3,)


NOT_SO = [
    ({"way": Whole()}, "only stages are balanced"),
    ({"way": Pipeline(), "times": [(1, 1)] * 3}, "has 3 parts, but the model has 7"),
    ({"way": Pipeline(), "times": [(1, -1)] * 7}, "must not be negative"),
    ({"way": Pipeline(), "times": [1] * 7}, "pairs of seconds"),
    ({"way": Pipeline(), "slow": (1,)}, "2 positive numbers, one for each stage"),
    ({"way": Pipeline(), "slow": (0, 1)}, "2 positive numbers, one for each stage"),
    ({"way": Pipeline(stages=4, schedule=Interleaved())}, "take at most 7 pieces in all"),
]


@pytest.mark.parametrize(("given", "words"), NOT_SO, ids=[words[:16] for _, words in NOT_SO])
def test_unsupported_settings_are_refused_with_a_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=words):
        found_with(**given)


def test_pipedream_with_a_slow_first_stage_is_predicted() -> None:
    """A minibatch takes at least as long as the slowest part: here the first, which the other stages outrun."""
    times = [(0.010, 0.020)] + [(0.001, 0.002)] * 6
    for stages in (2, 4):
        found = found_with(Pipeline(stages=stages, micros=1, schedule=PipeDream()), times)
        e = replace(piped(4, steps=60), partition=found.partition)
        long = step_times(simulate(e, costs=found.costs).timeline, 20, 50).seconds.mean()
        assert found.best.step_s == pytest.approx(float(long), rel=0.01) and found.best.step_s >= 0.030 - 1e-9


def test_proposed_cuts_account_for_activations_on_slow_links() -> None:
    """Parts take equal time, and one has a wide output: a cut behind it sends that over a slow link."""
    wide = lambda: nn.Sequential(  # noqa: E731
        nn.Sequential(nn.Linear(8, 4000), nn.Linear(4000, 8)), nn.Linear(8, 8), nn.Linear(8, 4000), nn.Linear(4000, 4),
        nn.Linear(4, 4), nn.Linear(4, 4))  # fmt: skip
    task = toy(model=wide, evaluate=None)
    e = experiment(2, 6, task=task, partition=Pipeline(micros=2), fabric=Fabric(link=Link(bandwidth=10.0)))
    slow, fast = (balance(e.set("bandwidth", rate), times=[(0.005, 0.01)] * 6) for rate in (10.0, 1e5))
    assert slow.cuts == (4,) and slow.gain > 1.0, "little crosses there, and no stage takes much longer"
    assert fast.cuts == (4,) and fast.gain > 1.2, "of two micro-batches, whose passes overlap but for the ends"


@pytest.mark.parametrize("rate", [5.0, 1e5])
def test_no_single_cut_is_predicted_to_be_faster_than_the_proposal(rate: float) -> None:
    """All cuts of 2 stages can be simulated. An even cut would send the wide activation."""
    wide = lambda: nn.Sequential(  # noqa: E731
        nn.Linear(8, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 2000), nn.Linear(2000, 4), nn.Linear(4, 4),
        nn.Linear(4, 4))  # fmt: skip
    e = experiment(2, 6, task=toy(model=wide, evaluate=None), partition=Pipeline(micros=2)).set("bandwidth", rate)
    found, steps = balance(e, times=[(0.005, 0.01)] * 6), {}
    for k in range(1, 6):
        run = simulate(replace(e, partition=Pipeline(micros=2, cuts=(k,))), costs=found.costs)
        steps[k] = float(step_times(run.timeline).seconds.mean())
    assert found.cuts == (min(steps, key=lambda k: steps[k]),) == (4,)
    assert found.even is not None and found.even.cuts != found.cuts and found.gain > 1.1


def test_zero_rounds_are_refused() -> None:
    with pytest.raises(KnobError, match="rounds=0: must be at least 1"):
        balance(piped(2, partition=Pipeline()), rounds=0)
