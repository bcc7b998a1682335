"""Tests Accordion against its written-out rule, static runs and the record."""

from __future__ import annotations

import random

import pytest
import torch

from tests.laws.codecs import factors
from tests.ranks import exchange, experiment, placed, run, together, weights
from workbench import simulate
from workbench.compressors import Accordion, Cast, Dense, ErrorFeedback, Layers, PowerSGD, TopK
from workbench.compressors._split import gathered_parts
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Op, Part, Rank
from workbench.settings import Change, KnobError

pytestmark = pytest.mark.ranks

ENDLESS = 1e6  # a threshold that no change reaches
PAIR = Accordion(gentle=Dense(), harsh=Cast(to="bf16"))  # the dtype of an all-reduce shows which one is in force


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exchanged(
    compressor: object, g: torch.Tensor, parts: list[Part], memories: list[Memory], lr: float = 0.1
) -> tuple[torch.Tensor, list[Op]]:
    """Reduces one bucket on all ranks at this learning rate. Returns the sum, and rank 0's Ops."""
    buckets = [Bucket(0, row.clone(), tuple(parts), 0) for row in g]
    ranks = [Rank(r, len(g)) for r in range(len(g))]
    for rank in ranks:
        rank.lr = lr
    seen: list[Op] = []
    together([compressor.reduce(k, b, m) for k, b, m in zip(ranks, buckets, memories, strict=True)], seen)
    assert all(torch.equal(b.data, buckets[0].data) for b in buckets)
    return buckets[0].data, seen


def level(seen: list[Op]) -> str:
    """Returns which one of PAIR reduced a single parameter: "g" or "h"."""
    [dtype] = {op.args[0].dtype for op in seen if op.verb == "all_reduce"}
    return {torch.float32: "g", torch.bfloat16: "h"}[dtype]


def said(seen: list[Op]) -> list[tuple[str, float]]:
    return [op.args for op in seen if op.verb == "sample"]


def levels(accordion: Accordion, norms: list[float], rates: list[float] | None = None) -> str:
    """Returns the level of each exchange, for gradients that are multiples of one gradient with these norms."""
    one, memories = torch.zeros(2, 64), [Memory(), Memory()]
    one[:, 3] = 0.5
    rates = rates or [0.1] * len(norms)
    return "".join(level(exchanged(accordion, one * x, placed((8, 8)), memories, lr)[1])
                   for x, lr in zip(norms, rates, strict=True))  # fmt: skip


@pytest.mark.parametrize(("norms", "want"), [
    ([4, 4, 4, 4], "gghh"),  # the first comparison needs two norms
    ([4, 4, 8, 8, 8, 2, 2, 2], "gghghhgh"),  # doubled, steady, down by 75 %, steady
    ([4, 2, 1, 0.5, 0.5, 0.5], "gggggh"),  # exactly the threshold is critical
    ([4, 2.125, 1.25, 0.75], "gghh"),  # less than the threshold is not
    ([0, 0, 0, 5, 5, 5], "gggggh"),  # after a norm of zero any change is critical
    ([4, 4, 0, 0, 0], "gghgg"),  # a fall to zero is a change by 100 %
], ids=str)  # fmt: skip
def test_levels_follow_a_scripted_sequence_of_norms(norms: list[float], want: str) -> None:
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=1)
    assert levels(accordion, norms) == want


def test_a_check_uses_the_sum_of_all_exchanges_since_the_last() -> None:
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=3)
    assert levels(accordion, [1, 1, 1] * 2 + [0, 0, 3] + [9, -3, -3] + [1] * 3) == "ggg" * 2 + "hhh" * 3
    assert levels(accordion, [1, 1, 1] * 3 + [9, 9, 9] + [1] * 3) == "ggg" * 2 + "hhh" * 2 + "ggg"


def test_a_lower_rate_is_gentle_at_once_until_the_next_check() -> None:
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=4)
    rates = [0.1] * 9 + [0.01] * 7 + [0.02] * 4
    assert levels(accordion, [1.0] * 20, rates) == "gggg" * 2 + "hggg" + "hhhh" * 2
    up = [0.1] * 9 + [0.2] * 11
    assert levels(accordion, [1.0] * 20, up) == "gggg" * 2 + "hhhh" * 3


@pytest.mark.parametrize("threshold", [0.2, 0.5, 0.9])
def test_levels_follow_the_written_out_rule(threshold: float) -> None:
    """Computes the rule by layer, from the returned sums alone."""
    parts, memories, every = placed((6, 4), (9,), (5, 8)), [Memory(r) for r in range(3)], 3
    accordion = Accordion(gentle=TopK(density=0.5), harsh=TopK(density=0.05), threshold=threshold, every=every)
    before: dict[str, float] = {}
    total, found = torch.zeros(parts[-1].stop, dtype=torch.float64), set()
    for step in range(36):
        sizes = [(1.0, 1.0, 1.4, 4.0, 4.0, 2.2)[(step // every + i) % 6] for i in range(len(parts))]
        scale = torch.cat([torch.full((p.stop - p.start,), size) for p, size in zip(parts, sizes, strict=True)])
        out, _ = exchanged(ErrorFeedback(of=accordion), noise(step % every, 3, parts[-1].stop) * scale, parts, memories)
        total += out.double()
        if step % every < every - 1:
            continue
        for p in parts:
            norm = float(total[p.start : p.stop].norm())
            old = before.get(p.name, 0.0)
            gentle = old == 0 or abs(old - norm) / old >= threshold
            assert memories[0].parts[Accordion.buffer][p.name].gentle == gentle, (step, p.name)
            before[p.name] = norm
            found.add(gentle)
        total.zero_()
    assert found == {True, False}


def test_threshold_zero_is_bit_identical_to_the_gentle_run() -> None:
    pair = {"gentle": PowerSGD(rank=3), "harsh": TopK()}
    hashes = [hash_model_state(run(experiment(3, 12, compressor=ErrorFeedback(of=c)))[0].layout)
              for c in (PowerSGD(rank=3), Accordion(**pair, threshold=0.0, every=2))]  # fmt: skip
    assert hashes[0] == hashes[1]


def test_an_unreachable_threshold_is_exactly_harsh_from_the_second_check_on() -> None:
    """Equals a change of the compressor by hand, which shows that the residual is kept."""
    accordion = Accordion(gentle=TopK(density=0.2), harsh=TopK(density=0.01), threshold=ENDLESS, every=3)
    by_rule = run(experiment(3, 12, compressor=ErrorFeedback(of=accordion)))[0]
    by_hand = run(experiment(3, 12, compressor=ErrorFeedback(of=accordion.gentle)), Change(6, "density", 0.01))[0]
    assert hash_model_state(by_rule.layout) == hash_model_state(by_hand.layout)
    assert sorted(by_rule.record.comm()) == sorted(by_hand.record.comm())


def in_force(session: object, steps: int) -> list[dict[str, float]]:
    """Returns, by step, the level of each parameter, from the record alone."""
    rows = [(step, what.removeprefix("level "), v) for step, what, _, v in session.record.samples if "level " in what]
    every: list[dict[str, float]] = [{}]
    for step in range(steps):
        every.append(every[-1] | {name: v for at, name, v in rows if at == step})
    return every


def test_bytes_match_each_layers_level_on_all_ranks() -> None:
    accordion = Accordion(gentle=PowerSGD(rank=3), harsh=PowerSGD(rank=1), every=2, threshold=0.25)
    sessions = run(experiment(4, 21, compressor=ErrorFeedback(of=accordion), bucket_mb=0.05))
    first = sessions[0]
    every, seen = in_force(first, 21), set()
    for step in range(2, 21):
        want = 0
        for bucket in first.layout.buckets:
            for gentle, r in ((1.0, 3), (0.0, 1)):
                if parts := [p for p in bucket.parts if every[step][p.name] == gentle]:
                    want += factors(gathered_parts(bucket, parts), 4, r)
                    seen.add((len(parts) == len(bucket.parts), gentle))
        assert sum(n for s, _, n in first.record.comm() if s == step) == want, step
    assert {gentle for _, gentle in seen} == {0.0, 1.0} and (False, 0.0) in seen, "both levels, and within one bucket"
    known = [s.rank.memory.parts[Accordion.buffer] for s in sessions]
    assert known[0] == known[1] == known[2] == known[3] and len(known[0]) == 6
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert not any("level" in what for s in sessions[1:] for _, what, _, _ in s.record.samples), "said once"


def test_the_record_has_a_level_at_each_decision_only() -> None:
    memories, parts = [Memory(), Memory()], placed((8, 8))
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=4)
    heard = [said(exchanged(accordion, torch.ones(2, 64), parts, memories, lr)[1])
             for lr in [0.1] * 10 + [0.01] * 3]  # fmt: skip
    want: list[list[tuple[str, float]]] = [[] for _ in range(13)]
    want[0] = want[3] = want[10] = [("level p0", 1.0)]
    want[7] = want[11] = [("level p0", 0.0)]
    assert heard == want


def test_a_new_learning_rate_changes_the_levels_of_a_run() -> None:
    accordion = Accordion(threshold=ENDLESS, every=3)
    e = experiment(2, 14, compressor=ErrorFeedback(of=accordion))
    every = in_force(run(e, Change(7, "lr", 0.001), Change(10, "lr", 0.01))[0], 14)
    assert [set(one.values()) for one in every[1:]] == [{1.0}] * 5 + [{0.0}] * 2 + [{1.0}] + [{0.0}] * 6


def test_statistics_of_a_layer_do_not_depend_on_buckets() -> None:
    parts = placed((6, 8), (8,), (4, 9))
    one, cut = [Memory(), Memory()], [Memory(), Memory()]
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=3)
    for step in range(20):
        g = noise(step // 3, 2, parts[-1].stop)
        g[:, :48] *= 1 + step // 3 % 2 * 3  # the first layer never becomes steady
        exchange(accordion, g, parts, one)
        for group in ((parts[:1], parts[1:]), (parts[:2], parts[2:]), (parts,))[step % 3]:
            exchange(accordion, g, group, cut)
    assert one[0].parts[Accordion.buffer] == cut[0].parts[Accordion.buffer]
    assert {one.gentle for one in cut[0].parts[Accordion.buffer].values()} == {True, False}


def test_random_live_changes_lose_nothing() -> None:
    rng, ranks, parts = random.Random(3), 2, placed(*[(12, 16), (8,)] * 3)
    memories, n, used = [Memory(r) for r in range(ranks)], parts[-1].stop, set()
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for step in range(500):
        if not step % 5:
            pair = rng.choice(
                [
                    (PowerSGD(rank=2), PowerSGD(rank=1)),
                    (TopK(density=0.5), TopK(density=0.02)),
                    (Dense(), TopK.usual()),
                    (Layers(smallest=9), PowerSGD()),
                ]
            )
            accordion = Accordion(gentle=pair[0], harsh=pair[1], every=rng.randint(1, 3), threshold=rng.random())
        g = noise(step, ranks, n) * rng.choice([0.3, 1.0, 1.0, 3.0])
        owed += g.double().sum(0)
        cut = rng.choice([2, 3, 6])
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=accordion), g, group, memories)
        used |= {one.gentle for one in memories[0].parts[Accordion.buffer].values()}
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]).double() for m in memories)
    assert (sent + left - owed).norm() <= 1e-4 * owed.norm() and used == {True, False}


def test_a_live_change_of_knobs_acts_on_the_next_step() -> None:
    accordion = Accordion(gentle=PowerSGD(rank=4), harsh=PowerSGD(rank=1), threshold=ENDLESS, every=2)
    e = experiment(4, 14, compressor=ErrorFeedback(of=accordion))
    session = run(e, Change(2, "gentle.rank", 2), Change(6, "harsh.rank", 3), Change(9, "threshold", 0.0))[0]
    want = {1: 4, 2: 2, 3: 2, 4: 1, 5: 1, 6: 3, 9: 3, 10: 2, 13: 2}
    for step, r in want.items():
        bytes_ = sum(n for s, _, n in session.record.comm() if s == step)
        assert bytes_ == sum(factors(b, 4, r) for b in session.layout.buckets), step


def test_numbers_that_are_not_finite_are_left_out_of_the_sum() -> None:
    memories, parts, g = [Memory(), Memory()], placed((8, 8)), torch.ones(2, 64)
    bad = g.clone()
    bad[1, 5] = float("nan")
    accordion = Accordion(gentle=PAIR.gentle, harsh=PAIR.harsh, every=2)
    for x in (g, g, bad, g, g):
        exchange(accordion, x, parts, memories)
    known = memories[0].parts[Accordion.buffer]["p0"]
    assert known.norm == pytest.approx((63 * 16 + 4) ** 0.5) and not known.gentle


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_many_small_gradients_of_sixteen_bits_add_up(dtype: torch.dtype) -> None:
    memories, g = [Memory()], torch.full((1, 64), 0.01, dtype=dtype)
    for _ in range(1000):
        exchange(Accordion(gentle=Dense(), harsh=Dense(), every=1000), g, placed((8, 8)), memories)
    assert memories[0].parts[Accordion.buffer]["p0"].norm == pytest.approx(1000 * float(g[0, 0]) * 8, rel=1e-4)


def test_with_shapes_only_it_is_harsh_from_the_second_check_on() -> None:
    e = experiment(4, 9, compressor=ErrorFeedback(of=Accordion(every=3)), pace=10)
    spans = simulate(e, real=False).spans
    got = [int(spans[(spans["rank"] == 0) & (spans.step == step)].nbytes.sum()) for step in range(1, 9)]
    buckets = run(experiment(4, 2))[0].layout.buckets
    gentle, harsh = (sum(factors(b, 4, r) for b in buckets) for r in (2, 1))
    assert got == [gentle] * 5 + [harsh] * 3


def test_engine_and_simulator_make_the_same_decisions() -> None:
    e = experiment(3, 16, compressor=ErrorFeedback(of=Accordion(every=2, threshold=0.3)))
    rows = simulate(e.set("pace", 10), real=True).samples
    mine = rows[(rows["rank"] == 0) & rows.name.str.startswith("level ")]
    real = [(step, what, v) for step, what, _, v in run(e)[0].record.samples if what.startswith("level ")]
    assert sorted(real) == sorted(zip(mine.step, mine.name, mine.value, strict=True))
    assert {v for _, _, v in real} == {0.0, 1.0}


def test_one_rank_trains_and_decides_alone() -> None:
    (session,) = run(experiment(1, 9, compressor=ErrorFeedback(of=Accordion(every=2))))
    assert bool(weights(session).isfinite().all()) and len(session.rank.memory.parts[Accordion.buffer]) == 6


def test_nested_accordion_is_refused() -> None:
    with pytest.raises(KnobError, match=r"Accordion inside Accordion: .*; use one of them"):
        experiment(2, 4, compressor=Accordion(harsh=ErrorFeedback(of=Accordion())))


def test_a_simulation_with_shapes_only_states_its_assumption() -> None:
    e = experiment(2, 3, compressor=Accordion.usual(), pace=10)
    [(_, _, detail)] = simulate(e, real=False).details("estimate")
    assert detail["text"] == "Accordion: norms do not change: gentle until the second check, harsh from there on"
    assert not simulate(e, real=True).details("estimate")
