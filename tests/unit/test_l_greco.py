"""Tests L-GreCo: the cheapest choice against all choices, its measurements, and its effect on a run."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from tests.laws.codecs import pairs, reduced
from tests.ranks import exchange, experiment, placed, run, shipped
from workbench import simulate
from workbench.compressors import (
    ByteGrad,
    Cast,
    Compressor,
    Dense,
    ErrorFeedback,
    Layers,
    LGreCo,
    OneBit,
    PowerSGD,
    TopK,
)
from workbench.compressors._ratio import ratio, ways
from workbench.compressors._trial import tried
from workbench.compressors.l_greco import ERROR_BINS, cheapest, chosen
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory
from workbench.settings import Change, KnobError, knobs

pytestmark = pytest.mark.ranks

BITS = sorted(next(k for k in knobs(ByteGrad) if k.name == "bits").choices, reverse=True)


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bucket(x: torch.Tensor, *shape: int) -> Bucket:
    return Bucket(0, x, tuple(placed(shape or tuple(x.shape))), 0)


def best(errors: list[list[float]], sizes: list[list[float]], allowed: float) -> float | None:
    """Returns the least total size of all choices within the error, by trying each."""
    every = itertools.product(*[range(len(e)) for e in errors])
    sums = [[sum(row[j] for row, j in zip(rows, picks, strict=True)) for rows in (sizes, errors)] for picks in every]
    return min((size for size, error in sums if error <= allowed + 1e-9), default=None)


@pytest.mark.parametrize("seed", range(20))
def test_the_choice_is_the_cheapest_of_all(seed: int) -> None:
    """Errors are whole multiples of a unit, so rounding them up loses nothing."""
    rng = random.Random(seed)
    layers, ways_, allowed = rng.randint(1, 5), rng.randint(1, 4), 64.0
    unit = allowed / ERROR_BINS
    errors = [sorted(unit * rng.randint(0, ERROR_BINS // 2) for _ in range(ways_)) for _ in range(layers)]
    sizes = [sorted((float(rng.randint(1, 999)) for _ in range(ways_)), reverse=True) for _ in range(layers)]
    # 0.1 % of slack, because a product with a rounded unit may exceed a whole part slightly
    picks, want = cheapest(errors, sizes, allowed * 1.001), best(errors, sizes, allowed)
    if picks is None:
        assert want is None
        return
    assert sum(e[j] for e, j in zip(errors, picks, strict=True)) <= allowed * 1.001
    size = sum(s[j] for s, j in zip(sizes, picks, strict=True))
    assert want is None or best(errors, sizes, allowed * 1.001) <= size <= want


@pytest.mark.parametrize("seed", range(5))
def test_no_choice_is_worse_than_one_ratio_for_all(seed: int) -> None:
    rng = random.Random(seed)
    errors = [sorted(rng.random() for _ in range(5)) for _ in range(40)]
    sizes = [sorted((rng.uniform(1, 999) for _ in range(5)), reverse=True) for _ in range(40)]
    for budget in (1.0, 2.0):
        picks = chosen(errors, sizes, budget, usual=2)
        assert sum(e[j] for e, j in zip(errors, picks, strict=True)) <= budget * sum(e[2] for e in errors)
        assert sum(s[j] for s, j in zip(sizes, picks, strict=True)) < sum(s[2] for s in sizes)
    picks = chosen(errors, sizes, 0.8, usual=2)
    assert sum(e[j] for e, j in zip(errors, picks, strict=True)) <= 0.8 * sum(e[2] for e in errors)


def test_errors_are_rounded_up_so_many_small_ones_keep_to_what_is_allowed() -> None:
    picks = cheapest([[0.0, 0.02009]] * 50, [[2.0, 1.0]] * 50, 1.0)
    assert sum(picks) == 49


def test_without_a_possible_gain_all_layers_keep_one_ratio() -> None:
    assert chosen([[0.0, 0.0, 0.0]] * 2, [[3, 2, 1]] * 2, 1.0, usual=1) == [1, 1], "nothing is lost at all"
    assert chosen([[1.0, 1.0, 1.0]], [[2, 2, 2]], 1.0, usual=1) == [1]
    assert chosen([[0.5, 1.0, 2.0]], [[3, 2, 1]], 0.1, usual=1) == [0], "nothing is allowed: the least error"
    assert cheapest([[2.0]], [[1.0]], 1.0) is None


@pytest.mark.parametrize(("of", "spread", "values"), [
    (TopK(density=0.01), 4.0, [0.04, 0.02, 0.01, 0.005, 0.0025]),
    (TopK(density=0.5), 4.0, [1.0, 0.5, 0.25, 0.125]),
    (TopK(density=0.0002), 4.0, [0.0008, 0.0004, 0.0002, 0.0001]),
    (PowerSGD(rank=4), 4.0, [16, 8, 4, 2, 1]),
    (PowerSGD(rank=2), 2.0, [4, 3, 2, 1]),
    (ByteGrad(bits=8), 4.0, BITS),
    (TopK(density=0.01), 1.0, [0.01]),
    (ErrorFeedback(of=Layers(of=TopK(density=0.1))), 4.0, [0.4, 0.2, 0.1, 0.05, 0.025]),
], ids=str)  # fmt: skip
def test_candidates_surround_the_present_ratio_within_its_range(
    of: Compressor, spread: float, values: list[float]
) -> None:
    found = ways(of, spread)
    assert [way.value for way in found] == pytest.approx(values)
    assert of in [way.of for way in found]
    assert all(ratio(way.of)[1].default == pytest.approx(way.value) for way in found)


def test_a_trial_has_the_compressors_error_and_bytes() -> None:
    x = noise(1, 1200) ** 3
    lost, sent = tried(TopK(density=0.1), bucket(x))
    assert float(lost) == pytest.approx(float(x.abs().sort().values[:-120].norm()), rel=1e-5) and sent == 8 * 120
    lost, sent = tried(Cast(), bucket(x))
    assert float(lost) == pytest.approx(float((x - x.bfloat16().float()).norm())) and sent == 2 * 1200
    assert tried(Dense(), bucket(x))[1] == 4 * 1200 and float(tried(Dense(), bucket(x))[0]) == 0
    assert tried(ByteGrad(), bucket(x))[1] == 2 * (8 + 600)


def test_a_trial_lets_power_iteration_converge() -> None:
    x = noise(2, 40, 30) @ torch.diag(0.4 ** torch.arange(30.0))
    sigma = torch.linalg.svdvals(x)
    for r in (1, 2, 5):
        lost, sent = tried(PowerSGD(rank=r), bucket(x.reshape(-1), 40, 30))
        assert sent == 4 * r * 70
        assert 1 - 1e-5 < float(lost / sigma[r:].norm()) < 1.03


TURNABLE = [n for n, cls in shipped(Compressor).items() if ratio(cls()) and not LGreCo(of=cls()).refuses()]


@pytest.mark.parametrize("name", TURNABLE)
def test_a_trial_of_any_shipped_compressor_changes_no_state(name: str) -> None:
    x = noise(3, 600)
    kept, state = x.clone(), torch.get_rng_state()
    lost, sent = tried(shipped(Compressor)[name].usual(), bucket(x, 20, 30))
    assert torch.equal(x, kept) and torch.equal(torch.get_rng_state(), state)
    assert bool(lost.isfinite()) and sent > 0


def known(session: object) -> dict:
    return session.rank.memory.parts[LGreCo.buffer]


def measured(session: object, e: object) -> tuple[list[float], list[float]]:
    """Returns the measured (total error, total bytes) of the choices and of one ratio for all layers."""
    rows = list(known(session).values())
    policy = e.compressor.of
    every = ways(policy.of, policy.spread)
    usual = [way.of for way in every].index(policy.of)
    picks = [[way.of for way in every].index(row.choice) for row in rows]
    errors = [sum(row.errors[j] for row, j in zip(rows, picks, strict=True)), sum(row.errors[usual] for row in rows)]
    sizes = [sum(row.sizes[j] for row, j in zip(rows, picks, strict=True)), sum(row.sizes[usual] for row in rows)]
    return errors, sizes


@pytest.mark.parametrize(("of", "budget"), [
    (TopK(density=0.05), 1.0), (PowerSGD(rank=4, min_compression_rate=1.0), 1.5),
], ids=str)  # fmt: skip
def test_a_run_sends_less_within_the_error_and_all_ranks_agree(of: Compressor, budget: float) -> None:
    e = experiment(3, 9, compressor=ErrorFeedback(of=LGreCo(of=of, every=4, budget=budget)))
    sessions = run(e)  # measured in steps 3 and 7, applied in steps 4 and 8
    assert known(sessions[0]) == known(sessions[1]) == known(sessions[2]) and len(known(sessions[0])) == 6
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    errors, sizes = measured(sessions[0], e)
    assert errors[0] <= budget * errors[1] and sizes[0] < sizes[1]
    comm = sessions[0].record.comm()
    assert sum(n for s, _, n in comm if s == 8) < sum(n for s, _, n in comm if s == 2)


def test_a_layer_of_few_large_entries_gets_a_smaller_ratio_than_a_flat_one() -> None:
    """0.5 % of the elements hold nearly all of p0. p1 is noise with the same sum."""
    parts, memories = placed((50, 40), (50, 40)), [Memory(), Memory()]
    x = 0.01 * noise(1, 2, 4000)
    x[:, :10] = 100.0
    x[:, 2000:] = 5.0 * noise(2, 2, 2000)
    policy = LGreCo(of=TopK(density=0.1), every=1, budget=1.05)
    for _ in range(2):
        exchange(policy, x, parts, memories)
    rows = memories[0].parts[LGreCo.buffer]
    assert rows["p0"].choice == TopK(density=0.025)
    assert rows["p1"].choice.density >= 0.1


def of_choices(session: object) -> int:
    """Returns the bytes that one of 4 ranks sends with TopK at the chosen densities, grouped by density."""
    total = 0
    for b in session.layout.buckets:
        sizes: dict[float, int] = {}
        for part in b.parts:
            d = known(session)[part.name].choice.density
            sizes[d] = sizes.get(d, 0) + part.stop - part.start
        total += sum(pairs(n, 4, d) for d, n in sizes.items())
    return total


def test_a_step_sends_the_choices_and_one_small_table() -> None:
    policy = LGreCo(of=TopK(density=0.05), every=4)
    session = run(experiment(4, 7, compressor=ErrorFeedback(of=policy), bucket_mb=0.05))[0]
    comm, buckets = session.record.comm(), session.layout.buckets

    def at(step: int) -> int:
        return sum(n for s, _, n in comm if s == step)

    usual = sum(pairs(b.data.numel(), 4, 0.05) for b in buckets)
    assert at(2) == usual
    assert at(3) == usual + sum(reduced(8 * len(b.parts) * 5, 4) for b in buckets)
    assert at(4) == at(6) == of_choices(session) < usual
    said = {what: v for s, what, _, v in session.record.samples if what.startswith("ratio ") and s == 4}
    assert said == {f"ratio {name}": row.choice.density for name, row in known(session).items()}


def test_a_new_ratio_acts_at_once_and_discards_old_choices() -> None:
    policy = LGreCo(of=TopK(density=0.05), every=4)
    session = run(experiment(4, 10, compressor=ErrorFeedback(of=policy)), Change(6, "density", 0.1))[0]
    sizes = [b.data.numel() for b in session.layout.buckets]
    sent = [sum(n for s, _, n in session.record.comm() if s == step) for step in range(10)]
    uniform = [sum(pairs(n, 4, d) for n in sizes) for d in (0.05, 0.1)]
    table = sum(reduced(8 * len(b.parts) * 5, 4) for b in session.layout.buckets)
    assert sent[2] == uniform[0] and sent[5] < uniform[0]
    assert sent[6] == uniform[1] and sent[7] == uniform[1] + table, "nor while it is measured anew"
    assert sent[8] < uniform[1]


def test_choices_survive_other_buckets() -> None:
    policy = LGreCo(of=TopK(density=0.05), every=4)
    session = run(experiment(4, 7, compressor=ErrorFeedback(of=policy)), Change(6, "bucket_mb", 0.05))[0]
    assert len(session.layout.buckets) == 1 and len({row.choice for row in known(session).values()}) > 1
    assert sum(n for s, _, n in session.record.comm() if s == 6) == of_choices(session)


def test_random_live_changes_lose_nothing() -> None:
    rng, ranks, parts = random.Random(5), 2, placed(*[(12, 16), (8,)] * 3)
    memories, n, used = [Memory(r) for r in range(ranks)], parts[-1].stop, set()
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(500):
        if not step % 10:
            of = rng.choice([TopK(density=rng.uniform(0.02, 0.9)), PowerSGD(rank=rng.randint(1, 4)), ByteGrad()])
            policy = LGreCo(
                of=of, every=rng.choice([6, 15]), spread=rng.choice([2.0, 8.0]), budget=rng.choice([0.5, 1.0, 2.0])
            )
        g = noise(step, ranks, n)
        owed += g.double().sum(0)
        cut = rng.choice([3, 6])
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=policy), g, group, memories)
        used |= {row.choice for row in memories[0].parts[LGreCo.buffer].values()}
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]).double() for m in memories)
    assert (sent + left - owed).norm() <= 1e-4 * owed.norm() and len(used) > 10


def test_a_step_that_is_not_finite_decides_nothing() -> None:
    parts, memories, g = placed((20, 30)), [Memory(), Memory()], noise(6, 2, 600)
    bad = g.clone()
    bad[1, 7] = float("inf")
    policy = ErrorFeedback(of=LGreCo(of=TopK(density=0.1), every=2))
    for x in (g, bad, g):
        exchange(policy, x, parts, memories)
    row = memories[0].parts[LGreCo.buffer]["p0"]
    assert row.choice is None and not row.ways and row.steps == 1
    for _ in range(2):
        assert bool(exchange(policy, g, parts, memories).isfinite().all())
    assert memories[0].parts[LGreCo.buffer]["p0"].choice is not None


def test_with_shapes_only_all_layers_keep_one_ratio_and_the_table_is_sent() -> None:
    policy = LGreCo(of=PowerSGD(min_compression_rate=1.0), every=3, budget=2.0)
    e = experiment(4, 7, compressor=ErrorFeedback(of=policy))
    sizes = simulate(e.set("pace", 10), real=False).spans
    got = [int(sizes[(sizes["rank"] == 0) & (sizes.step == step)].nbytes.sum()) for step in range(7)]
    session = run(e)[0]
    real = [sum(n for s, _, n in session.record.comm() if s == step) for step in range(7)]
    table = sum(traffic("all_reduce", 8 * len(b.parts) * 5, 4)[0] for b in session.layout.buckets)
    assert got[1] == real[1] and got[2] == real[2] == real[1] + table and got[4] == got[1] != real[4]


def test_engine_and_simulator_make_the_same_choices() -> None:
    e = experiment(3, 9, compressor=ErrorFeedback(of=LGreCo(of=TopK(density=0.05), every=3)))
    rows = simulate(e.set("pace", 10), real=True).samples
    mine = rows[(rows["rank"] == 0) & rows.name.str.startswith("ratio ")]
    real = [(step, what, v) for step, what, _, v in run(e)[0].record.samples if what.startswith("ratio ")]
    assert sorted(real) == sorted(zip(mine.step, mine.name, mine.value, strict=True)) and len(real) == 12


def test_one_rank_chooses_alone() -> None:
    (session,) = run(experiment(1, 6, compressor=ErrorFeedback(of=LGreCo(of=TopK(density=0.05), every=2))))
    assert all(row.choice is not None for row in known(session).values())


@pytest.mark.parametrize("of", [OneBit(), Cast(), Dense(), Layers(of=TopK(), rest=PowerSGD())], ids=str)
def test_compressors_without_exactly_one_ratio_are_refused(of: Compressor) -> None:
    good = experiment(2, 4, compressor=LGreCo.usual())
    with pytest.raises(
        KnobError, match=r"LGreCo adjusts exactly one ratio, and this compressor has none or several; use"
    ):
        good.set("compressor", ErrorFeedback(of=LGreCo(of=of)))
    assert good.compressor == LGreCo.usual()


def test_nested_l_greco_is_refused() -> None:
    with pytest.raises(KnobError, match=r"LGreCo inside LGreCo: .*; use one of them"):
        experiment(2, 4, compressor=LGreCo(of=Layers(of=LGreCo(), rest=Dense())))


def test_layers_indifferent_to_ratios_keep_the_usual_one() -> None:
    errors = [[0.0, 0.0, 0.0], [0.1, 1.0, 2.0], [0.1, 1.0, 1.1]]
    sizes = [[5.0, 5.0, 5.0], [40.0, 20.0, 10.0], [80.0, 40.0, 20.0]]
    assert chosen(errors, sizes, 1.2, usual=1) == [1, 1, 2]
