"""Tests Layers: chosen parameters, split and joined buckets without loss, and bytes."""

from __future__ import annotations

import random

import pytest
import torch

from tests.laws.codecs import by_layers, reduced
from tests.ranks import exchange, experiment, placed, run
from workbench import simulate
from workbench.compressors import Cast, Compressor, Dense, ErrorFeedback, Layers, OneBit, PowerSGD, TopK
from workbench.compressors._low_rank import RIGHT
from workbench.compressors._split import gathered_parts
from workbench.compressors.error_feedback import without_feedback
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Part
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks

MIXED = placed((12, 16), (8,), (30, 4), (5, 5), (64,), (2, 3, 40))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def taken(parts: list[Part], g: torch.Tensor) -> torch.Tensor:
    """Joins the elements of these parts: (ranks, n)."""
    return torch.cat([g[:, part.start : part.stop] for part in parts], 1)


@pytest.mark.parametrize(("rule", "names"), [
    (Layers(smallest=100), ["p0", "p2", "p5"]),
    (Layers(smallest=0), ["p0", "p2", "p3", "p5"]),
    (Layers(smallest=60, vectors=True), ["p0", "p2", "p4", "p5"]),
    (Layers(smallest=0, vectors=True, only="[1-3]$"), ["p1", "p2", "p3"]),
    (Layers(smallest=121), ["p0", "p5"]),
    (Layers(smallest=120), ["p0", "p2", "p5"]),
    (Layers(smallest=0, only="nothing"), []),
], ids=str)  # fmt: skip
def test_a_parameter_is_chosen_by_size_shape_and_name(rule: Layers, names: list[str]) -> None:
    assert [part.name for part in MIXED if rule.chosen(part)] == names


def test_each_side_gets_its_own_compressors_result() -> None:
    rule, g = Layers(of=TopK(density=0.1), rest=Cast(), smallest=100), noise(1, 3, MIXED[-1].stop)
    out = exchange(rule, g, MIXED, [Memory() for _ in range(3)])
    for of, side in ((rule.of, True), (rule.rest, False)):
        parts = [part for part in MIXED if rule.chosen(part) == side]
        alone = exchange(of, taken(parts, g), placed(*[p.shape for p in parts]), [Memory() for _ in range(3)])
        assert torch.equal(taken(parts, out[None])[0], alone)


def test_a_piece_keeps_the_buckets_name_and_its_parts_shapes() -> None:
    bucket = Bucket(3, torch.arange(20.0), tuple(placed((2, 3), (4,), (5, 2))), 100)
    piece = gathered_parts(bucket, [bucket.parts[0], bucket.parts[2]])
    assert (piece.name, piece.offset) == ("bucket 3", 100)
    assert piece.parts == (Part("p0", (2, 3), 0, 6), Part("p2", (5, 2), 6, 16))
    assert piece.data.tolist() == [*range(6), *range(10, 20)]
    piece.data.zero_()
    assert bucket.data[3] == 3, "a copy"


@pytest.mark.parametrize("of", [TopK(density=0.2), PowerSGD(rank=2), OneBit()], ids=str)
def test_parameters_that_change_sides_lose_nothing(of: Compressor) -> None:
    rng, ranks = random.Random(str(of)), 2
    memories, n = [Memory(r) for r in range(ranks)], MIXED[-1].stop
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(500):
        if not step % 3:
            sides = [of, TopK(density=rng.uniform(0.05, 1.0)), Dense()]
            rule = Layers(
                of=rng.choice(sides),
                rest=rng.choice(sides),
                smallest=rng.choice([0, 10, 100, 200]),
                vectors=rng.random() < 0.5,
                only=rng.choice(["", "p[024]", "5"]),
            )
        g = noise(step, ranks, n)
        owed += g.double().sum(0)
        cut = rng.choice([2, 3, 6])
        for b in range(0, len(MIXED), cut):
            group = MIXED[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=rule), g, group, memories)
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in MIXED]).double() for m in memories)
    assert (sent + left - owed).norm() <= 1e-4 * owed.norm()


def test_only_chosen_parameters_leave_a_residual() -> None:
    memories, rule = [Memory(), Memory()], ErrorFeedback(of=Layers(of=TopK(density=0.05), smallest=100))
    exchange(rule, noise(2, 2, MIXED[-1].stop), MIXED, memories)
    for part in MIXED:
        assert bool(memories[0].buffers["residual"][part.name].any()) == rule.of.chosen(part), part


def test_inner_error_feedback_does_not_apply_twice() -> None:
    inner = Layers(of=TopK.usual(), rest=ErrorFeedback(of=Cast()), smallest=100)
    assert (
        without_feedback(inner)
        == Layers(of=TopK(), rest=Cast(), smallest=100)
        == without_feedback(ErrorFeedback(of=inner))
    )
    one, other = [Memory(), Memory()], [Memory(), Memory()]
    for step in range(5):
        g = noise(step, 2, MIXED[-1].stop)
        a = exchange(ErrorFeedback(of=inner), g, MIXED, one)
        assert torch.equal(a, exchange(ErrorFeedback(of=without_feedback(inner)), g, MIXED, other))
    assert all(torch.equal(one[0].buffers["residual"][p.name], other[0].buffers["residual"][p.name]) for p in MIXED)


def test_factors_are_kept_by_parameter_independent_of_its_bucket() -> None:
    memory, g = [Memory()], noise(4, 1, MIXED[-1].stop)
    exchange(Layers(of=PowerSGD(rank=2, min_compression_rate=1.0), smallest=100), g, MIXED, memory)
    known = memory[0].parts[RIGHT]
    assert set(known) == {"p0", "p2"}, "p5 is too flat for two thin factors"
    kept = {name: q.clone() for name, q in known.items()}
    exchange(Layers(of=PowerSGD(rank=2, min_compression_rate=1.0), smallest=100, only="p0"), g, MIXED, memory)
    assert torch.equal(known["p2"], kept["p2"]) and not torch.equal(known["p0"], kept["p0"])


def test_with_all_parameters_on_one_side_it_is_exactly_that_compressor() -> None:
    hashes = [hash_model_state(run(experiment(3, 8, compressor=c))[0].layout) for c in (
        OneBit.usual(), ErrorFeedback(of=Layers(of=OneBit(), smallest=0, vectors=True)),
        ErrorFeedback(of=Layers(rest=OneBit(), smallest=10**9)), Dense(), Layers(only="none of them"))]  # fmt: skip
    assert hashes[0] == hashes[1] == hashes[2] and hashes[3] == hashes[4] != hashes[0]


def test_bytes_are_those_of_both_sides_around_a_live_change() -> None:
    e = experiment(4, 9, compressor=Layers.usual(), bucket_mb=0.05)
    session = run(e, Change(3, "smallest", 200), Change(6, "only", "none"))[0]
    comm, buckets = session.record.comm(), session.layout.buckets
    assert {what.split(" ", 1)[1] for _, what, _ in comm} <= {f"bucket {i}" for i in range(9)}, "a piece has its name"
    for step, smallest in ((1, 1024), (2, 1024), (3, 200), (5, 200)):
        assert sum(n for s, _, n in comm if s == step) == sum(by_layers(b, 4, smallest, 0.01) for b in buckets)
    assert sum(n for s, _, n in comm if s == 8) == sum(reduced(b.nbytes, 4) for b in buckets)


def test_shapes_alone_give_the_same_bytes() -> None:
    e = experiment(3, 4, compressor=Layers.usual(), bucket_mb=0.05)
    real, sizes = run(e)[0].record.comm(), simulate(e.set("pace", 10), real=False).spans
    mine = sizes[(sizes["rank"] == 0) & (sizes.lane == "comm") & (sizes.step == 3)].sort_values("t0", kind="stable")
    assert [(what, n) for step, what, n in real if step == 3] == list(zip(mine.name, mine.nbytes, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_sixteen_bits(dtype: torch.dtype) -> None:
    g = noise(3, 2, MIXED[-1].stop).to(dtype)
    buckets = exchange(Layers(of=TopK(density=0.5), smallest=100), g, MIXED, [Memory(), Memory()])
    whole = [p for p in MIXED if not Layers(smallest=100).chosen(p)]
    assert torch.equal(taken(whole, buckets[None])[0], taken(whole, (g[0] + g[1])[None].double())[0])


def test_an_invalid_regular_expression_is_refused_and_changes_nothing() -> None:
    good = experiment(2, 4, compressor=Layers.usual())
    with pytest.raises(KnobError, match=r"only='\(': is not a regular expression \(.*\); use a part of"):
        good.set("only", "(")
    assert good.compressor == Layers.usual()
