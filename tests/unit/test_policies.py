"""Tests policies: their rules against numpy, equal decisions on both clocks, and conflicts with a user's changes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from tests.piped import piped
from tests.ranks import Rows, batch, experiment, mse, placed, run, together, weights
from workbench import Costs, Run, plan, simulate
from workbench.analysis.export.export import as_python
from workbench.compressors import DGC, ErrorFeedback, TopK, Wangni
from workbench.compressors._gain import Gain
from workbench.experiment import Experiment
from workbench.fabric import Fabric
from workbench.fabric.slow import Slow
from workbench.partitions import Pipeline, Whole
from workbench.partitions.schedules import OneFOneB, PipeDream2BW
from workbench.policies import AdaComm, ByHand, Decision, GraVAC, Policy, Seen, SyncSwitch
from workbench.policies.sync_switch import slower
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, AsyncServer, ByteScheduler, LocalSGD

pytestmark = pytest.mark.ranks


@dataclass(frozen=True, kw_only=True)
class Halver(Policy):
    """Halves the rate at every look."""

    reads: ClassVar[tuple[str, ...]] = ("loss",)

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        yield Decision("half is enough", {"lr": seen.experiment.lr / 2})


@dataclass(frozen=True, kw_only=True)
class Clumsy(Policy):
    """Fails at every look."""

    error: ClassVar[type[BaseException]] = ValueError

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        raise self.error("no such luck")


@dataclass(frozen=True, kw_only=True)
class Stubborn(Policy):
    """Requests an invalid change together with a valid one."""

    path: ClassVar[str] = "bucket_mb"

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        yield Decision("why not", {self.path: -1.0, "lr": 0.5})


def made(done: Run, by: str | None = None) -> list[tuple[int, str, Any]]:
    """Returns (step, path, value) of every change, of one policy or of all."""
    return [(step, d["path"], d["value"]) for step, _, d in done.details("change") if by is None or d.get("by") == by]


def said(done: Run) -> list[str]:
    return [d["text"] for _, _, d in done.details("policy")]


def noted(rows: Rows, name: str) -> list[dict[str, Any]]:
    """Returns the details of a rank's marks with this name."""
    return [json.loads(detail) | {"step": step} for step, _, _, detail in rows.noted(name)]


def decided(e: Experiment, *changes: Change) -> list[list[tuple[int, str, Any]]]:
    """Returns the changes in a simulation with real tensors and on real ranks."""
    virtual = made(simulate(e, changes=changes, costs=PACED, real=True))
    real = [(d["step"], d["path"], d["value"]) for d in noted(run(e, *changes)[0].record, "change")]
    return [virtual, real]


PACED = Costs(forward=0.01, backward=0.02, update=0.005)


@dataclass(frozen=True, kw_only=True)
class Onlooker(Policy):
    """Decides nothing, and keeps everything it sees."""

    reads: ClassVar[tuple[str, ...]] = ("compute",)
    saw: ClassVar[list[Seen]] = []

    def decide(self, seen: Seen, state: Any) -> list[Decision]:
        self.saw.append(seen)
        return []


def test_compute_seconds_per_step_include_all_passes() -> None:
    Onlooker.saw.clear()
    simulate(experiment(steps=20, policy=Onlooker(look_every=5), strategy=DDP(accumulate=2)), costs=PACED)
    assert [seen.step for seen in Onlooker.saw] == [5, 10, 15]
    for seen in Onlooker.saw:
        assert seen.numbers["compute"] == pytest.approx([2 * 0.03 + 0.005] * len(seen.numbers["compute"]))


# -- AdaComm


def periods(losses: Sequence[float], first: int, decay: float = 0.5) -> list[int]:
    """Returns tau after each look by the paper's rule; the first look changes nothing."""
    f, tau = np.asarray(losses), [first]
    for x in f[1:]:
        rule = int(np.ceil(np.sqrt(x / f[0]) * first))
        tau.append(rule if rule < tau[-1] else max(1, int(np.ceil(decay * tau[-1]))))
    return tau


@pytest.mark.parametrize("seed", range(6))
def test_the_period_follows_the_root_of_the_loss(seed: int) -> None:
    rng = np.random.default_rng(seed)
    losses, policy = 4 * np.exp(-np.arange(12) * rng.uniform(0, 0.4)) * rng.uniform(0.8, 1.2, 12), AdaComm()
    e, state, got = Experiment(strategy=LocalSGD(every=64)), policy.init(), []
    for look, loss in enumerate(losses):
        for decision in policy.decide(Seen(experiment=e, step=look, seconds=0.0, numbers={"loss": (loss,)}), state):
            for path, value in decision.changes.items():
                e = e.set(path, value)
        got.append(e.strategy.every)
    assert got == periods(losses, 64)
    assert got[-1] < got[0]


def test_at_a_constant_loss_the_period_halves() -> None:
    e, policy, got = Experiment(strategy=LocalSGD(every=64)), AdaComm(decay=0.5), []
    state = policy.init()
    for look in range(6):
        for decision in policy.decide(Seen(experiment=e, step=look, seconds=0.0, numbers={"loss": (2.0,)}), state):
            e = e.set("strategy.every", decision.changes["strategy.every"])
        got.append(e.strategy.every)
    assert got == [64, 32, 16, 8, 4, 2]


def test_the_same_losses_give_the_same_periods_on_both_clocks_and_in_numpy() -> None:
    e = experiment(steps=40, strategy=LocalSGD(every=16), policy=AdaComm(look_every=8))
    virtual, real = decided(e)
    assert virtual == real
    done = simulate(e, costs=PACED, real=True)
    samples = done.samples[done.samples.name == "loss"]
    means = [float(samples[(samples.step >= a) & (samples.step < a + 8)].value.mean()) for a in range(0, 32, 8)]
    tau = periods(means, 16)
    steps = [8 * (k + 1) for k in range(1, 4) if tau[k] != tau[k - 1]]
    assert virtual == [(step, "strategy.every", tau[step // 8 - 1]) for step in steps] != []


def test_a_negative_loss_makes_adacomm_fail() -> None:
    seen = Seen(experiment=Experiment(strategy=LocalSGD()), step=1, seconds=0.0, numbers={"loss": (-1.0,)})
    with pytest.raises(ValueError, match="must be above 0"):
        list(AdaComm().decide(seen, AdaComm().init()))


# -- GraVAC


def test_the_gain_is_computed_from_the_sent_gradient_and_the_residual() -> None:
    rng, n, k = np.random.default_rng(0), 64, 8
    memory, parts, owed = Memory(), placed((8, 8)), np.zeros(n)
    of = ErrorFeedback(of=TopK(density=k / n))
    for _ in range(5):
        g = rng.standard_normal(n).astype("f4")
        stand_in, bucket = Gain(of, feeds=True), Bucket(0, torch.from_numpy(g.copy()), tuple(parts), 0)
        together([stand_in.reduce(Rank(0, 1), bucket, memory)])
        x = g + owed
        sent = np.where(np.abs(x) >= np.sort(np.abs(x))[-k], x, 0.0)
        owed = x - sent
        assert np.allclose(bucket.data.numpy(), sent, atol=1e-6)
        assert stand_in.found() == pytest.approx({"gradient_sent": (sent**2).sum(), "gradient_whole": (x**2).sum()})


def densities(gains: Sequence[float], start: float, p: GraVAC) -> list[float]:
    """Returns the density after each look, from the measured gains."""
    out, bar, came = [start], 0.0, 0.0
    for gain in gains:
        now = out[-1]
        if gain < p.threshold:
            bar, came = max(bar, came), 0.0
            out.append(max(now, min(p.most, now * p.factor)))
        elif gain > bar:
            came = gain if now > p.least else came
            out.append(max(p.least, now / p.factor))
        else:
            out.append(now)
    return out[1:]


def test_the_density_falls_while_enough_is_sent_on_both_clocks_and_in_numpy() -> None:
    policy = GraVAC(look_every=5, threshold=0.6, least=0.01)
    e = experiment(steps=60, compressor=ErrorFeedback(of=TopK(density=0.5)), policy=policy)
    done = simulate(e, costs=PACED, real=True)
    sent, whole = (done.samples[done.samples.name == f"gradient_{what}"] for what in ("sent", "whole"))
    gains = [float(sent[sent.step // 5 == k].value.mean() / whole[whole.step // 5 == k].value.mean())
             for k in range(11)]  # fmt: skip
    wanted = densities(gains, 0.5, policy)
    virtual, real = decided(e)
    news = [(5 * (k + 1), d) for k, d in enumerate(wanted) if d != ([0.5, *wanted])[k]]
    assert [(step, value) for step, _, value in virtual] == [(step, pytest.approx(d)) for step, d in news]
    assert virtual == real
    assert min(gains) < 0.6 < max(gains)


@pytest.mark.parametrize("seed", range(8))
def test_the_density_equals_numpys_for_any_gains(seed: int) -> None:
    gains = np.random.default_rng(seed).uniform(0.4, 1.0, 30)
    policy = GraVAC(threshold=0.6, least=0.02, most=0.4)
    e, state, got = Experiment(compressor=TopK(density=0.2), policy=policy), policy.init(), []
    for look, gain in enumerate(gains):
        numbers = {"gradient_sent": (2 * gain,), "gradient_whole": (2.0,)}
        for decision in policy.decide(Seen(experiment=e, step=look, seconds=0.0, numbers=numbers), state):
            for path, value in decision.changes.items():
                e = e.set(path, value)
        got.append(e.compressor.density)
    assert got == pytest.approx(densities(gains.tolist(), 0.2, policy)) and len(set(got)) > 1


def test_gravac_waits_if_the_compressor_scales_entries_up() -> None:
    done = simulate(experiment(steps=12, compressor=Wangni(), policy=GraVAC(look_every=3)), costs=PACED, real=True)
    assert made(done) == []
    assert said(done)[0].startswith("GraVAC: compressor=Wangni scales the entries that it sends")


@pytest.mark.parametrize(("change", "words"), [
    ({"compressor": DGC(density=0.1)}, "compressor=DGC sends sums of gradients that it keeps itself"),
    ({"strategy": ByteScheduler()}, "strategy=ByteScheduler does not exchange a step's gradients within that step"),
])  # fmt: skip
def test_gravac_reports_settings_without_any_gain(change: dict[str, Any], words: str) -> None:
    top = ErrorFeedback(of=TopK(density=0.1))
    e = experiment(steps=8, **{"compressor": top, **change}, policy=GraVAC(look_every=3))
    done = simulate(e, costs=PACED, real=True)
    assert made(done) == [] and said(done)[0].startswith(f"GraVAC: {words}") and len(said(done)) == 1


def test_measuring_the_gain_keeps_training_bit_identical() -> None:
    e = experiment(compressor=ErrorFeedback(of=TopK(density=0.1)))
    never = GraVAC(look_every=4, threshold=1.0, most=0.1)
    weighed = run(e.set("policy", never))[0]
    assert torch.equal(weights(run(e)[0]), weights(weighed))
    assert weighed.rank.compressor == e.compressor, "what stood in for it is gone"


# -- Sync-Switch


@pytest.mark.parametrize("seed", range(20))
def test_slow_ranks_are_found_as_in_numpy(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(0.9, 1.1, 8) * np.where(rng.random(8) < 0.25, 3.0, 1.0)
    rates = 1 / seconds
    wanted = np.flatnonzero((rates < rates.mean() - rates.std()) & (rates < 0.9 * rates.mean()))
    assert slower([*seconds, math.nan], 0.1) == set(wanted.tolist())


def test_the_slower_of_two_needs_the_margin_only() -> None:
    assert slower([1.0, 1.02], 0.1) == set()
    assert slower([1.0, 2.0], 0.1) == {1}
    assert slower([1.0], 0.1) == set()


@pytest.mark.parametrize(("fraction", "steps", "first"), [(0.07, 100, 7), (0.29, 100, 29), (0.0625, 40, 3)])
def test_the_first_asynchronous_step_is_a_look_at_the_exact_fraction(fraction: float, steps: int, first: int) -> None:
    policy = SyncSwitch(fraction=fraction)
    assert policy.next_look(Experiment(steps=steps), first - 1) == first, "0.07 * 100 is a little more than 7"


def test_a_straggler_begins_and_ends_after_equally_many_looks() -> None:
    policy = SyncSwitch(fraction=1.0, windows=3)
    e, state, found = Experiment(steps=1000, ranks=4, lr=0.1, policy=policy), policy.init(), []
    for look, slow in enumerate([False] * 9 + [True] * 5 + [False] * 5 + [True] * 5):
        numbers = {"compute": (1.0, 1.0, 1.0, 4.0 if slow else 1.0)}
        for decision in policy.decide(Seen(experiment=e, step=look, seconds=0.0, numbers=numbers), state):
            for path, value in decision.changes.items():
                e = e.set(path, value)
            found.append((look, type(e.strategy)))
    assert found == [(11, AsyncServer), (16, DDP), (21, AsyncServer)]


def test_25_percent_of_the_steps_are_synchronous_on_both_clocks() -> None:
    e = experiment(steps=20, lr=0.02, policy=SyncSwitch(fraction=0.25, straggler="nothing"))
    virtual, real = decided(e)
    server = Experiment(strategy=AsyncServer(weight="sum")).plain()["strategy"]
    assert virtual == real == [(5, "strategy", server), (5, "lr", 0.01)]


@pytest.mark.parametrize("fraction", [0.0, 0.3, 1.0])
def test_sync_switch_is_bit_identical_to_the_same_changes_by_hand(fraction: float) -> None:
    e = experiment(steps=20, ranks=3, lr=0.02)
    at = round(20 * fraction)
    by_hand = [Change(at, "strategy", AsyncServer(weight="sum")), Change(at, "lr", 0.02 / 3)] if fraction < 1 else []
    alone = simulate(e, changes=by_hand, costs=PACED, real=True)
    policy = SyncSwitch(fraction=fraction, straggler="nothing")
    steered = simulate(e.set("policy", policy), costs=PACED, real=True)
    for name in ("loss", "staleness"):
        one, other = (done.samples[done.samples.name == name].value.tolist() for done in (alone, steered))
        assert one == other
    assert (fraction == 1) == (made(steered) == [])


def test_momentum_is_kept_and_the_first_asynchronous_step_adds_to_it() -> None:
    e = experiment(steps=7, lr=0.02, policy=SyncSwitch(fraction=6 / 7, straggler="nothing"))
    before = run(e.set("steps", 6).set("policy", None))
    for rank, (stood, went) in enumerate(zip(before, run(e), strict=True)):
        model, buffers = stood.model, stood.optimizer.state
        for p in model.parameters():
            p.grad = None
        mse(model, batch(rank, 6, 0)).backward()
        for p, q in zip(model.parameters(), went.model.parameters(), strict=True):
            wanted = 0.9 * buffers[p]["momentum_buffer"] + p.grad
            assert torch.allclose(went.optimizer.state[q]["momentum_buffer"], wanted, atol=1e-6)
            assert float(buffers[p]["momentum_buffer"].abs().max()) > 1e-3


def slowed(steps: int = 200, **knobs: Any) -> tuple[Experiment, list[Change]]:
    """Runs four ranks; one rank is slow for a while, twice."""
    policy = SyncSwitch(fraction=1.0, look_every=5, windows=2, **knobs)
    slow = [Slow(rank=2, factor=4.0)]
    changes = [Change(at, "fabric.faults", slow if on else []) for at, on in
               ((30, True), (80, False), (120, True), (160, False))]  # fmt: skip
    return Experiment(steps=steps, ranks=4, pace=50.0, lr=0.1, policy=policy), changes


def lasted(done: Run) -> float:
    return float(done.spans.t1.max())


@pytest.mark.parametrize("kind", ["greedy", "elastic"])
def test_no_rank_waits_for_a_straggler_and_each_episode_is_one_switch_and_back(kind: str) -> None:
    e, changes = slowed(straggler="nothing")
    waiting = simulate(e, changes=changes)
    done = simulate(e.set("policy.straggler", kind), changes=changes)
    assert made(waiting, "SyncSwitch") == []
    found = [next(iter(value)) for _, path, value in made(done, "SyncSwitch") if path == "strategy"]
    other = {"greedy": "AsyncServer", "elastic": "BackupWorkers"}[kind]
    assert found == [other, "DDP"] * 2
    rates = [value for _, path, value in made(done, "SyncSwitch") if path == "lr"]
    assert rates == pytest.approx([0.1 / 4 if kind == "greedy" else 0.1 * 3 / 4, 0.1] * 2)
    assert lasted(done) < 0.75 * lasted(waiting)


def test_only_the_stragglers_gradients_are_dropped_while_it_is_excluded() -> None:
    e, changes = slowed(straggler="elastic")
    done = simulate(e, changes=changes)
    late = done.samples[(done.samples.name == "late") & (done.samples.value > 0)]
    slow = [(step, bool(value)) for step, path, value in made(done) if path == "fabric.faults"]
    began, ended = slow[0][0], slow[1][0]
    assert set(late[(late.step > began) & (late.step < ended)]["rank"]) == {2}


def test_alternating_noise_does_not_cause_switches() -> None:
    policy = SyncSwitch(fraction=1.0, windows=3)
    e, state = Experiment(steps=1000, ranks=4, lr=0.1), policy.init()
    for look in range(40):
        seconds = (1.0, 1.0, 1.0, 4.0 if look % 2 else 1.0)
        seen = Seen(experiment=e, step=look, seconds=0.0, numbers={"compute": seconds})
        assert list(policy.decide(seen, state)) == []


# -- conflicts with a user's changes


def test_a_policy_leaves_a_users_change_alone_until_the_policy_is_set_again() -> None:
    e = experiment(steps=30, lr=0.08, policy=Halver(look_every=5))
    changes = [Change(12, "lr", 0.5), Change(22, "policy", Halver(look_every=5))]
    done = simulate(e, changes=changes, costs=PACED, real=True)
    assert [(s, v) for s, path, v in made(done, "Halver")] == [(5, 0.04), (10, 0.02), (27, 0.25)]
    [text] = said(done)
    held = "Halver: does not change lr, because a person set it at step 12; "
    assert text == held + "set the policy again to let it change this setting"
    sessions = run(e, *changes)
    assert [(d["step"], d["value"]) for d in noted(sessions[0].record, "change") if "by" in d] == [
        (5, 0.04), (10, 0.02), (27, 0.25)]  # fmt: skip
    assert all(not s.record.noted("policy") for s in sessions[1:])


def test_a_users_change_before_the_same_step_wins() -> None:
    e = experiment(steps=12, lr=0.08, policy=Halver(look_every=5))
    done = simulate(e, changes=[Change(5, "lr", 0.5)], costs=PACED, real=True)
    assert made(done, "Halver") == [] and made(done) == [(5, "lr", 0.5)]


def test_a_user_who_set_a_knob_of_the_strategy_keeps_the_strategy() -> None:
    e = experiment(steps=20, lr=0.02, strategy=LocalSGD(), policy=SyncSwitch(fraction=0.5, straggler="nothing"))
    done = simulate(e, changes=[Change(3, "strategy.every", 2)], costs=PACED, real=True)
    assert made(done, "SyncSwitch") == []
    assert "does not change strategy.every, because a person set it at step 3" in said(done)[0]


def test_a_decision_with_a_pinned_part_is_not_made_at_all() -> None:
    e = experiment(steps=20, lr=0.02, policy=SyncSwitch(fraction=0.5, straggler="nothing"))
    done = simulate(e, changes=[Change(3, "lr", 0.01)], costs=PACED, real=True)
    assert made(done, "SyncSwitch") == []
    assert "does not change lr" in said(done)[0]


def test_a_paused_policy_decides_nothing_until_it_is_resumed() -> None:
    e = experiment(steps=30, lr=0.08, policy=Halver(look_every=5))
    changes = [Change(7, "policy.paused", True), Change(18, "policy.paused", False)]
    for steps in [[s for s, _, _ in made(simulate(e, changes=changes, costs=PACED, real=True), "Halver")],
                  [d["step"] for d in noted(run(e, *changes)[0].record, "change") if "by" in d]]:  # fmt: skip
        assert steps == [5, 23, 28]


def test_policy_none_means_by_hand_and_can_be_set_live() -> None:
    e = experiment(steps=20, lr=0.08, policy=Halver(look_every=5))
    assert e.set("policy", None).policy == Experiment(policy=None).policy == ByHand()
    done = simulate(e, changes=[Change(6, "policy", None)], costs=PACED, real=True)
    assert made(done, "Halver") == [(5, "lr", 0.04)]


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_a_failing_policy_is_paused_with_a_note_and_training_goes_on(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(Clumsy, "error", error)
    e = experiment(steps=20, policy=Clumsy(look_every=5))
    wanted = (f"Clumsy failed at step 5 with {error.__name__}: no such luck; it is paused, and training goes on "
              f"without it; set policy.paused=false to try again")  # fmt: skip
    done = simulate(e, costs=PACED, real=True)
    assert said(done) == [wanted]
    assert made(done) == [(5, "policy.paused", True)]
    sessions = run(e)
    assert [d["text"] for d in noted(sessions[0].record, "policy")] == [wanted]
    assert all(len(s.record.losses()) == 20 for s in sessions)
    assert torch.equal(weights(sessions[0]), weights(run(e.set("policy", None))[0]))


def test_an_invalid_decision_is_refused_once_with_all_its_parts() -> None:
    done = simulate(experiment(steps=30, lr=0.1, policy=Stubborn(look_every=5)), costs=PACED, real=True)
    [(step, _, detail)] = done.details("refused")
    assert (step, detail["by"], detail["why"]) == (5, "Stubborn", "why not")
    assert "must be a number in [0.01, 1024] MB" in detail["reason"]
    assert made(done) == []


@dataclass(frozen=True, kw_only=True)
class Half(Policy):
    """Requests a valid change together with one that this model refuses."""

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        yield Decision("both or none", {"lr": 0.5, "strategy": "Positive"})


@dataclass(frozen=True, kw_only=True)
class Positive(DDP):
    """Refuses this model's values, but no settings."""

    def refuses_values(self, params: Any) -> str | None:
        return "parameters must be above 0; take DDP"


def test_a_decision_with_a_refused_part_changes_nothing() -> None:
    e = experiment(steps=12, lr=0.1, policy=Half(look_every=5))
    done, sessions = simulate(e, costs=PACED, real=True), run(e)
    assert made(done) == [] == sessions[0].record.noted("change")
    for refused in ([d for _, _, d in done.details("refused")], noted(sessions[0].record, "refused")):
        [detail] = refused
        assert (detail["path"], detail["reason"]) == ("strategy", "parameters must be above 0; take DDP")


@dataclass(frozen=True, kw_only=True)
class Grower(Policy):
    """Requests more ranks."""

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        yield Decision("the more the better", {"lr": 0.5, "ranks": 7})


def test_a_policy_may_only_set_live_settings() -> None:
    e = experiment(steps=12, lr=0.1, policy=Grower(look_every=5))
    done = simulate(e, costs=PACED, real=True)
    assert made(done) == []
    [(_, _, detail)] = done.details("refused")
    assert detail["reason"] == "ranks=7: cannot change while a run is live"


@pytest.mark.parametrize("value", [Halver(look_every=4, paused=True), None, Halver(look_every=6)])
def test_a_change_of_the_policy_before_the_step_of_a_look_comes_first(value: Any) -> None:
    e = experiment(steps=14, lr=0.08, policy=Halver(look_every=4))
    changes = [Change(8, "policy.paused", True) if value and value.paused else Change(8, "policy", value)]
    for found in ([s for s, _, _ in made(simulate(e, changes=changes, costs=PACED, real=True), "Halver")],
                  [d["step"] for d in noted(run(e, *changes)[0].record, "change") if "by" in d]):  # fmt: skip
        assert found == [4]


@dataclass(frozen=True, kw_only=True)
class Odd(Policy):
    """Gives a reason that is no text."""

    def decide(self, seen: Seen, state: Any) -> Iterator[Decision]:
        yield Decision({1, 2}, {"lr": 0.5})  # type: ignore[arg-type]


def test_a_reason_that_is_no_text_makes_the_policy_fail() -> None:
    e = experiment(steps=12, policy=Odd(look_every=5))
    for texts in (said(simulate(e, costs=PACED, real=True)), [d["text"] for d in noted(run(e)[0].record, "policy")]):
        assert texts[0].startswith("Odd failed at step 5 with TypeError") and len(texts) == 1


@dataclass(frozen=True, kw_only=True)
class Unbounded(DDP):
    """Records samples without a mean."""

    async def step(self, rank: Rank, state: Any) -> None:
        await super().step(rank, state)
        await rank.sample("loss", math.inf if rank.step % 2 else -math.inf)


def test_samples_without_a_mean_count_as_unknown_and_training_goes_on() -> None:
    e = experiment(steps=20, strategy=Unbounded(), lr=0.08, policy=Halver(look_every=5))
    assert len(made(simulate(e, costs=PACED, real=True), "Halver")) == 3


@pytest.mark.parametrize(("policy", "rest", "words"), [
    (GraVAC(look_every=5), {}, "compressor=Dense has no density to set"),
    (AdaComm(look_every=5), {}, "strategy=DDP has no period to set"),
    (SyncSwitch(look_every=5, fraction=1.0), {}, "lr=0: the task's own rate is not known"),
])  # fmt: skip
def test_a_policy_reports_once_what_it_waits_for(policy: Policy, rest: dict[str, Any], words: str) -> None:
    [text] = said(simulate(experiment(steps=30, policy=policy, **rest), costs=PACED, real=True))
    assert words in text


def test_with_sizes_only_the_missing_loss_is_reported() -> None:
    e = Experiment(steps=20, pace=10.0, strategy=LocalSGD(every=8), policy=AdaComm(look_every=5))
    done = simulate(e)
    assert said(done) == ["AdaComm: no rank has reported loss yet; the policy waits"]


@pytest.mark.parametrize("strategy", ["LocalSGD", "AsyncServer", "BackupWorkers", "BoundedStaleness", "Gossip",
                                      "StochasticGradientPush", "EASGD", "Hogwild", "ZeRO3"])  # fmt: skip
def test_ranks_without_a_common_step_also_meet_for_a_look(strategy: str) -> None:
    e = experiment(ranks=4, steps=24, lr=0.08, policy=Halver(look_every=6)).set("strategy", strategy)
    virtual, real = decided(e)
    rates = [value for _, _, value in virtual]
    assert rates == [value for _, _, value in real] == [0.04, 0.02, 0.01][: len(rates)]
    assert len(rates) >= 2


@pytest.mark.parametrize("schedule", [OneFOneB(), PipeDream2BW()], ids=["flushed", "never flushed"])
def test_stages_of_a_pipeline_also_meet_for_a_look(schedule: Any) -> None:
    e = piped(4, steps=20, lr=0.08, partition=Pipeline(stages=2, micros=2, schedule=schedule))
    virtual, real = decided(e.set("policy", Halver(look_every=6)))
    assert virtual == real == [(6, "lr", 0.04), (12, "lr", 0.02), (18, "lr", 0.01)]


@dataclass(frozen=True, kw_only=True)
class Lost(Halver):
    """Fails to choose the next look, or requests it at once."""

    backwards: bool = False

    def next_look(self, experiment: Any, after: int) -> int:
        return after if self.backwards else {}["when"]


@pytest.mark.parametrize(("backwards", "looks"), [(False, [5, 10]), (True, [0, 1])])
def test_a_broken_next_look_neither_hangs_nor_ends_the_run(backwards: bool, looks: list[int]) -> None:
    e = experiment(steps=12, lr=0.08, policy=Lost(look_every=5, backwards=backwards))
    done = simulate(e, costs=PACED, real=True)
    assert [step for step, _, _ in made(done, "Lost")][:2] == looks
    assert [text.startswith("Lost: its next_look failed with KeyError") for text in said(done)] == [True][backwards:]


def test_a_plan_ignores_the_policy() -> None:
    e = Experiment(steps=100, pace=20.0, lr=0.1, policy=SyncSwitch(fraction=0.5))
    one, other = (plan(each, strategies=[DDP()], partitions=[Whole()]) for each in (e, e.set("policy", None)))
    assert one[0].step_s == other[0].step_s > 0


# -- the record


def test_a_replay_repeats_the_recorded_decisions_and_makes_no_new_ones() -> None:
    e, changes = slowed(straggler="greedy")
    first = simulate(e, changes=changes)
    again = simulate(first.experiment, changes=first.changes)
    assert made(again) == made(first)
    assert again.spans.t1.tolist() == first.spans.t1.tolist()
    assert said(again) == [
        "SyncSwitch: it replays the decisions of another run, given as changes, and makes no new ones"
    ]
    assert "by='SyncSwitch'" in as_python(first)


def test_a_recorded_run_with_a_policy_opens_without_torch(tmp_path: Path) -> None:
    e, changes = slowed(straggler="greedy")
    simulate(e, changes=changes).save(tmp_path / "run")
    code = (
        "import sys; from workbench import Run; run = Run.open(sys.argv[1]); "
        "print({c.by for c in run.changes} == {'', 'SyncSwitch'}, run.settings['policy'].keys(), "
        "'torch' in sys.modules)"
    )
    opened = [sys.executable, "-c", code, str(tmp_path / "run")]
    out = subprocess.run(opened, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "True dict_keys(['SyncSwitch']) False"


def test_alike_simulations_refuse_a_policy() -> None:
    with pytest.raises(KnobError, match="it reads the measurements of every rank"):
        simulate(Experiment(steps=10, pace=10.0, policy=Halver()), alike=True)


def test_a_policy_sees_the_effect_of_faults_on_real_ranks() -> None:
    e = experiment(steps=60, lr=0.02, pace=4.0, fabric=Fabric(faults=(Slow(rank=1, factor=4.0),)),
                   policy=SyncSwitch(fraction=1.0, look_every=5, windows=2))  # fmt: skip
    [first, *_] = noted(run(e)[0].record, "change")
    assert (first["path"], first["by"]) == ("strategy", "SyncSwitch")
    assert first["reason"].startswith("slow in 2 consecutive looks: rank 1 at 0.")
    assert e.strategy == DDP()
