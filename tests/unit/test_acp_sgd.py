"""Tests ACPSGD against the paper's algorithm, PowerSGD, and the record."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, toy, weights
from tests.sim.insides import parameters, simulated
from tests.sim.virtual import begun, comm
from workbench.compressors import ACPSGD, Dense, ErrorFeedback, PowerSGD
from workbench.compressors._low_rank import LEFT, RIGHT, TURN_NAME
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Rank
from workbench.settings import Change
from workbench.strategies import LocalSGD

pytestmark = pytest.mark.ranks

MATRIX = placed((40, 30))
SEVERAL = placed((40, 30), (7,), (30, 40), (40, 30), (3, 2), (), (10, 4, 3))


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(seed: int, r: int) -> torch.Tensor:
    """Returns a flat 40 x 30 matrix of rank r: (1200,)."""
    return (noise(seed, 40, r) @ noise(seed + 1, r, 30)).reshape(-1)


def plain_acp_sgd(steps: list[np.ndarray], q: np.ndarray) -> list[np.ndarray]:
    """Runs the paper's rule with each worker's own error: (ranks, n, m) per step -> the common sum."""
    errors, out, p = np.zeros_like(steps[0]), [], None
    for k, gradients in enumerate(steps):
        mine = gradients + errors
        if k % 2 == 0:
            q = np.linalg.qr(q)[0]
            each = mine @ q
            errors = mine - each @ q.T
            p = each.sum(0)
            out.append(p @ q.T)
        else:
            p = np.linalg.qr(p)[0]
            each = np.swapaxes(mine, 1, 2) @ p
            errors = mine - p @ np.swapaxes(each, 1, 2)
            q = each.sum(0)
            out.append(p @ q.T)
    return out


@pytest.mark.parametrize(("ranks", "r"), [(1, 1), (3, 2), (4, 5)])
def test_acp_sgd_is_the_papers_rule_with_error_feedback(ranks: int, r: int) -> None:
    steps = [noise(9, ranks, 1200) + k * noise(k, ranks, 1200) for k in range(9)]
    first = noise(77, 30, r)
    memories = [Memory() for _ in range(ranks)]
    for memory in memories:
        memory.parts[RIGHT] = {"p0": first.clone()}
    got = [exchange(ErrorFeedback(of=ACPSGD(rank=r)), g, MATRIX, memories) for g in steps]
    want = plain_acp_sgd([g.view(ranks, 40, 30).numpy() for g in steps], first.numpy().copy())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.view(40, 30).numpy(), b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [1, 3])
def test_two_steps_with_one_gradient_are_one_iteration_of_power_sgd(ranks: int) -> None:
    g = noise(3, ranks, SEVERAL[-1].stop)
    one, two = [Memory() for _ in range(ranks)], [Memory() for _ in range(ranks)]
    for _ in range(3):
        want = exchange(PowerSGD(rank=2), g, SEVERAL, one)
        exchange(ACPSGD(rank=2), g, SEVERAL, two)
        got = exchange(ACPSGD(rank=2), g, SEVERAL, two)
        torch.testing.assert_close(got, want)
    for name, q in one[0].parts[RIGHT].items():
        torch.testing.assert_close(two[0].parts[RIGHT][name], q)


def test_switching_from_and_to_power_sgd_keeps_the_factors() -> None:
    g, memory = torch.stack([low_rank(3, 2)]), [Memory()]
    exchange(PowerSGD(rank=2), g, MATRIX, memory)
    for of in (ACPSGD(rank=2), ACPSGD(rank=2), PowerSGD(rank=2), ACPSGD(rank=2), PowerSGD(rank=2)):
        torch.testing.assert_close(exchange(of, g, MATRIX, memory), g[0])


def test_a_gradient_of_low_rank_is_recovered_in_its_second_step() -> None:
    memories, g = [Memory(), Memory()], torch.stack([low_rank(3, 2), 2 * low_rank(3, 2)])
    first = exchange(ACPSGD(rank=2), g, MATRIX, memories)
    assert not torch.allclose(first, g.sum(0)), "at first it looks along random directions"
    for _ in range(2):
        torch.testing.assert_close(exchange(ACPSGD(rank=2), g, MATRIX, memories), g.sum(0))


@pytest.mark.parametrize("r", [30, 31, 1024])
@pytest.mark.parametrize("rate", [1.0, 2.0])
def test_a_rank_as_large_as_a_side_is_exact(r: int, rate: float) -> None:
    memories, parts = [Memory(), Memory()], placed((30, 4000))
    of = ACPSGD(rank=r, min_compression_rate=rate)
    for step in range(3):
        g = noise(step, 2, 120_000)
        assert torch.equal(exchange(of, g, parts, memories), g[0] + g[1])


def test_contributions_and_residuals_add_up_in_every_step() -> None:
    memories, owed, sent = [Memory() for _ in range(3)], 0.0, 0.0
    for step in range(4):
        g = noise(5 + step, 3, SEVERAL[-1].stop)
        owed, sent = owed + g.sum(0), sent + exchange(ErrorFeedback(of=ACPSGD(rank=2)), g, SEVERAL, memories)
        left = torch.cat([sum(m.buffers["residual"][p.name] for m in memories) for p in SEVERAL])
        torch.testing.assert_close(sent + left, owed)
        for p in SEVERAL:
            whole = p.shape in [(7,), (3, 2), ()]
            assert bool((left[p.start : p.stop] == 0).all()) == whole, "vectors and small matrices cross whole"


def test_random_live_changes_lose_nothing() -> None:
    rng = torch.Generator().manual_seed(0)

    def among(n: int) -> int:
        return int(torch.randint(n, (), generator=rng))

    memories, parts = [Memory(), Memory()], placed((40, 30), (9,), (12, 50), (30, 40))
    sent = owed = torch.zeros(parts[-1].stop, dtype=torch.float64)
    mixed = 0
    for step in range(80):
        rest = {"rank": 1 + among(11), "min_compression_rate": float(1 + among(4)), "warm_start": among(3) > 0}
        of = (ACPSGD, ACPSGD, PowerSGD)[among(3)](**rest)
        g = noise(step, 2, parts[-1].stop)
        owed = owed + g.sum(0)
        for group in (parts,) if among(2) else (parts[:1], parts[1:]):
            out = exchange(ErrorFeedback(of=of), g, group, memories)
            sent = sent + torch.cat([g.new_zeros(group[0].start), out, g.new_zeros(owed.numel() - group[-1].stop)])
        mixed += 0 < len(memories[0].parts.get(TURN_NAME, ())) < 3
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]) for m in memories)
    torch.testing.assert_close(sent + left, owed)
    assert mixed > 5, "whose turn it is was never another among the parameters of one bucket"


def test_a_new_rank_keeps_the_known_columns_of_both_factors() -> None:
    g, memory = torch.stack([low_rank(3, 2)]), [Memory()]
    for _ in range(2):
        exchange(ACPSGD(rank=2), g, MATRIX, memory)
    for r in (5, 5, 9, 8, 2, 3):
        torch.testing.assert_close(exchange(ACPSGD(rank=r), g, MATRIX, memory), g[0])
    assert {memory[0].parts[side]["p0"].shape for side in (LEFT, RIGHT)} == {(40, 2), (30, 3)}


@pytest.mark.parametrize("r", [1, 3])
def test_zero_gradients_give_zero_and_learning_still_works(r: int) -> None:
    memories, zero = [Memory(), Memory()], torch.zeros(2, 1200)
    for _ in range(4):
        assert torch.equal(exchange(ACPSGD(rank=r), zero, MATRIX, memories), torch.zeros(1200).double())
    corner = torch.zeros(2, 40, 30)
    corner[:, 20:, 15:] = noise(1, 20, 1).float() @ noise(2, 1, 15).float()
    for _ in range(4):
        out = exchange(ACPSGD(rank=r), corner.view(2, -1), MATRIX, memories)
    torch.testing.assert_close(out.float(), corner.sum(0).view(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("good_steps", [2, 3])
def test_a_non_finite_gradient_is_passed_on_and_the_factors_are_kept(good_steps: int) -> None:
    memories, g = [Memory(), Memory()], torch.stack([low_rank(3, 2).float()] * 2)
    for _ in range(good_steps):
        exchange(ACPSGD(rank=2), g, MATRIX, memories)
    bad = g.clone()
    bad[1, 5] = float("inf")
    assert not exchange(ACPSGD(rank=2), bad, MATRIX, memories).isfinite().all()
    torch.testing.assert_close(exchange(ACPSGD(rank=2), g, MATRIX, memories).float(), g.sum(0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_gradients_are_sent_with_sixteen_bits(dtype: torch.dtype) -> None:
    memory = Memory()
    for step in range(2):
        bucket = Bucket(0, (0.1 * noise(step, 1200)).to(dtype), tuple(MATRIX), 0)
        child = ACPSGD(rank=2).reduce(Rank(0, 1), bucket, memory)
        op = child.send(None)
        assert op.verb == "all_reduce" and op.args[0].dtype == dtype
        with pytest.raises(StopIteration) as stop:
            child.send(op.args[0])
        assert stop.value.value.dtype == dtype and torch.equal(stop.value.value, bucket.data)


def formula(session: object, r: int, right: bool) -> list[int]:
    """Returns the bytes that one of 4 ranks sends per bucket in a step of the right factor, from shapes alone."""
    out = []
    for bucket in session.layout.buckets:
        total = 0
        for part in bucket.parts:
            n = part.shape[0]
            m = (part.stop - part.start) // n
            total += (m * r if right else n * r) if r < min(n, m) and r * (n + m) < n * m else n * m
        out.append(traffic("all_reduce", 4 * total, 4)[0])
    return out


def test_each_bucket_sends_one_all_reduce_of_left_and_right_factors_in_turn() -> None:
    session = run(experiment(4, 10, compressor=ACPSGD.usual()), Change(6, "rank", 8))[0]
    for step in range(1, 10):
        sent = [(name, n) for k, name, n in session.record.comm() if k == step]
        assert all(name.startswith("all_reduce bucket") for name, _ in sent)
        assert [n for _, n in sent] == formula(session, 4 if step < 6 else 8, right=step % 2 == 1), step
    assert sum(formula(session, 4, True)) != sum(formula(session, 4, False)) < sum(formula(session, 1024, False))


def test_a_rank_as_large_as_the_matrices_is_plain_averaging() -> None:
    dense, full = (run(experiment(3, 10, compressor=c)) for c in (Dense(), ACPSGD(rank=64)))
    torch.testing.assert_close(weights(full[0]), weights(dense[0]), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("strategy", [None, LocalSGD(every=2)], ids=str)
def test_engine_and_simulator_agree_through_live_changes(strategy: object) -> None:
    rest = {"strategy": strategy} if strategy else {}
    e = experiment(3, 14, compressor=ACPSGD.usual(), **rest)
    changes = [
        Change(3, "rank", 2),
        Change(5, "bucket_mb", 0.05),
        Change(8, "warm_start", False),
        Change(10, "compressor.of", {"PowerSGD": {"rank": 3}}),
        Change(12, "compressor.of", {"ACPSGD": {}}),
    ]
    sessions = run(e, *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    for real in (True, False):
        found, ranks = simulated(e.set("pace", 1), *changes, real=real)
        for s in sessions:
            assert comm(found, s.rank.index) == begun(s.record)
        if real:
            torch.testing.assert_close(parameters(ranks), parameters(sessions), rtol=1e-4, atol=1e-5)


def test_with_error_feedback_it_reaches_the_loss_of_plain_averaging() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 150}
    ends = {}
    for c in (Dense(), ACPSGD.usual(), ErrorFeedback(of=ACPSGD(rank=1))):
        session = run(experiment(2, 151, compressor=c, **rest))[0]
        held = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = held[-1]
        assert held[-1] < 0.6 * held[0]
    assert max(ends.values()) < 1.1 * min(ends.values()), ends
