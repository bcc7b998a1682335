"""Tests WarmUp: dense first, or with Deep Gradient Compression's falling densities; steps are counted by parameter."""

from __future__ import annotations

import random

import pytest
import torch

from tests.laws.codecs import pairs, reduced
from tests.ranks import exchange, experiment, placed, run
from workbench import simulate
from workbench.compressors import Compressor, Dense, ErrorFeedback, Layers, OneBit, PowerSGD, TopK, WarmUp
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def densities(warm: WarmUp, count: int) -> list[float]:
    return [warm.at(step).density for step in range(count)]


def sent(session: object, step: int) -> int:
    return sum(n for s, _, n in session.record.comm() if s == step)


def test_densities_fall_as_in_the_paper_with_stages_as_epochs() -> None:
    warm = WarmUp(of=TopK(density=0.001), schedule="exponential", steps=5)
    assert densities(warm, 7) == pytest.approx([10**-0.5, 0.1, 10**-1.5, 0.01, 10**-2.5, 0.001, 0.001])
    assert warm.at(5) == warm.of


def test_stages_divide_the_steps_equally() -> None:
    warm = WarmUp(of=TopK(density=0.01), schedule="exponential", steps=12, stages=3)
    assert densities(warm, 13) == pytest.approx([0.01**0.25] * 4 + [0.1] * 4 + [0.01**0.75] * 4 + [0.01])
    assert densities(WarmUp(of=TopK(density=0.01), schedule="exponential", steps=2, stages=4), 3) == pytest.approx(
        [0.01**0.2, 0.01**0.6, 0.01]
    )


def test_the_density_of_the_wrapped_compressor_falls() -> None:
    warm = WarmUp(of=Layers(of=TopK.usual(), rest=OneBit()), schedule="exponential", steps=1, stages=1)
    assert warm.at(0) == Layers(of=ErrorFeedback(of=TopK(density=0.01**0.5)), rest=OneBit())


def test_zero_steps_disable_the_warm_up() -> None:
    for schedule in ("dense", "exponential"):
        assert WarmUp(steps=0, schedule=schedule).at(0) == TopK()


def test_the_first_steps_are_bit_identical_to_a_dense_run() -> None:
    a, b = (run(experiment(3, 8, compressor=c))[0] for c in (Dense(), ErrorFeedback(of=WarmUp(steps=8))))
    assert hash_model_state(a.layout) == hash_model_state(b.layout)


def test_bytes_are_dense_first_and_then_the_compressors() -> None:
    session = run(experiment(4, 7, compressor=ErrorFeedback(of=WarmUp(steps=4))))[0]
    whole = sum(reduced(b.nbytes, 4) for b in session.layout.buckets)
    cut = sum(pairs(b.data.numel(), 4, 0.01) for b in session.layout.buckets)
    assert [sent(session, step) for step in range(1, 7)] == [whole] * 3 + [cut] * 3


def test_bytes_follow_the_falling_density() -> None:
    warm = WarmUp(of=TopK(density=0.01), schedule="exponential", steps=6, stages=3)
    session = run(experiment(4, 8, compressor=ErrorFeedback(of=warm)))[0]
    for step in range(1, 8):
        density = warm.at(step).density
        assert sent(session, step) == sum(pairs(b.data.numel(), 4, density) for b in session.layout.buckets)


def test_the_step_count_survives_changes_of_buckets_compressor_and_strategy() -> None:
    e = experiment(2, 14, compressor=ErrorFeedback(of=WarmUp(steps=8)))
    session = run(e, Change(3, "bucket_mb", 0.05), Change(5, "compressor.of.of", "OneBit"))[0]
    whole = {step for step, what, _ in session.record.comm() if what.startswith("all_reduce bucket")}
    assert whole == set(range(8))
    session = run(e, Change(4, "strategy", "LocalSGD"), Change(5, "strategy", "DDP"))[0]
    assert set(session.rank.memory.parts[WarmUp.buffer].values()) == {14}, "LocalSGD's one step ends with a round"


def test_parameters_added_later_warm_up_later() -> None:
    parts, memories, g = placed((10, 10), (10, 10)), [Memory(), Memory()], noise(1, 2, 200)
    warm = WarmUp(of=TopK(density=0.01), steps=2)
    for _ in range(2):
        exchange(warm, g, parts[:1], memories)
    out = exchange(warm, g, parts, memories)
    assert int((out[:100] != 0).sum()) <= 2 and torch.equal(out[100:], g.sum(0)[100:].double())
    assert memories[0].parts[WarmUp.buffer] == {"p0": 3, "p1": 1}


def test_raising_steps_above_the_count_resumes_the_warm_up() -> None:
    e = experiment(2, 9, compressor=ErrorFeedback(of=WarmUp(steps=2)))
    session = run(e, Change(5, "compressor.of.steps", 7))[0]
    whole = sum(reduced(b.nbytes, 2) for b in session.layout.buckets)
    assert [sent(session, s) == whole for s in range(1, 9)] == [True, False, False, False, True, True, False, False]


def test_nothing_is_lost_through_random_live_changes() -> None:
    rng, ranks, parts = random.Random(7), 2, placed(*[(12, 16), (8,)] * 3)
    memories, n = [Memory(r) for r in range(ranks)], parts[-1].stop
    gone, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(500):
        if not step % 3:
            of: Compressor = rng.choice([TopK(density=rng.uniform(0.02, 1.0)), Layers(smallest=10)])
            warm = WarmUp(
                of=of,
                steps=step + rng.randint(-5, 20) if step > 5 else 3,
                stages=rng.randint(1, 6),
                schedule=rng.choice(["dense", "exponential"]),
            )
        g = noise(step, ranks, n)
        owed += g.double().sum(0)
        cut = rng.choice([1, 2, 3, 6])
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            gone[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=warm), g, group, memories)
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]).double() for m in memories)
    assert (gone + left - owed).norm() <= 1e-4 * owed.norm()
    assert set(memories[0].parts[WarmUp.buffer].values()) == {500}


def test_bytes_are_equal_in_a_simulation_of_sizes_only() -> None:
    e = experiment(3, 8, compressor=ErrorFeedback(of=WarmUp(steps=6, schedule="exponential", stages=2)))
    session, sizes = run(e)[0], simulate(e.set("pace", 10), real=False).spans
    for step in range(1, 8):
        assert sent(session, step) == int(sizes[(sizes["rank"] == 0) & (sizes.step == step)].nbytes.sum())


@pytest.mark.parametrize("of", [PowerSGD(), OneBit(), Layers(rest=TopK())], ids=str)
def test_falling_densities_are_refused_for_a_compressor_without_one_and_nothing_changes(of: Compressor) -> None:
    good = experiment(2, 4, compressor=ErrorFeedback(of=WarmUp(of=of)))
    with pytest.raises(KnobError, match=r"schedule='exponential': .* has no density to lower, or more than one; use "):
        good.set("schedule", "exponential")
    with pytest.raises(KnobError, match="has no density"):
        experiment(2, 4, compressor=WarmUp(schedule="exponential")).set("compressor.of", "PowerSGD")
    assert good.compressor.of.schedule == "dense"


def test_a_warm_up_within_another_is_refused() -> None:
    with pytest.raises(KnobError, match=r"WarmUp inside WarmUp: .*; use one of them"):
        experiment(2, 4, compressor=WarmUp(of=Layers(of=WarmUp())))
