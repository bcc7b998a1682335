"""Compares PowerSGD with the paper's algorithm, with linear algebra, and with the record."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torch_own

from tests.ranks import batch, exchange, experiment, mse, net, placed, run, together, toy, weights
from workbench import simulate
from workbench.compressors import ACPSGD, Dense, ErrorFeedback, PowerSGD
from workbench.compressors._low_rank import RIGHT
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Part, Rank
from workbench.settings import Change, KnobError
from workbench.strategies import DDP, LocalSGD

pytestmark = pytest.mark.ranks

MATRIX = placed((40, 30))
INF, NAN = float("inf"), float("nan")


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(seed: int, r: int) -> torch.Tensor:
    """Returns a 40 x 30 matrix of rank r, flat: (1200,)."""
    return (noise(seed, 40, r) @ noise(seed + 1, r, 30)).reshape(-1)


def plain_power_sgd(gradients: list[np.ndarray], q: np.ndarray) -> list[np.ndarray]:
    """Runs the paper's algorithm in one process, with error feedback and Gram-Schmidt; returns each step's update."""
    error, out = np.zeros_like(gradients[0]), []
    for gradient in gradients:
        m = gradient + error
        p = m @ q
        for j in range(p.shape[1]):
            for i in range(j):
                p[:, j] -= (p[:, i] @ p[:, j]) * p[:, i]
            p[:, j] /= np.sqrt(p[:, j] @ p[:, j])
        q = m.T @ p
        out.append(p @ q.T)
        error = m - out[-1]
    return out


@pytest.mark.parametrize(("ranks", "r"), [(1, 1), (3, 2), (4, 5)])
def test_power_sgd_equals_the_papers_algorithm_on_the_summed_gradient(ranks: int, r: int) -> None:
    steps = [noise(9, ranks, 1200) + k * noise(k, ranks, 1200) for k in range(8)]
    first = noise(77, 30, r)
    memories = [Memory() for _ in range(ranks)]
    for memory in memories:
        memory.parts[RIGHT] = {"p0": first.clone()}
    got = [exchange(ErrorFeedback(of=PowerSGD(rank=r)), g, MATRIX, memories) for g in steps]
    want = plain_power_sgd([g.sum(0).view(40, 30).numpy() for g in steps], first.numpy().copy())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a.view(40, 30).numpy(), b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_result_does_not_depend_on_how_the_gradient_is_spread_over_ranks(ranks: int) -> None:
    alone, many = [Memory()], [Memory() for _ in range(ranks)]
    for step in range(4):
        g = noise(step, ranks, 1200)
        one = exchange(PowerSGD(rank=3), g.sum(0, keepdim=True), MATRIX, alone)
        torch.testing.assert_close(exchange(PowerSGD(rank=3), g, MATRIX, many), one)


def test_a_gradient_of_low_rank_is_recovered_in_its_first_step() -> None:
    memory = [Memory(), Memory()]
    g = torch.stack([low_rank(3, 2), 2 * low_rank(3, 2)])
    torch.testing.assert_close(exchange(PowerSGD(rank=2), g, MATRIX, memory), g.sum(0))


@pytest.mark.parametrize("r", [1, 2, 5])
def test_the_error_of_one_rank_is_orthogonal_to_the_result_and_at_least_the_optimum(r: int) -> None:
    m = noise(4, 1, 1200)
    out = exchange(PowerSGD(rank=r), m, MATRIX, [Memory()])
    missed = (m[0] - out).square().sum()
    torch.testing.assert_close(missed, m.square().sum() - out.square().sum())
    tail = torch.linalg.svdvals(m.view(40, 30))[r:].square().sum()
    assert missed > tail


def test_repeated_steps_converge_to_the_best_approximation_at_the_rate_of_power_iteration() -> None:
    u, _ = torch.linalg.qr(noise(1, 40, 30))
    v, _ = torch.linalg.qr(noise(2, 30, 30))
    sigma = torch.tensor([8.0, 4.0, *[2.0 * 0.9**k for k in range(28)]], dtype=torch.float64)
    m, memory = ((u * sigma) @ v.T).reshape(1, -1), [Memory()]
    tail = sigma[2:].square().sum().sqrt()
    excess = [float((m[0] - exchange(PowerSGD(rank=2), m, MATRIX, memory)).norm() - tail) for _ in range(9)]
    assert all(x >= -1e-9 for x in excess), "below the bound of Eckart and Young"
    # the subspace's error shrinks by (sigma_3 / sigma_2)^2 = 1/4 each step, and the excess is quadratic in it
    assert all(b < 0.1 * a for a, b in pairwise(excess[3:])) and excess[-1] < 1e-5 * tail


def test_the_ranks_contributions_sum_to_the_result() -> None:
    parts, ranks = placed((40, 30), (7,), (30, 40), (40, 30), (3, 2), (), (10, 4, 3)), 3
    memories = [Memory() for _ in range(ranks)]
    g = noise(5, ranks, parts[-1].stop)
    out = exchange(ErrorFeedback(of=PowerSGD(rank=2)), g, parts, memories)
    left = torch.cat([sum(m.buffers["residual"][p.name] for m in memories) for p in parts])
    torch.testing.assert_close(out + left, g.sum(0))
    for p in parts:
        whole = p.shape in [(7,), (3, 2), ()]
        assert bool((left[p.start : p.stop] == 0).all()) == whole, "vectors and small matrices cross whole"


def test_nothing_is_lost_while_the_rank_changes() -> None:
    rng = torch.Generator().manual_seed(0)
    memories, parts = [Memory(), Memory()], placed((40, 30), (9,), (12, 50))
    sent = owed = torch.zeros(parts[-1].stop, dtype=torch.float64)
    for step in range(60):
        r = int(torch.randint(1, 40, (), generator=rng))
        g = noise(step, 2, parts[-1].stop)
        owed = owed + g.sum(0)
        for group in (parts,) if step % 2 else (parts[:1], parts[1:]):
            out = exchange(ErrorFeedback(of=PowerSGD(rank=r)), g, group, memories)
            sent = sent + torch.cat([g.new_zeros(group[0].start), out, g.new_zeros(owed.numel() - group[-1].stop)])
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]) for m in memories)
    torch.testing.assert_close(sent + left, owed)


def test_a_change_of_rank_keeps_the_known_columns() -> None:
    memory, g = [Memory()], torch.stack([low_rank(3, 2)])
    exchange(PowerSGD(rank=2), g, MATRIX, memory)
    for r in (5, 8, 2):
        torch.testing.assert_close(exchange(PowerSGD(rank=r), g, MATRIX, memory), g[0])
        assert memory[0].parts[RIGHT]["p0"].shape == (30, r)
    cold = [Memory()]
    tilted = torch.stack([low_rank(3, 2) + 0.3 * noise(8, 1200)])
    warm_error = (exchange(PowerSGD(rank=2), tilted, MATRIX, memory) - tilted[0]).norm()
    assert warm_error < 0.9 * (exchange(PowerSGD(rank=2), tilted, MATRIX, cold) - tilted[0]).norm()


def test_several_iterations_equal_as_many_steps_with_the_same_gradient() -> None:
    g, once, thrice = noise(6, 2, 1200), [Memory(), Memory()], [Memory(), Memory()]
    for _ in range(3):
        want = exchange(PowerSGD(rank=2), g, MATRIX, once)
    got = exchange(PowerSGD(rank=2, iterations=3), g, MATRIX, thrice)
    torch.testing.assert_close(got, want)
    sent = run(experiment(2, 4, compressor=PowerSGD(rank=2, iterations=3)))[0].record.comm()
    buckets = len({name for step, name, _ in sent if step == 3})
    assert sum(step == 3 for step, _, _ in sent) > 2 * buckets


def test_contributions_of_several_iterations_sum_to_the_result() -> None:
    parts, memories = placed((40, 30), (7,)), [Memory(), Memory()]
    g = noise(5, 2, parts[-1].stop)
    out = exchange(ErrorFeedback(of=PowerSGD(rank=2, iterations=2)), g, parts, memories)
    left = torch.cat([sum(m.buffers["residual"][p.name] for m in memories) for p in parts])
    torch.testing.assert_close(out + left, g.sum(0))


def test_without_warm_start_every_step_draws_new_directions_equal_on_all_ranks() -> None:
    g, cold, warm = noise(6, 2, 1200), [Memory(), Memory()], [Memory(), Memory()]
    outs = [exchange(PowerSGD(rank=2, warm_start=False), g, MATRIX, cold) for _ in range(6)]
    assert all(float((a - b).norm()) > 0.05 * float(a.norm()) for a, b in pairwise(outs))
    for _ in range(6):
        known = exchange(PowerSGD(rank=2), g, MATRIX, warm)
    assert (known - g.sum(0)).norm() < min((out - g.sum(0)).norm() for out in outs)
    # switched on again, the warm start goes on from the step before
    after = exchange(PowerSGD(rank=2), g, MATRIX, cold)
    assert (after - g.sum(0)).norm() < (outs[-1] - g.sum(0)).norm()


@pytest.mark.parametrize("rate", [1.0, 2.0, 7.5])
def test_a_matrix_is_compressed_under_the_same_condition_as_in_torch(rate: float) -> None:
    rng = np.random.default_rng(0)
    for n, m, r in rng.integers(1, 300, (3000, 3)).tolist():
        theirs = torch_own._should_compress(n, m, min(n, m, r // 8 + 1), rate)[0]
        assert PowerSGD(rank=r // 8 + 1, min_compression_rate=rate).worth(n, m) == theirs, (n, m, r)


def resnet18() -> list[tuple[int, ...]]:
    """Returns the shapes of the paper's ResNet-18 for CIFAR-10: 11 173 962 parameters."""
    shapes: list[tuple[int, ...]] = [(64, 3, 3, 3), (64,), (64,)]
    before = 64
    for width in (64, 128, 256, 512):
        for block in range(2):
            shapes += [(width, before, 3, 3), (width,), (width,), (width, width, 3, 3), (width,), (width,)]
            if block == 0 and before != width:
                shapes += [(width, before, 1, 1), (width,), (width,)]
            before = width
    return [*shapes, (10, 512), (10,)]


@pytest.mark.parametrize(("r", "mebibytes"), [(1, 4.2), (2, 7.5), (4, 14.2)])
def test_an_epoch_of_the_papers_resnet_sends_the_papers_bytes(r: int, mebibytes: float) -> None:
    """The paper's table has 4, 8 and 14 MB of 1023 for 24 steps, with every matrix compressed."""
    parts = placed(*resnet18())
    assert parts[-1].stop == 11_173_962 and round(parts[-1].stop * 4 * 24 / 2**20) == 1023
    child = PowerSGD(rank=r, min_compression_rate=1.0).reduce(
        Rank(0, 4), Bucket(0, torch.empty(parts[-1].stop, device="meta"), tuple(parts), 0), Memory()
    )
    sent, value = 0, None
    try:
        while True:
            value = child.send(value).args[0]
            sent += value.numel()
    except StopIteration:
        assert sent * 4 * 24 / 2**20 == pytest.approx(mebibytes, abs=0.1)


class OneBucket:
    """The interface of a bucket that torch's hook uses."""

    def __init__(self, data: torch.Tensor, parts: list[Part]) -> None:
        self.data, self.parts = data, parts

    def buffer(self) -> torch.Tensor:
        return self.data

    def index(self) -> int:
        return 0

    def is_last(self) -> bool:
        return True

    def gradients(self) -> list[torch.Tensor]:
        return [self.data[p.start : p.stop].view(p.shape) for p in self.parts]


class Two:
    """Two ranks as threads in place of `torch.distributed` in torch's hook; only the transport is ours."""

    def __init__(self) -> None:
        self.here = threading.Barrier(2, timeout=60)
        self.given: dict[int, torch.Tensor] = {}

    def all_reduce(self, x: torch.Tensor, group: OneOfTwo, async_op: bool) -> OneOfTwo:
        self.given[group.index] = x.clone()
        self.here.wait()
        x.copy_(self.given[0] + self.given[1])
        self.here.wait()
        return OneOfTwo(group.index, [x])


@dataclass
class OneOfTwo:
    """A process group as torch's hook sees it, and the work object of an all-reduce."""

    index: int
    done: list[torch.Tensor] = field(default_factory=list)

    def size(self) -> int:
        return 2

    def get_future(self) -> torch.futures.Future:
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.done)
        return future


def by_torchs_hook(
    steps: list[torch.Tensor], parts: list[Part], r: int, first: list[torch.Tensor]
) -> list[torch.Tensor]:
    """Returns the mean that torch's own hook gives two ranks, step by step, starting from these Q."""
    outs: dict[int, list[torch.Tensor]] = {0: [], 1: []}

    def rank(index: int) -> None:
        state = torch_own.PowerSGDState(OneOfTwo(index), r, start_powerSGD_iter=2)
        state.iter = 2
        tall = [p for p in parts if PowerSGD(rank=r).worth(p.shape[0], (p.stop - p.start) // max(1, p.shape[0]))]
        state.p_memory_dict[0] = torch.empty(sum(p.shape[0] * r for p in tall))
        state.q_memory_dict[0] = torch.cat([q.reshape(-1) for q in first])
        for g in steps:
            future = torch_own.powerSGD_hook(state, OneBucket(g[index].clone(), parts))
            outs[index].append(future.wait().clone())

    with patch.object(torch_own, "dist", Two()):
        threads = [threading.Thread(target=rank, args=(i,), daemon=True) for i in range(2)]
        for t in threads:
            t.start()
        for t in threads:
            t.join(60)
    assert len(outs[0]) == len(outs[1]) == len(steps)
    assert all(torch.equal(a, b) for a, b in zip(outs[0], outs[1], strict=True))
    return outs[0]


@pytest.mark.parametrize("r", [1, 2, 4])
def test_power_sgd_with_error_feedback_equals_torchs_own_hook(r: int) -> None:
    """Two ranks, one bucket with matrices of several shapes, a vector and a matrix too small to compress."""
    parts = placed((40, 30), (7,), (24, 3, 3, 3), (3, 2), (40, 30))
    n = parts[-1].stop
    steps = [(noise(9, 2, n) + 0.3 * k * noise(k, 2, n)).float() for k in range(6)]
    tall = [p for p in parts if len(p.shape) > 1 and p.shape != (3, 2)]
    first = [noise(70 + i, (p.stop - p.start) // p.shape[0], r).float() for i, p in enumerate(tall)]
    # torch groups its matrices by shape
    walked = [first[0], first[2], first[1]]
    theirs = by_torchs_hook(steps, parts, r, walked)
    memories = [Memory(), Memory()]
    for memory in memories:
        memory.parts[RIGHT] = {p.name: q.clone() for p, q in zip(tall, first, strict=True)}
    for g, want in zip(steps, theirs, strict=True):
        got = exchange(ErrorFeedback(of=PowerSGD(rank=r)), g / 2, parts, memories)
        torch.testing.assert_close(got.float(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("r", [1, 3])
def test_after_zero_gradients_power_sgd_still_learns(r: int) -> None:
    memory, zero = [Memory(), Memory()], torch.zeros(2, 1200)
    for _ in range(3):
        assert torch.equal(exchange(PowerSGD(rank=r), zero, MATRIX, memory), torch.zeros(1200).double())
    # then only a corner that the first unit vectors miss
    corner = torch.zeros(2, 40, 30)
    corner[:, 20:, 15:] = noise(1, 20, 1).float() @ noise(2, 1, 15).float()
    for _ in range(2):
        out = exchange(PowerSGD(rank=r), corner.view(2, -1), MATRIX, memory)
    torch.testing.assert_close(out.float(), corner.sum(0).view(-1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e12])
def test_the_result_scales_with_the_gradients(scale: float) -> None:
    memory, g = [Memory(), Memory()], torch.stack([low_rank(3, 3).float()] * 2) * scale
    for _ in range(3):
        out = exchange(PowerSGD(rank=3), g, MATRIX, memory)
    torch.testing.assert_close(out.float() / scale, g.sum(0) / scale, rtol=1e-3, atol=1e-3)


def test_a_non_finite_gradient_passes_on_and_leaves_no_state() -> None:
    memory, g = [Memory(), Memory()], torch.stack([low_rank(3, 2).float()] * 2)
    bad = g.clone()
    bad[1, 5] = float("inf")
    assert not exchange(PowerSGD.usual(), bad, MATRIX, memory).isfinite().all()
    for _ in range(2):
        out = exchange(PowerSGD.usual(), g, MATRIX, memory)
    assert bool(out.isfinite().all()) and bool(memory[0].parts[RIGHT]["p0"].isfinite().all())


@pytest.mark.parametrize("cls", [PowerSGD, ACPSGD])
@pytest.mark.parametrize("where", [0, 130, 239, 240, 249], ids=str)  # in the matrix, and in the part sent whole
@pytest.mark.parametrize("bad", [NAN, INF, -INF, 1e35])
def test_non_finite_values_on_any_rank_show_in_the_factors(cls: type, where: int, bad: float) -> None:
    parts = placed((16, 15), (10,))

    def seen(g: torch.Tensor) -> list[bool]:
        buckets = [Bucket(0, row.clone(), tuple(parts), 0) for row in g]
        owing = [cls(rank=2).reduce_owing(Rank(r, 3), b, Memory()) for r, b in enumerate(buckets)]
        return [own.finite() for own in together(owing)]

    g = noise(1, 3, 250)
    assert seen(g) == [True] * 3
    g[1, where] = bad
    assert seen(g) == [False] * 3


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_gradients_are_sent_in_16_bits(dtype: torch.dtype) -> None:
    g = (0.1 * noise(1, 1, 1200)).to(dtype)
    bucket = Bucket(0, g[0].clone(), tuple(MATRIX), 0)
    child = PowerSGD(rank=2).reduce(Rank(0, 1), bucket, Memory())
    op = child.send(None)
    while True:
        assert op.args[0].dtype == dtype
        try:
            op = child.send(op.args[0])
        except StopIteration as stop:
            assert stop.value.dtype == dtype and torch.equal(stop.value, bucket.data)
            break


def test_sizes_are_known_without_the_numbers() -> None:
    parts = placed((40, 30), (9,), (12, 50))
    asked = []
    for device in ("cpu", "meta"):
        memory, sizes = Memory(), []
        for _ in range(2):
            bucket = Bucket(0, torch.zeros(parts[-1].stop, device=device), tuple(parts), 0)
            child = PowerSGD.usual().reduce(Rank(0, 4), bucket, memory)
            value = None
            while True:
                try:
                    value = child.send(value).args[0]
                    sizes.append((value.shape, value.dtype))
                except StopIteration:
                    break
        asked.append(sizes)
    assert asked[0] == asked[1] and asked[0][:2] == [((4 * (40 + 12) + 9,), torch.float32), ((4 * 80,), torch.float32)]


def deep() -> nn.Module:
    """Returns 24 square layers: as many buckets at 0.01 MB."""
    return nn.Sequential(nn.Linear(8, 50), *[nn.Linear(50, 50) for _ in range(24)], nn.Linear(50, 4))


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("strategy", [DDP(), LocalSGD(every=3)], ids=str)
def test_many_buckets_on_several_ranks_end_and_agree(strategy: object, ranks: int) -> None:
    e = experiment(ranks, 9, strategy=strategy, compressor=PowerSGD.usual(), task=toy(model=partial(net, deep)))
    sessions = run(e, Change(4, "rank", 2), Change(6, "bucket_mb", 0.05))
    assert len(sessions[0].record.noted("buckets")) >= 2
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def formula(session: object, r: int) -> int:
    """Returns the bytes that one of four ranks sends per step, from the shapes alone."""
    total = 0
    for bucket in session.layout.buckets:
        first = second = 0
        for part in bucket.parts:
            n, m = (part.shape[0], part.stop - part.start) if part.shape else (1, 1)
            m //= n
            if r < min(n, m) and 2 * r * (n + m) < n * m:
                first, second = first + r * n, second + r * m
            else:
                first += n * m
        total += sum(traffic("all_reduce", 4 * k, 4)[0] for k in (first, second) if k)
    return total


def test_recorded_bytes_equal_the_formula_before_and_after_a_change_of_rank() -> None:
    e = experiment(4, 9, compressor=PowerSGD(rank=1), task=toy(model=partial(net, deep)), bucket_mb=0.02)
    session = run(e, Change(5, "rank", 7))[0]
    for step, r in ((3, 1), (4, 1), (5, 7), (8, 7)):
        assert sum(n for k, _, n in session.record.comm() if k == step) == formula(session, r)
    assert formula(session, 1) < formula(session, 7) < formula(session, 1024)


def test_a_rank_above_every_matrix_is_refused_before_any_exchange() -> None:
    words = r"rank=65: the largest matrix of this model is 64 x 64, .* take a rank below 64, or Dense"
    session = run(experiment(2, 6, compressor=PowerSGD.usual()), Change(3, "compressor.of.rank", 65))[0]
    (mark,) = session.record.noted("refused")
    assert json.loads(mark[-1])["reason"].startswith("rank=65: the largest matrix of this model is 64 x 64")
    assert session.experiment.compressor.of.rank == 4
    with pytest.raises(KnobError, match=words):
        simulate(experiment(2, 6, compressor=PowerSGD(rank=65), pace=1))
    simulated = simulate(experiment(2, 6, compressor=PowerSGD.usual(), pace=1), changes=[Change(3, "rank", 65)])
    assert "take a rank below 64" in simulated.details("refused")[0][2]["reason"]
    assert PowerSGD(rank=9).refuses_model(placed((20,), ())) is None, "vectors cross whole at any rank"


def test_a_rank_as_large_as_the_matrices_equals_plain_averaging() -> None:
    dense, full = (run(experiment(3, 10, compressor=c)) for c in (Dense(), PowerSGD(rank=64)))
    torch.testing.assert_close(weights(full[0]), weights(dense[0]), rtol=1e-6, atol=1e-7)


def test_under_error_feedback_it_trains_as_far_as_plain_averaging() -> None:
    rest = {"task": toy(partial(torch.optim.SGD, lr=0.05)), "eval_every": 150}
    ends = {}
    for c in (Dense(), PowerSGD.usual(), ErrorFeedback(of=PowerSGD(rank=1))):
        session = run(experiment(2, 151, compressor=c, **rest))[0]
        held = [v for _, name, _, v in session.record.samples if name == "held_out"]
        ends[str(c)] = held[-1]
        assert held[-1] < 0.6 * held[0]
    assert max(ends.values()) < 1.1 * min(ends.values()), ends


def test_one_rank_takes_the_approximation_of_its_own_gradient() -> None:
    """The reference puts gradients through the paper's algorithm and torch's optimizer in one process."""
    session = run(experiment(1, 6, compressor=PowerSGD.usual()))[0]
    model, memory = net(), [Memory()]
    parts = {p.name: p for b in session.layout.buckets for p in b.parts}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    for step in range(6):
        optimizer.zero_grad()
        mse(model, batch(0, step, 0)).backward()
        for name, p in model.named_parameters():
            only = [parts[name]._replace(start=0, stop=p.numel())]
            p.grad = exchange(PowerSGD.usual(), p.grad.reshape(1, -1), only, memory).float().view(p.shape)
        optimizer.step()
    want = torch.cat([p.detach().reshape(-1).double() for _, p in sorted(model.named_parameters())])
    torch.testing.assert_close(weights(session), want, rtol=1e-5, atol=1e-6)


def test_an_empty_direction_is_replaced_by_a_new_one() -> None:
    """Ten steps have rank 1, the next rank 3. Directions that stayed empty would find nothing again."""
    memory, of = Memory(), PowerSGD(rank=3, min_compression_rate=1.0)
    one, three = low_rank(1, 1)[None].float(), low_rank(5, 3)[None].float()
    for _ in range(10):
        exchange(of, one, MATRIX, [memory])
    q = memory.parts[RIGHT]["p0"]
    assert bool((q.abs().amax(0) > 0).all()) and bool(q.isfinite().all())
    for _ in range(12):
        out = exchange(of, three, MATRIX, [memory])
    assert float((out - three[0]).norm() / three.norm()) < 1e-3


@pytest.mark.parametrize("of", [PowerSGD(rank=2), ACPSGD(rank=2)], ids=str)
def test_an_empty_column_is_replaced_and_a_non_finite_one_is_not_kept(of: PowerSGD | ACPSGD) -> None:
    memory, bucket = Memory(), Bucket(0, torch.zeros(1200), tuple(MATRIX), 0)
    (stack,), _ = of.sorted(bucket)
    old = of.directions(memory, stack, bucket.data)
    found = torch.zeros_like(old)
    found[..., 1] = 3.0
    of.remember(memory, stack, found, old)
    kept = memory.parts[RIGHT]["p0"]
    assert bool((kept[:, 1] == 3.0).all()) and float(kept[:, 0].norm()) == pytest.approx(float(old[0, :, 0].norm()))
    assert not torch.allclose(kept[:, 0], old[0, :, 0]), "nothing was found there, so it looks elsewhere"
    found[..., 0], found[0, 4, 1] = 2.0, INF
    of.remember(memory, stack, found, old)
    kept = memory.parts[RIGHT]["p0"]
    assert bool((kept[:, 0] == 2.0).all()) and torch.equal(kept[:, 1], old[0, :, 1])
