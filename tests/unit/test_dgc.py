"""Tests DGC against the paper's algorithm, momentum SGD and the record."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, toy, weights
from tests.sim.insides import parameters, simulated
from workbench import simulate
from workbench.compressors import DGC, Compressor, Dense, ErrorFeedback, TopK
from workbench.compressors._sketch import SIGNS, WIDTH
from workbench.compressors.dgc import _largest
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.optimizers import LAMB, LARS, SGD, Adam, AdamW, Optimizer
from workbench.rank import Memory
from workbench.settings import Change, KnobError
from workbench.strategies import DiLoCo, LocalSGD, OneBitAdam, Strategy

pytestmark = pytest.mark.ranks

PARTS = placed((20, 10))
EXACT = DGC(density=1.0, masking=False)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def held(memories: list[Memory], slot: str) -> torch.Tensor:
    """Returns each rank's values in a slot: (ranks, n)."""
    return torch.stack([torch.cat([x for _, x in sorted(m.buffers[slot].items())]) for m in memories])


def plain(steps: list[np.ndarray], k: int, m: float, nesterov: bool, masking: bool) -> tuple[list[np.ndarray], ...]:
    """The authors' algorithm; Nesterov's has its momentum one step ahead. Returns results, and the last u and v."""
    u, v, out = np.zeros_like(steps[0]), np.zeros_like(steps[0]), []
    for g in steps:
        if nesterov:
            u = m * (u + g)
            v = v + u + g
        else:
            u = m * u + g
            v = v + u
        sent = np.zeros_like(v, dtype=bool)
        for r, row in enumerate(v):
            sent[r, np.argsort(-np.abs(row))[:k]] = True
        out.append(np.where(sent, v, 0.0).sum(0))
        v = np.where(sent, 0.0, v)
        u = np.where(sent, 0.0, u) if masking else u
    return out, u / m if nesterov else u, v


@pytest.mark.parametrize("masking", [True, False])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("ranks", [1, 3])
def test_dgc_is_the_algorithm_of_the_paper(ranks: int, nesterov: bool, masking: bool) -> None:
    steps = [noise(t, ranks, 200) for t in range(9)]
    memories = [Memory(r) for r in range(ranks)]
    of = DGC(density=0.05, nesterov=nesterov, masking=masking, sample=1.0, momentum=0.8)
    got = [exchange(of, g, PARTS, memories) for g in steps]
    out, u, v = plain([g.numpy() for g in steps], 10, 0.8, nesterov, masking)
    np.testing.assert_allclose(torch.stack(got).numpy(), out, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(held(memories, "momentum").numpy(), u, rtol=1e-11, atol=1e-11)
    np.testing.assert_allclose(held(memories, "velocity").numpy(), v, rtol=1e-11, atol=1e-11)


def test_500_live_changes_lose_no_velocity() -> None:
    """Sent values plus velocities equal the sum of all additions by the momenta."""
    rng = random.Random(5)
    ranks, parts = 3, placed(*[(12, 16), (8,)] * 6)
    n = parts[-1].stop
    memories = [Memory(r) for r in range(ranks)]
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    of: Any = DGC()
    for step in range(500):
        cut = rng.choice([1, 2, 3, 4, 6, 12])
        if rng.random() < 0.3:
            of = DGC(
                density=rng.choice([1.0, rng.uniform(0.001, 1.0)]), momentum=rng.choice([0.3, 0.9, 0.99]),
                nesterov=rng.random() < 0.5, masking=rng.random() < 0.5, sample=rng.choice([0.01, 0.3, 1.0]),
            )  # fmt: skip
        g = torch.randn(ranks, n, generator=torch.Generator().manual_seed(step))
        before = [m.buffers.get("momentum", {}) for m in memories]
        for row, kept in zip(g, before, strict=True):
            u = torch.cat([kept[p.name] if p.name in kept else torch.zeros(p.stop - p.start) for p in parts])
            now = of.momentum * u + row
            owed += (row + of.momentum * now if of.nesterov else now).double()
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(of, g, group, memories)
    left = sum(torch.cat([m.buffers["velocity"][p.name] for p in parts]).double() for m in memories)
    assert (sent + left - owed).norm() <= 1e-4 * owed.norm()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("masking", [True, False])
def test_values_that_are_not_finite_are_passed_on_and_not_kept(bad: float, masking: bool) -> None:
    memories, g = [Memory(), Memory()], noise(1, 2, 200)
    spoilt = g.clone()
    spoilt[1, 7] = bad
    of = DGC(density=0.05, masking=masking)
    assert not exchange(of, spoilt, PARTS, memories)[7].isfinite()
    for _ in range(3):
        assert bool(exchange(of, g, PARTS, memories).isfinite().all())
    assert bool(held(memories, "momentum").isfinite().all()) and bool(held(memories, "velocity").isfinite().all())


def test_zero_gradients_send_nothing() -> None:
    memories = [Memory(), Memory()]
    assert not exchange(DGC(density=0.5), torch.zeros(2, 200), PARTS, memories).any()


# threshold from a sample


@pytest.mark.parametrize("heavy", [False, True], ids=["normal", "heavy tails"])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1])
def test_the_sampled_threshold_selects_about_the_wanted_number(density: float, heavy: bool) -> None:
    n, rng = 100_000, torch.Generator().manual_seed(3)
    for seed in range(5):
        x = noise(seed, n).float() ** (3 if heavy else 1)
        index = _largest(x, density, 0.01, rng)
        assert 0.8 * density * n <= len(index) <= 1.3 * density * n and len(set(index.tolist())) == len(index)
        best = x.square().topk(len(index)).values.sum()
        torch.testing.assert_close(x[index].square().sum(), best)  # these elements are the largest


def test_selection_does_not_prefer_early_entries() -> None:
    rng = torch.Generator().manual_seed(0)
    places = torch.cat([_largest(noise(s, 20_000).float(), 0.01, 0.02, rng) for s in range(40)]).double()
    spread = 20_000 / 12**0.5 / len(places) ** 0.5
    assert abs(float(places.mean()) - 10_000) < 4 * spread


def test_zeros_are_never_sent_and_a_few_nonzeros_always() -> None:
    x = torch.zeros(5000)
    x[[3, 77, 4999]] = torch.tensor([1.0, -2.0, 1e-20])
    assert sorted(_largest(x, 0.01, 0.01, torch.Generator()).tolist()) == [3, 77, 4999]


def test_gradients_are_clipped_locally_to_the_limit_over_sqrt_of_ranks() -> None:
    """Inputs are 1/p of a rank's gradient."""
    parts, p = placed((20, 10), (50,)), 4
    g = torch.cat([100 * noise(1, p, 200), 1e-3 * noise(2, p, 50)], 1)
    memories = [Memory() for _ in range(p)]
    exchange(DGC(local_clip=2.0), g / p, parts, memories)
    for r, memory in enumerate(memories):
        first, second = (memory.buffers["velocity"][name] + 0 for name in ("p0", "p1"))
        u = memory.buffers["momentum"]["p1"]
        rest = first != 0  # the remaining elements were sent
        scale = 2.0 / p**0.5 / float(g[r, :200].norm())
        torch.testing.assert_close(first[rest], (g[r, :200] / p * scale)[rest])
        torch.testing.assert_close(u, g[r, 200:] / p, rtol=1e-12, atol=0), "what is short stays as it is"
        assert second.shape == (50,)


# with the optimizer's momentum


def sgd(**rest: Any) -> dict[str, Any]:
    return {"optimizer": SGD(**rest), "lr": 0.02}


def agree(a: list[Any], b: list[Any]) -> None:
    assert a and len(a) == len(b)
    for s, t in zip(a, b, strict=True):
        torch.testing.assert_close(weights(s), weights(t), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rest", [{}, {"weight_decay": 0.1}], ids=str)
def test_full_density_without_masking_is_sgd_with_momentum(rest: dict[str, Any]) -> None:
    agree(run(experiment(3, 12, compressor=EXACT, **sgd(**rest))), run(experiment(3, 12, **sgd(**rest))))
    plain_steps = run(experiment(3, 12, **sgd(momentum=0.0, **rest)))
    masked = run(experiment(3, 12, compressor=DGC(density=1.0), **sgd(**rest)))
    if not rest:
        agree(masked, plain_steps)


def test_nesterov_momentum_equals_torchs() -> None:
    nesterov = DGC(density=1.0, masking=False, nesterov=True)
    agree(run(experiment(2, 12, compressor=nesterov, **sgd())), run(experiment(2, 12, **sgd(nesterov=True))))


TURNS = {
    "on": (Dense(), [Change(5, "compressor", EXACT)]),
    "off": (EXACT, [Change(5, "compressor", "Dense")]),
    "on and off": (Dense(), [Change(4, "compressor", EXACT), Change(8, "compressor", "Dense")]),
    "off and on": (EXACT, [Change(4, "compressor", "Dense"), Change(8, "compressor", EXACT)]),
    "off and on before it is off": (EXACT, [Change(5, "compressor", "Dense"), Change(5, "compressor", EXACT)]),
    "its momentum to none": (EXACT, [Change(5, "compressor.momentum", 0.0)]),
    "its momentum from none": (
        DGC(density=1.0, masking=False, momentum=0.0), [Change(5, "compressor.momentum", 0.9)],
    ),
    "buckets": (EXACT, [Change(4, "bucket_mb", 0.05), Change(8, "compressor", "Dense")]),
    "to feedback of everything": (EXACT, [Change(5, "compressor", ErrorFeedback())]),
}  # fmt: skip


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("turn", TURNS)
def test_live_switches_continue_as_sgd_with_momentum(turn: str, decay: float) -> None:
    first, changes = TURNS[turn]
    changes = [replace(c, value={type(c.value).__name__: _knobs(c.value)}) if isinstance(c.value, Compressor) else c
               for c in changes]  # fmt: skip
    e = experiment(2, 12, compressor=first, **sgd(weight_decay=decay))
    sessions = run(e, *changes)
    agree(sessions, run(experiment(2, 12, **sgd(weight_decay=decay))))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    _, virtual = simulated(e.set("pace", 5.0), *changes)
    for s, row in zip(sessions, parameters(virtual), strict=True):
        mine = torch.cat([b.data.double() for b in s.layout.list_params()])
        torch.testing.assert_close(row, mine, rtol=1e-5, atol=1e-7)


def _knobs(compressor: Any) -> dict[str, Any]:
    return {} if isinstance(compressor, ErrorFeedback) else {k: getattr(compressor, k) for k in ("density", "masking")}


@pytest.mark.parametrize("density", [0.02, 0.3])
def test_switching_off_restores_the_optimizers_momentum(density: float) -> None:
    """At a rate of nearly 0 the gradients, and without masking the momentum, equal those of an uncompressed run."""
    rest = {"optimizer": SGD(), "lr": 1e-12}
    turns = [Change(4, "compressor", {"DGC": {"density": density, "masking": False}}), Change(9, "compressor", "Dense")]
    for s, t in zip(run(experiment(3, 13, **rest), *turns), run(experiment(3, 13, **rest)), strict=True):
        assert not {"velocity", "momentum"} & set(s.rank.memory.buffers) and not s.training.flushing
        for name, p in s.model.named_parameters():
            other = dict(t.model.named_parameters())[name]
            mine, want = (o.optimizer.state[q]["momentum_buffer"] for o, q in ((s, p), (t, other)))
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-6)


def test_a_mark_names_the_keeper_of_the_momentum() -> None:
    sessions = run(experiment(2, 12, **sgd()), Change(4, "compressor", "DGC"), Change(8, "compressor", "Dense"))
    said = [(m[0], m[3]) for m in sessions[0].record.noted("momentum")]
    assert [step for step, _ in said] == [4, 8] and not sessions[1].record.noted("momentum")
    assert "compressor" in said[0][1] and "optimizer" in said[1][1]


def test_switching_from_and_to_error_feedback_sends_each_residual_once() -> None:
    turns = [Change(4, "compressor", "DGC"), Change(8, "compressor", "TopK")]
    for s in run(experiment(2, 12, compressor=TopK.usual(), **sgd()), *turns):
        slots = set(s.rank.memory.buffers)
        assert "residual" in slots and not {"velocity", "momentum"} & slots
        whole = sum(traffic("all_reduce", b.nbytes, 2)[0] for b in s.layout.buckets)
        sent = [sum(n for k, _, n in s.record.comm() if k == step) for step in range(12)]
        asked = traffic("all_reduce", 4 * SIGNS * WIDTH, 2)[0]  # bytes that ask for the size of the residual
        assert sent[4] == whole + asked and sent[8] == 2 * whole and max(*sent[5:8], *sent[9:]) < whole / 4


def test_an_optimizer_without_momentum_has_none_afterwards() -> None:
    turns = [Change(4, "compressor", "DGC"), Change(8, "compressor", "Dense")]
    for s in run(experiment(2, 12, **sgd(momentum=0.0)), *turns):
        assert not s.rank.memory.buffers
        assert all("momentum_buffer" not in state for state in s.optimizer.state.values())


def test_switching_off_with_a_new_strategy_drops_the_residual_and_restores_momentum() -> None:
    turns = [Change(6, "compressor", "Dense"), Change(6, "strategy", "LocalSGD")]
    sessions = run(experiment(3, 8, compressor=DGC(), **sgd()), *turns)
    for s in sessions:
        assert not {"velocity", "momentum"} & set(s.rank.memory.buffers)
        assert len(s.record.noted("residual")) == 1
        assert all(bool(state["momentum_buffer"].any()) for state in s.optimizer.state.values())


def test_an_optimizer_changed_during_dgc_steps_without_momentum() -> None:
    e = experiment(2, 12, compressor=EXACT, **sgd())
    turned = run(e, Change(5, "optimizer.weight_decay", 0.05))
    agree(turned, run(experiment(2, 12, **sgd()), Change(5, "optimizer.weight_decay", 0.05)))


def test_dgc_without_momentum_is_top_k_with_error_feedback() -> None:
    mine = run(experiment(2, 12, compressor=DGC(density=0.1, momentum=0.0, sample=1.0), **sgd()))
    agree(mine, run(experiment(2, 12, compressor=ErrorFeedback(of=TopK(density=0.1)), **sgd())))


REFUSED = [
    ({"strategy": LocalSGD()}, "LocalSGD exchanges displacements; use DDP"),
    ({"strategy": DiLoCo()}, "DiLoCo exchanges displacements; use DDP"),
    ({"optimizer": Adam()}, "Adam is not a plain running sum of gradients.*use optimizer=SGD"),
    ({"optimizer": AdamW()}, "AdamW is not a plain running sum"),
    ({"optimizer": LAMB()}, "Lamb is not a plain running sum"),
    ({"optimizer": LARS()}, "Lars is not a plain running sum"),
    ({"optimizer": SGD(nesterov=True)}, "Nesterov's is not a plain running sum"),
]


@pytest.mark.parametrize(("beside", "words"), REFUSED, ids=str)
def test_settings_that_prevent_keeping_the_momentum_are_refused(beside: dict[str, Any], words: str) -> None:
    with pytest.raises(KnobError, match=f"compressor=DGC: it keeps .*{words}"):
        experiment(compressor=DGC(), **beside)
    assert experiment(compressor=DGC(momentum=0.0), **beside)
    with pytest.raises(KnobError, match="compressor=DGC"):
        experiment(**beside).set("compressor", "DGC")


@pytest.mark.parametrize("strategy", [OneBitAdam()], ids=str)
def test_a_strategy_with_its_own_moments_refuses_dgc(strategy: Strategy) -> None:
    with pytest.raises(KnobError, match="use "):
        experiment(compressor=DGC(), strategy=strategy)


@pytest.mark.parametrize("own", [torch.optim.Adam, partial(torch.optim.SGD, momentum=0.9, dampening=0.5)], ids=str)
def test_a_tasks_own_optimizer_is_checked_once_it_exists(own: Any) -> None:
    e = Experiment(ranks=2, steps=6, eval_every=0, pace=5.0, task=toy(partial(own, lr=0.01)))
    with pytest.raises(KnobError, match="compressor=DGC: it keeps the momentum itself"):
        simulate(e.set("compressor", "DGC"), real=True)
    change = Change(3, "compressor", "DGC")
    assert "not a plain running sum" in run(e, change)[0].record.noted("refused")[0][3]
    assert "not a plain running sum" in simulate(e, changes=[change]).details("refused")[0][2]["reason"]


def test_dgc_without_momentum_works_with_any_optimizer() -> None:
    optimizers: list[Optimizer] = [Adam(), LARS(trust=0.1), SGD(nesterov=True)]
    for optimizer in optimizers:
        rest = {"optimizer": optimizer, "lr": 0.01}
        exact = DGC(density=1.0, momentum=0.0)
        agree(run(experiment(2, 6, compressor=exact, **rest)), run(experiment(2, 6, **rest)))


def test_switching_sends_the_same_bytes_with_shapes_only() -> None:
    e = experiment(3, 12, pace=5.0, **sgd())
    on = {"DGC": {"density": 1.0}}
    changes = [Change(4, "compressor", on), Change(8, "compressor", "Dense")]
    sent = []
    for real in (False, True):
        spans = simulate(e, changes=changes, real=real).spans
        sent.append(int(spans[spans.lane == "comm"].nbytes.sum()))
        assert int(spans[spans.name == "all_reduce momentum"].nbytes.max()) > 0
    assert sent[0] == sent[1]


def test_ranks_agree_through_live_changes_of_all_its_knobs() -> None:
    changes = [
        Change(2, "density", 0.25), Change(4, "density", 0.063), Change(5, "nesterov", True),
        Change(6, "masking", False),
        Change(7, "bucket_mb", 0.05), Change(8, "local_clip", 1.0), Change(9, "compressor.momentum", 0.5),
        Change(10, "sample", 1.0),
    ]  # fmt: skip
    sessions = run(experiment(3, 14, compressor=DGC(), optimizer=SGD(), lr=0.02), *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_dgc_reaches_the_loss_of_sgd_with_momentum() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.01, momentum=0.9)), "eval_every": 200}
    ends = {}
    for c in ({}, {"compressor": DGC(density=0.05)}):
        session = run(experiment(3, 201, **c, **rest))[0]
        scores = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = scores[-1]
        assert scores[-1] < 0.7 * scores[0]
    assert max(ends.values()) < 1.3 * min(ends.values()), ends
