"""Tests Zen and its schemes against plain sums and sets: exact, balanced, complete, with bytes given by formula."""

from __future__ import annotations

import math
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import experiment, placed, run, together, toy, weights
from tests.sparse_sums import by_formula
from workbench import Costs, simulate
from workbench.compressors import Compressor, Zen
from workbench.fabric import Fabric, Link, Load, even, uneven
from workbench.host.memory.storages import count_bytes, find_storages
from workbench.rank import Bucket, Memory, Op, Part, Rank
from workbench.settings import Change, knobs

pytestmark = pytest.mark.ranks

SCHEMES = [scheme for scheme in next(k for k in knobs(Zen) if k.name == "scheme").choices if scheme != "auto"]
PARTS = placed((60, 7), (33,), (4, 5, 6), (), (50, 1))  # rows of several lengths, vectors, a scalar
N = PARTS[-1].stop
FEW = placed((6, 7), (5,), (2, 3, 4), (), (4, 1))
KINDS = ["random", "clustered", "alike", "one rank only", "full", "nothing", "every seventh"]
ANY = [("auto", "auto"), *((scheme, rows) for scheme in ("auto", *SCHEMES) for rows in ("rows", "elements"))]


def rng(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def whole(seed: int, p: int, n: int = N) -> torch.Tensor:
    """Returns (p, n) small integers without zeros. Their sums are exact in any order, in every dtype."""
    signs = 2 * torch.randint(0, 2, (p, n), generator=rng(seed + 1)) - 1
    return (torch.randint(1, 8, (p, n), generator=rng(seed)) * signs).float()


def supported(kind: str, p: int, n: int = N) -> torch.Tensor:
    """Returns (p, n) integers on supports of this kind."""
    mask = torch.zeros(p, n, dtype=torch.bool)
    match kind:
        case "random":
            mask = torch.rand(p, n, generator=rng(3)) < 0.05
        case "clustered":
            mask[:, : n // 20] = True
        case "alike":
            mask[:] = torch.rand(n, generator=rng(4)) < 0.05
        case "one rank only":
            mask[p - 1] = torch.rand(n, generator=rng(5)) < 0.3
        case "full":
            mask[:] = True
        case "every seventh":
            mask[:, ::7] = True
    return whole(p, p, n) * mask


def bucket_of(x: torch.Tensor, parts: list[Part] = PARTS, offset: int = 0) -> Bucket:
    return Bucket(0, x, tuple(parts), offset)


def exchanged(
    zen: Compressor, g: torch.Tensor, parts: list[Part] = PARTS, memories: list[Memory] | None = None
) -> tuple[list[torch.Tensor], list[Op]]:
    """Returns each rank's result, and rank 0's operations."""
    p, seen = len(g), list[Op]()
    buckets = [bucket_of(x.clone(), parts) for x in g]
    memories = memories or [Memory(r) for r in range(p)]
    together([zen.reduce(Rank(r, p), buckets[r], memories[r]) for r in range(p)], seen)
    return [b.data for b in buckets], seen


def carried(ops: list[Op], p: int, rank: int) -> list[Load]:
    """Returns the load of the ports for each collective."""
    out = []
    for op in (op for op in ops if op.verb != "sample"):
        x = op.args[0]
        if op.verb == "all_to_allv":
            out.append(uneven(op.args[1], x[0].element_size(), rank))
        else:
            out.append(even(op.verb, x.numel() * x.element_size(), p))
    return out


def sent(ops: list[Op], p: int) -> list[int]:
    """Returns bytes by rank."""
    return [sum(load.sent for load in carried(ops, p, r)) for r in range(p)]


def pushed(ops: list[Op]) -> list[list[int]]:
    """Returns by rank and owner the bytes sent, where only an owner adds."""
    table: list[list[int]] = next(op for op in ops if op.verb == "all_to_allv").args[1]
    return table


def units(parts: list[Part], rows: bool) -> list[range]:
    """Returns the units with an index of their own: the elements of each row of a matrix, or each element."""
    widths = [(p, math.prod(p.shape[1:]) if rows else 1) for p in parts]
    return [range(at, at + width) for p, width in widths for at in range(p.start, p.stop, width)]


def owners_of(every: list[range], p: int, parts: list[Part], rows: str) -> list[int]:
    """Returns by unit the owner that adds it, found by giving each rank one unit alone."""
    found = []
    for at in range(0, len(every), p):
        g = torch.zeros(p, parts[-1].stop)
        for r, places in enumerate(every[at : at + p]):
            g[r, places] = 1.0
        sent = pushed(exchanged(Zen(scheme="owners", rows=rows), g, parts)[1])
        found += [next((j for j in range(p) if j != r and row[j]), r) for r, row in enumerate(sent)]
    return found[: len(every)]


def scheme_of(ops: list[Op]) -> str:
    return next(SCHEMES[int(op.args[1])] for op in ops if op.verb == "sample" and op.args[0] == "scheme")


# -- exact sums --


@pytest.mark.parametrize("p", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_every_scheme_gives_the_dense_sum_exactly_for_every_support(kind: str, p: int) -> None:
    g = supported(kind, p)
    for scheme, rows in ANY:
        for got in exchanged(Zen(scheme=scheme, rows=rows), g)[0]:
            assert torch.equal(got, g.sum(0)), (scheme, rows)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_summed_exactly_and_keep_their_dtype(dtype: torch.dtype) -> None:
    g = supported("random", 4).to(dtype)
    for scheme, rows in ANY:
        for got in exchanged(Zen(scheme=scheme, rows=rows), g)[0]:
            assert got.dtype == dtype and torch.equal(got, g.sum(0)), (scheme, rows)


@pytest.mark.parametrize("p", [3, 4])
def test_all_ranks_get_identical_bits_for_any_sign_of_zero_and_kind_of_nan(p: int) -> None:
    g = torch.randn(p, N, generator=rng(1)) * (torch.rand(p, N, generator=rng(2)) < 0.3)
    g[0, 5:90] = -0.0
    g[1, 80:85], g[2, 80:85] = math.nan, -math.nan
    g[0, 100], g[1, 100] = math.inf, -math.inf
    for scheme, rows in ANY:
        if scheme != "dense":  # the addition order is the network's
            first, *others = exchanged(Zen(scheme=scheme, rows=rows), g)[0]
            assert all(torch.equal(first.view(torch.int32), x.view(torch.int32)) for x in others), (scheme, rows)
            assert bool(first[80:85].isnan().all()) and int(first.isnan().sum()) == 6


def test_a_bucket_without_parts_and_one_that_is_not_contiguous_are_summed() -> None:
    g = supported("random", 2)
    for scheme in SCHEMES:
        buckets = [Bucket(0, torch.stack([x, x], 1)[:, 0], (), 0) for x in g]
        together([Zen(scheme=scheme).reduce(Rank(r, 2), b, Memory()) for r, b in enumerate(buckets)])
        assert all(torch.equal(b.data, g.sum(0)) for b in buckets)


def test_a_rank_contributes_its_whole_gradient() -> None:
    g = supported("random", 2)
    assert together([Zen().reduce(Rank(r, 2), bucket_of(x.clone()), Memory()) for r, x in enumerate(g)]) == [None, None]


# -- balance and completeness --

LONG = 1_000_000


def balanced(sent: list[list[int]]) -> None:
    """Checks that each rank sends about as much to every other rank."""
    for r, row in enumerate(sent):
        others = [n for j, n in enumerate(row) if j != r]
        assert max(others) <= 1.1 * sum(others) / len(others)


@pytest.mark.parametrize("p", [2, 8])
@pytest.mark.parametrize("kind", ["random", "clustered", "every p-th", "every 1024th block"])
def test_hashed_owners_balance_the_load_for_any_support_where_slices_do_not(kind: str, p: int) -> None:
    mask = torch.zeros(LONG, dtype=torch.bool)
    match kind:
        case "random":
            mask = torch.rand(LONG, generator=rng(1)) < 0.08
        case "clustered":
            mask[:80_000] = True
        case "every p-th":
            mask[::p] = True
        case _:
            mask.view(-1, 1000)[::10] = True
    assert int(mask.sum()) / p >= 9_900
    g = mask.float().expand(p, LONG)
    for parts in (placed((LONG,)), placed((LONG // 10, 1), (LONG // 10 * 9,))):
        balanced(pushed(exchanged(Zen(scheme="owners"), g, parts)[1]))
    if kind == "clustered":
        slices = mask.view(p, -1).sum(1)
        assert float(slices.max() / slices.double().mean()) == p


def test_rows_of_a_table_are_balanced_over_owners() -> None:
    g = torch.zeros(4, 100_000, 4)
    g[:, :40_000] = 1.0
    balanced(pushed(exchanged(Zen(scheme="owners", rows="rows"), g.flatten(1), placed((100_000, 4)))[1]))


@pytest.mark.parametrize("rows", ["rows", "elements"])
def test_nothing_is_lost_when_one_owner_has_every_unit(rows: str) -> None:
    """Every pair collides in the owner's memory; a table with one slot per hash would lose some."""
    p, parts = 4, FEW
    g = torch.zeros(p, parts[-1].stop)
    its = units(parts, rows == "rows")
    for places, owner in zip(its, owners_of(its, p, parts, rows), strict=True):
        if owner == 2:
            g[:, places] = whole(1, p, len(places))
    data, ops = exchanged(Zen(scheme="owners", rows=rows), g, parts)
    assert bool(g.any()) and all(torch.equal(x, g.sum(0)) for x in data)
    sent = pushed(ops)
    assert all(n == 0 for row in sent for j, n in enumerate(row) if j != 2)
    assert all(row[2] > 0 for r, row in enumerate(sent) if r != 2)


def test_the_owner_of_a_place_is_independent_of_the_buckets() -> None:
    a, b = Part("a", (30,), 0, 30), Part("b", (20, 3), 30, 90)

    def owners(parts: list[Part], start: int) -> list[int]:
        return owners_of([range(at, at + 3) for at in range(start, start + 60, 3)], 8, parts, "rows")

    both, alone = owners([a, b], 30), owners([Part("b", (20, 3), 0, 60)], 0)
    assert both == alone != owners([Part("c", (20, 3), 0, 60)], 0)


def test_sums_stay_exact_when_buckets_change_and_old_buckets_leave_no_memory() -> None:
    g, memories = supported("random", 2), [Memory(), Memory()]

    def kept() -> int:
        return count_bytes(find_storages(memories[0].parts))

    exchanged(Zen(scheme="owners"), g, PARTS, memories)
    before = kept()
    for group in (PARTS[:2], PARTS[2:]):
        lo, hi = group[0].start, group[-1].stop
        moved = [Part(p.name, p.shape, p.start - lo, p.stop - lo) for p in group]
        assert torch.equal(exchanged(Zen(scheme="owners"), g[:, lo:hi], moved, memories)[0][1], g[:, lo:hi].sum(0))
    for _ in range(2):
        assert torch.equal(exchanged(Zen(scheme="owners"), g, PARTS, memories)[0][0], g.sum(0))
        assert kept() == before > 0


# -- bytes --


def plain_sent(scheme: str, sets: list[set[int]], lie: list[int], owner: list[int]) -> list[int]:
    """Returns the bytes by rank that a scheme sends after the counts; the number of ranks is a power of two.

    sets: by rank, its units;  lie: by unit, its elements;  owner: by unit, the rank that adds it
    """
    p, count = len(sets), len(lie)

    def pairs(s: set[int]) -> int:
        return 4 + sum(4 + 4 * lie[u] for u in s) if s else 0

    told, out = 8 * (p - 1), []
    for r in range(p):
        match scheme:
            case "dense":
                out.append(2 * (p - 1) * 4 * sum(lie) // p)
            case "gather":
                out.append((p - 1) * pairs(sets[r]))
            case "tree":
                near = [[sets[i] for i in range(p) if i >> k == r >> k] for k in range(p.bit_length() - 1)]
                groups = [set().union(*each) for each in near]
                out.append(sum(told + pairs(group) for group in groups))
            case "ring":
                cuts = [count * c // p for c in range(p + 1)]
                n = 0
                for turn in range(p):
                    c = (r - turn) % p if turn < p - 1 else (r + 1) % p
                    came = [sets[(r - back) % p] for back in range(turn + 1)]
                    grown = {u for s in came for u in s if cuts[c] <= u < cuts[c + 1]}
                    n += told + pairs(grown) * (1 if turn < p - 1 else p - 1)
                out.append(n)
            case "owners":
                push = sum(pairs({u for u in sets[r] if owner[u] == o}) for o in range(p) if o != r)
                mine = {u for s in sets for u in s if owner[u] == r}
                pull = math.ceil(owner.count(r) / 8) + 4 * sum(lie[u] for u in mine)
                out.append(p * told + push + told + (p - 1) * pull)
    return out


@cache
def owners(p: int, rows: str) -> list[int]:
    """Returns the owner of each unit of FEW."""
    return owners_of(units(FEW, rows == "rows"), p, FEW, rows)


@pytest.mark.parametrize("rows", ["rows", "elements"])
@pytest.mark.parametrize("kind", ["random", "clustered", "one rank only"])
@pytest.mark.parametrize("p", [2, 4, 8])
def test_each_scheme_sends_the_bytes_computed_from_the_counted_units(p: int, kind: str, rows: str) -> None:
    g, its = supported(kind, p, FEW[-1].stop), units(FEW, rows == "rows")
    sets = [{u for u, places in enumerate(its) if bool(x[places].any())} for x in g]
    for scheme in SCHEMES:
        counts = 0 if scheme == "dense" else 16 * (p - 1)
        want = [counts + n for n in plain_sent(scheme, sets, [len(places) for places in its], owners(p, rows))]
        assert sent(exchanged(Zen(scheme=scheme, rows=rows), g, FEW)[1], p) == want, scheme


def test_auto_uses_rows_where_they_send_less_and_elements_otherwise() -> None:
    parts = placed((100, 16))
    by_rows, scattered = torch.zeros(2, 100, 16), torch.zeros(2, 100, 16)
    by_rows[:, ::10] = 1.0
    scattered[:, :, 3] = 1.0
    for g, rows in ((by_rows, "rows"), (scattered, "elements")):
        told = 32 - 16  # "auto" sends both counts
        other = {"rows": "elements", "elements": "rows"}[rows]
        zens = [Zen(scheme="gather", rows=kind) for kind in ("auto", rows, other)]
        auto, fixed, worse = (sent(exchanged(zen, g.flatten(1), parts)[1], 2)[0] for zen in zens)
        assert auto == fixed + told < worse
    assert 2 * 16 * 4 < sent(exchanged(Zen(rows="rows", scheme="gather"), by_rows.flatten(1), parts)[1], 2)[0] < 800


def test_a_zero_gradient_is_not_exchanged() -> None:
    for scheme in ("auto", *SCHEMES[:-1]):
        _, ops = exchanged(Zen(scheme=scheme), torch.zeros(4, N))
        assert [op.verb for op in ops] == ["all_gather", "sample"]


# -- choice of a scheme --


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("d", [0.001, 0.01, 0.1, 0.45, 0.8])
def test_auto_sends_within_one_percent_of_the_least(p: int, d: float) -> None:
    n = 40_000
    g = whole(1, p, n) * (torch.rand(p, n, generator=rng(9)) < d)
    parts = placed((n,))
    least = min(sum(sent(exchanged(Zen(scheme=scheme), g, parts)[1], p)) for scheme in SCHEMES)
    assert sum(sent(exchanged(Zen(), g, parts)[1], p)) <= 1.01 * least + 32 * p * (p - 1)


def test_auto_learns_the_overlap_of_ranks_from_the_last_sum() -> None:
    p, n = 8, 40_000
    g = whole(1, p, n) * (torch.rand(n, generator=rng(9)) < 0.004)
    parts, memories = placed((n,)), [Memory() for _ in range(p)]
    first, second = (exchanged(Zen(), g, parts, memories)[1] for _ in range(2))
    assert scheme_of(first) == "gather" and scheme_of(second) == "ring"
    assert max(sent(second, p)) < 0.6 * max(sent(first, p))
    dense = whole(2, p, n) * (torch.rand(n, generator=rng(9)) < 0.5)
    third, fourth = (exchanged(Zen(), dense, parts, memories)[1] for _ in range(2))
    assert scheme_of(third) == scheme_of(fourth) == "owners", "half of the places, the same on all ranks"


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0])
def test_a_second_sum_over_a_common_pool_sends_within_one_percent_of_the_least(share: float) -> None:
    """Ranks choose among the same places; the first sum shows how many there are."""
    p, n = 8, 40_000
    among = torch.randperm(n, generator=rng(1))[: int(share * n)]
    g, parts = torch.zeros(p, n), placed((n,))
    for r in range(p):
        g[r, among[torch.randperm(len(among), generator=rng(r))[:800]]] = 1.0
    least = min(sum(sent(exchanged(Zen(scheme=scheme), g, parts)[1], p)) for scheme in SCHEMES)
    memories = [Memory() for _ in range(p)]
    second = [exchanged(Zen(), g, parts, memories)[1] for _ in range(2)][1]
    assert sum(sent(second, p)) <= 1.01 * least + 32 * p * (p - 1)


def test_all_ranks_choose_the_same_scheme_when_one_has_much_and_others_little() -> None:
    g = torch.stack([supported("full", 1)[0], *supported("random", 3)])
    for _ in range(2):
        assert all(torch.equal(x, g.sum(0)) for x in exchanged(Zen(), g)[0])


# -- engine and simulator --


class GivenGradient(nn.Module):
    """A model whose gradient is its batch."""

    def __init__(self, shapes: tuple[tuple[int, ...], ...] = ((40, 8), (30, 4), (16,))) -> None:
        super().__init__()
        self.tables = nn.ParameterList(torch.zeros(shape) for shape in shapes)

    def forward(self, g: torch.Tensor) -> torch.Tensor:
        return torch.cat([t.reshape(-1) for t in self.tables]) @ g


def given(rank: int, ranks: int, seed: int) -> list[torch.Tensor]:
    """Returns 64 batches for a model of 456 elements: integers on few rows, and on scattered places in every third
    step.
    """
    steps = []
    for step in range(64):
        g = whole(1000 * step + rank, 1, 456)[0]
        rows = torch.rand(57, generator=rng(step + 100 * rank)) < 0.1
        scattered = torch.rand(456, generator=rng(step + 100 * rank)) < 0.05
        steps.append(g * (scattered if step % 3 == 2 else rows.repeat_interleave(8)))
    return steps


def sparse_task(data: Any = given, model: Any = GivenGradient) -> Any:
    return toy(partial(torch.optim.SGD, lr=2.0**-8), model, lambda m, g: m(g), data, evaluate=None)


CHANGES = [
    Change(2, "scheme", "owners"), Change(4, "rows", "elements"), Change(6, "scheme", "tree"),
    Change(8, "bucket_mb", 1.0), Change(9, "scheme", "ring"), Change(11, "rows", "auto"), Change(12, "scheme", "auto"),
    Change(14, "bucket_mb", 0.01), Change(16, "compressor", "Dense"), Change(18, "compressor", "Zen"),
]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_live_changes_of_every_setting_train_to_dense_parameters_exactly(ranks: int) -> None:
    e = experiment(ranks, 22, task=sparse_task(), compressor=Zen())
    turned = run(e, *CHANGES)
    (dense, *_) = run(experiment(ranks, 22, task=sparse_task()))
    assert all(torch.equal(weights(s), weights(dense)) for s in turned)
    assert bool(weights(dense).any())
    took = {int(v) for s in turned for _, name, _, v in s.record.samples if name == "scheme"}
    assert {SCHEMES.index(s) for s in ("owners", "tree", "ring")} <= took


@pytest.mark.parametrize("ranks", [3, 4])
def test_engine_and_simulator_send_the_same_bytes(ranks: int) -> None:
    e = experiment(ranks, 14, task=sparse_task(), compressor=Zen())
    sessions = run(e, *CHANGES[:6])
    spans = simulate(e.set("pace", 10), changes=CHANGES[:6], real=True).spans
    for s in sessions:
        mine = spans[(spans["rank"] == s.rank.index) & (spans.lane == "comm")].sort_values("t0", kind="stable")
        assert [n for _, _, n in s.record.comm()] == mine.nbytes.tolist()


def comm_seconds(spans: Any, step: int) -> float:
    """Returns the total duration of rank 0's collectives in a step."""
    mine = spans[(spans["rank"] == 0) & (spans.lane == "comm") & (spans.step == step)]
    return float((mine.t1 - mine.t0).sum())


@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_step_on_a_slow_link_takes_the_time_of_the_busiest_ports(scheme: str) -> None:
    link = Link(bandwidth=1.0, latency=0.5)
    task = sparse_task(model=partial(GivenGradient, ((57, 8),)))
    e = experiment(4, 2, task=task, compressor=Zen(scheme=scheme), pace=10, fabric=Fabric(link=link))
    g = torch.stack([given(r, 4, 0)[1] for r in range(4)])
    _, ops = exchanged(Zen(scheme=scheme), g, [Part("tables.0", (57, 8), 0, 456)])  # owners depend on the name
    want = sum(link.seconds(load.busiest, load.messages) for load in carried(ops, 4, 0))
    assert comm_seconds(simulate(e, real=True).spans, 1) == pytest.approx(want, rel=1e-9)


BIG = 2**22  # elements; sizes only
MBIT = 1000.0


def seconds(scheme: str, p: int, d: float) -> float:
    """Returns the time of an exchange on a link without latency, where each rank has density d."""
    task = sparse_task(lambda rank, ranks, seed: [torch.zeros(BIG)], partial(GivenGradient, ((BIG,),)))
    fabric = Fabric(link=Link(bandwidth=MBIT))
    e = experiment(p, 2, task=task, compressor=Zen(scheme=scheme), pace=10, fabric=fabric)
    return comm_seconds(simulate(e, costs=Costs(density=d)).spans, 1)


@pytest.mark.parametrize("p", [4, 16])
@pytest.mark.parametrize("d", [0.001, 0.03, 0.3])
def test_virtual_time_of_each_scheme_follows_its_formula_and_auto_takes_the_least(p: int, d: float) -> None:
    lasted = {scheme: seconds(scheme, p, d) for scheme in SCHEMES}
    for scheme, took in lasted.items():
        assert took == pytest.approx(by_formula(scheme, p, d) * BIG * 8e-6 / MBIT, rel=0.01), scheme
    counts = 32 * (p - 1) * 8e-6 / MBIT
    assert min(lasted.values()) <= seconds("auto", p, d) <= min(lasted.values()) + counts * (1 + 1e-9)


CROSSINGS = [
    ("gather", "dense", 4, 0.25), ("gather", "dense", 16, 0.0625), ("gather", "owners", 4, 0.0149),
    ("tree", "owners", 4, 0.0153), ("tree", "owners", 16, 0.00222), ("owners", "dense", 4, 0.513),
    ("owners", "dense", 16, 0.484), ("ring", "dense", 4, 0.217),
]  # fmt: skip


@pytest.mark.parametrize(("below", "above", "p", "about"), CROSSINGS)
def test_schemes_cross_at_the_density_of_their_formulas(below: str, above: str, p: int, about: float) -> None:
    """`below` sends less at lower densities, `above` at higher ones."""
    low, high = 1e-5, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if by_formula(below, p, middle) < by_formula(above, p, middle) else (low, middle)
    assert low == pytest.approx(about, rel=0.02)
    for d, (fast, slow) in ((0.95 * low, (below, above)), (1.05 * low, (above, below))):
        assert seconds(fast, p, d) < seconds(slow, p, d), d
