"""Tests Streaming DiLoCo: schedule, fragments, result, bytes, overlap and refusals."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from tests.ranks import Net, ended, experiment, live, net, placed, run, toy, weights
from tests.sim.virtual import comm, paced, samples, seconds, stack
from tests.unit.plain_outer import MOMENTUM, SGD, Plain, outer_sgd
from workbench import simulate
from workbench.compressors import TopK
from workbench.engine.rank.session import Session
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Part, Rank
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, DiLoCo, LocalSGD, StreamingDiLoCo
from workbench.strategies._fragments import fragments, layers
from workbench.tasks import ByteGPT

pytestmark = pytest.mark.ranks

EXACT = {"delay": 0, "alpha": 0.0, "bits": 32}
LAYERS = ("b", "a", "c")  # of tests.ranks.Net from the largest to the smallest: fragments 0, 1 and 2 of three


def launched(s: Session) -> dict[int, list[str]]:
    """Returns the names of the exchanges by step."""
    found: dict[int, list[str]] = {}
    for step, name, _ in s.record.comm():
        found.setdefault(step, []).append(name)
    return found


# -- schedule and fragments --


def test_fragments_take_turns_by_the_schedule() -> None:
    """The schedule of the paper's figure: F = 4, H = 12."""
    chosen = StreamingDiLoCo(fragments=4, every=12)
    turns = [(f, t) for t in range(1, 19) for f in chosen.turn(t)]
    assert turns == [(0, 3), (1, 6), (2, 9), (3, 12), (0, 15), (1, 18)]


@pytest.mark.parametrize(("count", "every"), [(1, 8), (3, 8), (4, 12), (5, 3), (7, 1), (3, 100)])
def test_every_fragment_has_its_turn_once_per_period(count: int, every: int) -> None:
    chosen = StreamingDiLoCo(fragments=count, every=every)
    for first in (1, 5, 3 * every):
        assert sorted(f for t in range(first, first + every) for f in chosen.turn(t)) == list(range(count))


def test_fragments_are_exchanged_in_the_order_of_the_schedule() -> None:
    s = run(experiment(2, 18, strategy=StreamingDiLoCo(fragments=3, every=9, bits=32)))[0]
    want = {2: 0, 5: 1, 8: 2, 11: 0, 14: 1, 17: 2}
    assert launched(s) == {step: [f"all_reduce fragment {f}"] for step, f in want.items()}


def test_equal_layers_are_assigned_to_fragments_in_turn() -> None:
    parts = [Part(f"blocks.{i}.weight", (10,), 0, 10) for i in range(12)]
    names = [f"blocks.{i}.weight" for i in range(12)]
    assert fragments(parts[::-1], 4) == [names[f::4] for f in range(4)]


def test_layers_stay_whole_and_large_ones_are_in_different_fragments() -> None:
    parts = ParameterLayout(ByteGPT().build().model(), 1.0).bucket_parts
    found = fragments(parts, 4)
    assert sorted(name for its in found for name in its) == sorted(p.name for p in parts)
    numel = {p.name: p.stop - p.start for p in parts}
    share = [sum(numel[name] for name in its) / sum(numel.values()) for its in found]
    assert max(share) < 0.27
    where = {name: f for f, its in enumerate(found) for name in its}
    for layer in layers(parts).values():
        assert len({where[part.name] for part in layer}) == 1


@pytest.mark.parametrize("bucket_mb", [0.01, 0.1, 1.0, 100.0])
def test_fragments_do_not_depend_on_buckets(bucket_mb: float) -> None:
    model = ByteGPT().build().model()
    assert fragments(ParameterLayout(model, bucket_mb).bucket_parts, 4) == fragments(
        ParameterLayout(model, 0.5).bucket_parts, 4
    )


# -- result --


@pytest.mark.parametrize("form", [{}, {"outer_lr": 0.5, "outer_momentum": 0.0}])
def test_one_fragment_without_delay_and_mixing_equals_diloco(form: dict[str, float]) -> None:
    chosen = StreamingDiLoCo(fragments=1, every=4, **EXACT, **form)
    mine, plain = (run(experiment(3, 12, strategy=s)) for s in (chosen, DiLoCo(every=4, **form)))
    for s in mine:
        torch.testing.assert_close(weights(s), weights(plain[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("delay", [0, 2])
def test_with_alpha_1_each_rank_trains_alone(bits: int, delay: int) -> None:
    mine = run(experiment(3, 12, strategy=StreamingDiLoCo(every=6, alpha=1.0, delay=delay, bits=bits)))
    alone = run(experiment(3, 12, strategy=LocalSGD(every=100)))
    for one, other in zip(mine, alone, strict=True):
        assert torch.equal(weights(one), weights(other))


def reference(steps: int, every: int, delay: int, alpha: float, turns: Any, ranks: int = 3) -> Plain:
    """Trains fragments of one layer each with torch's outer optimizer; `turns` gives the fragments after t steps."""
    plain = Plain(ranks, MOMENTUM)
    theta = {f: plain.get(layer)[0] for f, layer in enumerate(LAYERS)}
    step = {f: outer_sgd(theta[f], lr=0.7, momentum=0.9, nesterov=True) for f in theta}
    flying: dict[int, tuple[int, torch.Tensor]] = {}
    for t in range(1, steps + 1):
        plain.train()

        def land(f: int) -> None:
            theta[f] = step[f](flying.pop(f)[1])
            plain.put(alpha * plain.get(LAYERS[f]) + (1 - alpha) * theta[f], LAYERS[f])

        for f in turns(t):
            if f in flying:
                land(f)
            flying[f] = t + delay, theta[f] - plain.get(LAYERS[f]).mean(0)
        for f in [f for f, (due, _) in flying.items() if due <= t]:
            land(f)
    for f in list(flying):
        land(f)
    return plain


@pytest.mark.parametrize(("every", "delay", "alpha"), [(3, 0, 0.0), (6, 1, 0.5), (6, 4, 0.3), (3, 3, 0.5), (4, 9, 0.0)])
def test_streaming_diloco_equals_the_papers_algorithm(every: int, delay: int, alpha: float) -> None:
    chosen = StreamingDiLoCo(fragments=3, every=every, delay=delay, alpha=alpha, bits=32)
    sessions = run(experiment(3, 14, strategy=chosen))
    want = reference(14, every, delay, alpha, chosen.turn)
    for s, row in zip(sessions, want.get(), strict=True):
        torch.testing.assert_close(weights(s), row, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5])
def test_merging_leaves_the_share_alpha_of_a_fragments_drift(alpha: float) -> None:
    def spread(sessions: list[Session]) -> dict[str, float]:
        found = {}
        for layer in LAYERS:
            named = [dict(s.model.named_parameters()) for s in sessions]
            every = torch.stack(
                [torch.cat([m[f"{layer}.{k}"].detach().view(-1) for k in ("weight", "bias")]) for m in named]
            ).double()
            found[layer] = float((every - every.mean(0)).norm())
        return found

    chosen = StreamingDiLoCo(fragments=3, every=9, delay=0, alpha=alpha, bits=32)
    merged, apart = (spread(run(experiment(3, 3, strategy=s))) for s in (chosen, LocalSGD(every=100)))
    assert merged["b"] == pytest.approx(alpha * apart["b"], rel=1e-4, abs=1e-12)
    assert (merged["a"], merged["c"]) == (apart["a"], apart["c"])


def test_momentum_moves_parameters_even_without_learning() -> None:
    chosen = StreamingDiLoCo(fragments=1, every=4, **EXACT)
    mine = run(experiment(3, 8, task=toy(SGD), strategy=chosen), Change(4, "lr", 1e-30))
    plain = Plain(3, SGD)
    start = plain.get()[0]
    plain.train(4)
    b = start - plain.get().mean(0)
    torch.testing.assert_close(weights(mine[0]), start - 0.7 * 1.9 * b - 0.7 * 0.9**2 * b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 32])
def test_the_outer_state_is_bit_identical_on_all_ranks(bits: int) -> None:
    sessions = run(experiment(4, 13, strategy=StreamingDiLoCo(every=6, bits=bits)))
    for slot in ("anchor", "momentum"):
        kept = [s.state.memory.buffers[slot] for s in sessions]
        assert any(bool(x.any()) for x in kept[0].values())
        assert all(torch.equal(other[name], kept[0][name]) for other in kept for name in kept[0])


def test_with_4_bits_it_learns_as_well_as_with_32() -> None:
    def last(**rest: Any) -> float:
        chosen = StreamingDiLoCo(every=6, **rest)
        s = run(experiment(3, 60, strategy=chosen, eval_every=60, task=toy(partial(torch.optim.AdamW, lr=3e-3))))[0]
        held = [v for _, name, _, v in s.record.samples if name == "held_out"]
        assert held[-1] < 0.8 * held[0]
        return held[-1]

    assert last(bits=4) == pytest.approx(last(bits=32), rel=0.05)


# -- bytes and times --


@pytest.mark.parametrize(("bits", "fraction"), [(4, 8), (32, 1)])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bytes_equal_the_formula(bits: int, fraction: int, ranks: int) -> None:
    s = run(experiment(ranks, 12, strategy=StreamingDiLoCo(bits=bits)))[0]
    got = {step: sum(n for at, _, n in s.record.comm() if at == step) for step in (3, 7, 11)}
    for step, layer in zip((3, 7, 11), LAYERS, strict=True):
        n = sum(p.numel() for name, p in s.model.named_parameters() if name.startswith(layer))
        c = math.ceil(n / ranks)
        four = 2 * (ranks - 1) * (math.ceil(c / 2) + 4 * math.ceil(c / 256))
        assert got[step] == (four if bits == 4 else traffic("all_reduce", 4 * n, ranks)[0])
        assert got[step] == pytest.approx(traffic("all_reduce", 4 * n, ranks)[0] / fraction, rel=0.15)
    assert sum(n for _, _, n in s.record.comm()) == sum(got.values())


@pytest.mark.parametrize("bits", [4, 32])
@pytest.mark.parametrize("count", [4, 8])
def test_its_largest_bytes_in_a_step_are_under_a_third_of_dilocos(count: int, bits: int) -> None:
    def most(strategy: Any) -> int:
        found = comm(simulate(paced(4, 16, task=ByteGPT(), strategy=strategy)), 0)
        return max(sum(n for step, _, n in found if step == at) for at in range(16))

    assert most(StreamingDiLoCo(fragments=count, every=8, bits=bits)) < most(DiLoCo(every=8)) / 3


@pytest.mark.parametrize("bits", [4, 32])
def test_an_exchange_of_five_times_compute_is_hidden_if_the_delay_covers_it(bits: int) -> None:
    pace, layer = 10.0, 40_000
    half = 4 * layer  # bytes of a fragment of four layers, two of them
    once = 2 * 3 * (layer // 2 + 4 * math.ceil(layer / 256)) if bits == 4 else 2 * 3 * half // 4 * 4
    mbit = once * 8e-6 / (5 * pace * 1e-3)

    def steps(delay: int) -> np.ndarray:
        chosen = StreamingDiLoCo(fragments=2, every=20, delay=delay, bits=bits)
        return seconds(simulate(paced(4, 40, pace, mbit, task=stack(8, 200), strategy=chosen)))

    in_the_way, hidden = steps(0), steps(6)
    assert in_the_way.max() == pytest.approx(6 * pace * 1e-3, rel=0.05), "an exchange takes five steps"
    assert hidden.max() <= 1.05 * pace * 1e-3
    assert steps(3).max() == pytest.approx(3 * pace * 1e-3, rel=0.1), "what three steps do not cover is waited for"


def test_an_exchange_in_flight_is_completed_at_the_end_of_a_run() -> None:
    """The last exchange starts in the last step."""
    s = run(experiment(3, 4, strategy=StreamingDiLoCo(delay=3)))[0]
    assert list(launched(s)) == [3] and not s.state.flying


# -- switches and live changes --


@pytest.mark.parametrize("change", [("bucket_mb", 1.0), ("lr", 0.02)])
def test_a_change_waits_for_the_exchange_in_flight(change: tuple[str, float]) -> None:
    """An exchange completed one step early acts like a delay that is one step shorter."""
    chosen = StreamingDiLoCo(fragments=3, every=12, delay=2, bits=32)
    e = experiment(3, 12, strategy=chosen, eval_every=1)
    sessions = run(e, Change(5, *change))
    plain = run(experiment(3, 12, strategy=chosen, eval_every=1), Change(5, "lr", 0.02))
    assert launched(sessions[0]).keys() == {3, 7, 11}
    for s, other in zip(sessions, plain, strict=True):
        torch.testing.assert_close(weights(s), weights(other), rtol=1e-6, atol=1e-7)


def test_live_changes_of_knobs_affect_the_schedule() -> None:
    changes = Change(6, "fragments", 1), Change(6, "every", 4), Change(13, "bits", 32), Change(13, "delay", 0)
    s = run(experiment(2, 20, strategy=StreamingDiLoCo()), *changes)[0]
    found = {step: [name.split()[0] for name in names] for step, names in launched(s).items()}
    coded, plain = ["all_to_all", "all_gather"], ["all_reduce"]
    assert found == {3: coded, 7: coded, 11: coded, 15: plain, 19: plain}


@pytest.mark.parametrize("steps", [4, 5, 6, 12])
def test_a_switch_leaves_the_ranks_mean(steps: int) -> None:
    chosen = StreamingDiLoCo(fragments=3, every=12, delay=2, alpha=0.5, bits=32)
    out = run(experiment(3, steps + 1, strategy=chosen), Change(steps, "lr", 1e-30), Change(steps, "strategy", "DDP"))
    want = reference(steps, 12, 2, 0.5, chosen.turn)
    for s in out:
        torch.testing.assert_close(weights(s), want.get().mean(0), rtol=1e-5, atol=1e-6)
    assert len({hash_model_state(s.layout) for s in out}) == 1


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("bits", [4, 32])
def test_both_hosts_train_and_send_the_same(bits: int, delay: int) -> None:
    e = experiment(3, 14, strategy=StreamingDiLoCo(every=6, delay=delay, bits=bits), eval_every=5)
    changes = Change(5, "bucket_mb", 1.0), Change(9, "alpha", 0.2)
    simulated = simulate(e.set("pace", 5.0), changes=changes, real=True)
    for s in run(e, *changes):
        np.testing.assert_allclose(samples(simulated, "loss", s.rank.index), s.record.losses(), rtol=1e-4)
        assert sorted(comm(simulated, s.rank.index)) == sorted(s.record.comm())


def test_it_runs_over_a_link_and_stops_without_a_hang() -> None:
    e = experiment(3, 0, pace=5.0, strategy=StreamingDiLoCo(delay=2)).set("fabric.link.bandwidth", 5.0)
    sessions = live(e)
    try:
        while min(s.rank.step for s in sessions) < 15:
            assert sessions[0].join(0.02) is False
        sessions[0].request({"kind": "stop"})
        ended(sessions)
        assert {s.phase for s in sessions} == {"stopped"} and not any(s.state.flying for s in sessions)
    finally:
        for s in sessions:
            s.abort()
            assert s.join(60)


# -- refusals --

NINE = r"fragments=9: the model has 3 layers .* use at most 3"


def test_more_fragments_than_layers_are_refused_before_a_simulation() -> None:
    for real in (False, True):
        with pytest.raises(KnobError, match=NINE):
            simulate(paced(2, 3, strategy=StreamingDiLoCo(fragments=9)), real=real)


def test_more_fragments_than_layers_are_refused_before_a_run_on_the_engine() -> None:
    sessions = live(experiment(2, 3, strategy=StreamingDiLoCo(fragments=9)))
    ended(sessions)
    for s in sessions:
        assert s.phase == "failed" and s.error["type"] == "KnobError" and s.rank.step == 0
        assert "fragments=9" in s.error["text"] and "use at most 3" in s.error["text"]


@pytest.mark.parametrize("change", [("strategy", {"StreamingDiLoCo": {"fragments": 9}}), ("fragments", 9)])
def test_more_fragments_than_layers_are_refused_as_a_change_on_both_hosts(change: tuple[str, Any]) -> None:
    first: Any = DDP() if change[0] == "strategy" else StreamingDiLoCo()
    e = experiment(2, 8, strategy=first)
    session = run(e, Change(4, *change))[0]
    (mark,) = session.record.noted("refused")
    assert mark[0] == 4 and "use at most 3" in mark[3]
    assert not session.record.noted("change") and session.experiment.strategy == first
    for real in (False, True):
        (refusal,) = simulate(e.set("pace", 5.0), changes=[Change(4, *change)], real=real).details("refused")
        assert "use at most 3" in refusal[2]["reason"]


def test_as_many_fragments_as_layers_run() -> None:
    assert len(layers(ParameterLayout(Net(), 1.0).bucket_parts)) == 3
    sessions = run(experiment(2, 7, strategy=StreamingDiLoCo(fragments=3, every=3)))
    assert len(launched(sessions[0])) == 7


@dataclass(frozen=True, kw_only=True)
class NoBias(DDP):
    """A DDP that refuses vectors: a notebook's own check of a model."""

    def refuses_model(self, parts: list[Part]) -> str | None:
        found = [part.name for part in parts if len(part.shape) < 2]
        return f"{found[0]} is no matrix; use layers without bias" if found else None


def test_any_strategy_may_refuse_a_model() -> None:
    assert NoBias().refuses_model(placed((3, 3))) is None
    with pytest.raises(KnobError, match=r"bias is no matrix; use layers without bias"):
        simulate(paced(2, 2, strategy=NoBias()))
    bare = toy(model=lambda: net(lambda: nn.Linear(8, 4, bias=False)))
    assert simulate(paced(2, 2, task=bare, strategy=NoBias())).state == "done"


def test_a_compressor_raises_knob_error() -> None:
    with pytest.raises(KnobError, match=r"use Dense with it, or DiLoCo with .*TopK"):
        experiment(2, strategy=StreamingDiLoCo(), compressor=TopK.usual())


@pytest.mark.parametrize(("knob", "value"), [("every", 0), ("fragments", 0), ("delay", -1), ("alpha", 2), ("bits", 8)])
def test_invalid_knobs_raise_knob_error(knob: str, value: object) -> None:
    with pytest.raises(KnobError, match=f"strategy.{knob}=.*must be"):
        experiment(2, strategy=StreamingDiLoCo()).set(f"strategy.{knob}", value)


@dataclass(frozen=True, kw_only=True)
class SaysWhenSettled(StreamingDiLoCo):
    """A Streaming DiLoCo that records when it is drained and when it is left."""

    async def drain(self, rank: Rank, state: Any) -> None:
        await rank.sample("drained", rank.step)
        await StreamingDiLoCo.drain(self, rank, state)

    async def leave(self, rank: Rank, state: Any) -> None:
        await rank.sample("left", rank.step)
        await StreamingDiLoCo.leave(self, rank, state)


def test_it_is_drained_at_each_change_and_at_the_end_and_left_only_for_another_strategy() -> None:
    assert StreamingDiLoCo().can_drain and not DDP().can_drain and not LocalSGD().can_drain
    for changes, drained, left in [
        ([Change(5, "lr", 0.01)], [5, 8], []),
        ([Change(5, "strategy", "DDP")], [5, 5], [5]),
    ]:
        e = experiment(2, 8, strategy=SaysWhenSettled())
        s = run(e, *changes)[0]
        simulated = simulate(e.set("pace", 5.0), changes=changes)
        for name, steps in (("drained", drained), ("left", left)):
            assert [v for _, what, _, v in s.record.samples if what == name] == steps
            assert samples(simulated, name, 0).tolist() == steps
