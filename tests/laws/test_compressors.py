"""Laws over all compressors that the package folder contains."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.laws.codecs import DELTA, FEATURES, LATER, LOSING, NOTED, ONE_HOP, ROUNDS, SENT, TURNED
from tests.laws.others import others
from tests.ranks import exchange, experiment, placed, run, shipped, together
from tests.thinned import thinned
from tests.unbiased import assert_unbiased
from workbench import simulate
from workbench.analysis.steps.settings import EXACT as SILENT
from workbench.compressors import Codec, Compressor, Dense, ErrorFeedback, TopK
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.fabric import traffic
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Bucket, Memory, Part, Rank
from workbench.settings import Change, KnobError, knobs

ALL = shipped(Compressor)
CODECS = {name: cls for name, cls in ALL.items() if issubclass(cls, Codec)}
OTHERS = [name for name in ALL if name not in CODECS]
pytestmark = pytest.mark.ranks
every = pytest.mark.parametrize("name", ALL)
every_codec = pytest.mark.parametrize("name", CODECS)


def claiming(claim: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [n for n, cls in ALL.items() if getattr(cls(), claim)])


def alone(compressor: Compressor, x: torch.Tensor, memory: Memory | None = None) -> torch.Tensor:
    """Returns one rank's result for x: C(x)."""
    bucket = Bucket(0, x.clone(), (Part("p", tuple(x.shape), 0, x.numel()),), 0)
    together([compressor.reduce(Rank(0, 1), bucket, memory or Memory())])
    return bucket.data


@every
def test_the_result_is_bit_for_bit_the_same_on_all_ranks(name: str) -> None:
    sessions = run(experiment(3, 8, compressor=ALL[name].usual()))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


@pytest.mark.long
@every
def test_every_live_knob_changes_bytes_or_result(name: str) -> None:
    unturned: dict[str, Any] = {}
    for k in knobs(ALL[name]):
        if (name, k.name) in LATER:
            continue
        beside, *told = TURNED.get((name, k.name), ({},))
        chosen = experiment(2, 8, compressor=ALL[name](**beside))
        if str(beside) not in unturned:
            unturned[str(beside)] = run(chosen)[0]
        tried = told or others(chosen, f"compressor.{k.name}", k)[::-1]
        assert any(differs(unturned[str(beside)], chosen, Change(4, f"compressor.{k.name}", v)) for v in tried), (
            f"{k.name} from {k.default} to any of {tried} changed nothing; if it acts only beside other settings, or "
            f"at other values, say so in TURNED of tests/laws/codecs.py"
        )


def differs(plain: Session, chosen: Experiment, change: Change) -> bool:
    """Whether a change affects the bytes or the parameters."""
    changed = run(chosen, change)[0]
    return plain.record.comm() != changed.record.comm() or hash_model_state(plain.layout) != hash_model_state(
        changed.layout
    )


@every_codec
def test_recorded_payload_bytes_equal_those_that_encode_returns(name: str) -> None:
    codec = CODECS[name]()
    session = run(experiment(4, 4, compressor=codec))[0]
    verb = "all_reduce" if codec.linear else "all_gather"
    want = sum(
        traffic(verb, t.numel() * t.element_size(), 4)[0]
        for bucket in session.layout.buckets
        for t in codec.encode(bucket.data)
    )
    assert sum(n for step, _, n in session.record.comm() if step == 3) == want


@every_codec
def test_sizes_are_known_without_the_numbers(name: str) -> None:
    codec = CODECS[name]()
    real = codec.encode(torch.randn(1000))
    sizes = codec.encode(torch.empty(1000, device="meta"))
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in sizes]


CODERS = [name for name, cls in ALL.items() if cls().coder(Memory())]
ANY = {"scalar": torch.tensor(3.0), "none": torch.zeros(0), "matrix": torch.randn(7, 30), "cube": torch.randn(3, 5, 70),
       "turned": torch.randn(30, 7).T, "half": torch.randn(4, 9).half(), "bf16": torch.randn(33).bfloat16(),
       "double": torch.randn(2, 100).double()}  # fmt: skip


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("x", ANY.values(), ids=ANY)
def test_a_coder_takes_any_tensor_and_its_payload_size_depends_only_on_the_shape(name: str, x: torch.Tensor) -> None:
    coder, other, before = (ALL[name]().coder(Memory(seed)) for seed in (1, 1, 1))
    kept = x.clone()
    payload = coder.encode(x)
    sizes = other.encode(torch.empty_like(x, device="meta"))
    assert [(t.shape, t.dtype) for t in payload] == [(t.shape, t.dtype) for t in sizes]
    back = coder.decode(payload, x)
    assert back.shape == x.shape and back.dtype == x.dtype and torch.equal(x, kept)
    if name in FEATURES:
        return
    flat = before.encode(x.flatten())
    assert torch.equal(back.flatten(), before.decode(flat, x.flatten()))


@pytest.mark.parametrize("name", ONE_HOP)
def test_an_exchange_in_one_hop_sums_the_coders_results(name: str) -> None:
    xs = torch.randn(3, 500, generator=torch.Generator().manual_seed(1))
    coders = [ALL[name]().coder(Memory(r)) for r in range(3)]
    want = sum(coder.decode(coder.encode(x), x) for coder, x in zip(coders, xs, strict=True))
    got = exchange(ALL[name](), xs.clone(), placed((16, 30), (20,)), [Memory(r) for r in range(3)])
    torch.testing.assert_close(got, want.double(), rtol=1e-5, atol=1e-5)


@claiming("linear")
def test_a_linear_codec_compresses_a_sum_to_the_sum_of_its_parts(name: str) -> None:
    """The compressed sum of two ranks equals one rank's compressed sum."""
    codec, parts = ALL[name](), placed((16, 30), (20,))
    rng = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-64, 64, (500,), generator=rng).float() for _ in range(2))
    both = exchange(codec, torch.stack([x, y]), parts, [Memory(7), Memory(7)])
    sums = exchange(codec, (x + y)[None], parts, [Memory(7)])
    torch.testing.assert_close(both, sums, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in OTHERS if name in SENT])
def test_recorded_bytes_equal_the_formula(name: str) -> None:
    session = run(experiment(4, 5, compressor=ALL[name]()))[0]
    noted = [
        iter([v for step, what, _, v in session.record.samples if what == each and step == 3])
        for each in NOTED.get(name, ("density",))
    ]
    buckets = session.layout.buckets
    want = sum(SENT[name](b, 4, *(map(next, noted) if ALL[name].varies else [1.0])) for b in buckets)
    assert sum(n for step, _, n in session.record.comm() if step == 3) == want


@every
def test_the_simulator_knows_the_bytes_from_sizes_alone(name: str) -> None:
    simulated = simulate(experiment(4, 5, compressor=ALL[name](), pace=10), real=False).spans
    got = int(simulated[(simulated["rank"] == 0) & (simulated.step == 3)].nbytes.sum())
    session = run(experiment(4, 5, compressor=ALL[name]()))[0]
    if ALL[name].varies and name not in SENT:
        assert got > 0, "an estimate, which no formula says"
    elif ALL[name].varies:
        assert got == sum(SENT[name](b, 4, session.rank.density) for b in session.layout.buckets)
    else:
        assert got == sum(n for step, _, n in session.record.comm() if step == 3)


@every
def test_only_a_lossless_compressor_gives_the_exact_sum(name: str) -> None:
    """Whole numbers have exact sums in any order. Compressors with a slow start get time to lose something."""
    parts = placed((16, 30), (20,))
    rng = torch.Generator().manual_seed(1)
    xs = torch.randint(-1000, 1000, (3, 500), generator=rng).float()
    compressor = ALL[name](**LOSING.get(name, {}))
    memories = [Memory(r) for r in range(3)]
    found = [bool((exchange(compressor, xs.clone(), parts, memories) == xs.sum(0)).all()) for _ in range(3)]
    assert all(found) == compressor.lossless


@pytest.mark.parametrize("name", [n for n, cls in ALL.items() if "of" in {k.name for k in knobs(cls)}])
def test_a_wrapper_is_lossless_only_if_its_inner_compressor_is(name: str) -> None:
    held, tried = {k.name: k.family for k in knobs(ALL[name]) if k.family}, []
    for of in (TopK(), Dense()):
        try:
            made = ALL[name](**dict.fromkeys(held, of))
        except KnobError:
            continue
        if made.refuses() is None:
            tried.append(of)
            assert made.lossless == of.lossless
    assert tried, "each wrapper takes Top-k or Dense"


@claiming("immediate")
def test_an_immediate_compressor_makes_one_all_reduce_of_the_bucket(name: str) -> None:
    bucket = Bucket(0, torch.arange(500.0), placed((16, 30), (20,)), 0)
    child = ALL[name]().reduce(Rank(0, 2), bucket, Memory())
    op = child.send(None)
    assert op.verb == "all_reduce" and op.args[0] is bucket.data and op.args[1] == "sum"
    assert torch.equal(bucket.data, torch.arange(500.0))
    with pytest.raises(StopIteration) as end:
        child.send(bucket.data)
    assert end.value.value is None


def test_the_analysis_list_of_idle_compressors_is_complete() -> None:
    idle = {n for n, cls in ALL.items() if cls.immediate or (cls().lossless and cls.residual)}
    assert set(SILENT) == idle


@claiming("contraction")
def test_a_contraction_contracts(name: str) -> None:
    codec, n = ALL[name](), 400
    for seed in range(20):
        x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) ** 3
        left = (alone(codec, x, Memory(seed)) - x).square().sum()
        delta = DELTA[name](codec, n) if name in DELTA else 1 / n
        assert left <= (1 - delta) * x.square().sum() * (1 + 1e-6)


@claiming("unbiased")
@pytest.mark.parametrize("seed", [1, 2])
def test_the_mean_of_an_unbiased_compressor_is_its_input(name: str, seed: int) -> None:
    codec, draws, memory = ALL[name](), 2000, Memory(seed)
    x = torch.randn(256, generator=torch.Generator().manual_seed(seed)) ** 3
    assert_unbiased(torch.stack([alone(codec, x, memory) - x for _ in range(draws)]))


@every
@pytest.mark.parametrize(
    "x",
    [
        torch.zeros(5),
        torch.zeros(0),
        torch.ones(1),
        torch.arange(8.0),
        torch.full((4,), 1e4),
        1e6 + torch.linspace(-1, 1, 9),
        torch.linspace(-2, 2, 7).bfloat16(),
        torch.linspace(-2, 2, 7).half(),
    ],
    ids=str,
)
def test_odd_inputs_give_finite_sums_of_their_shape_and_dtype(name: str, x: torch.Tensor) -> None:
    part = [Part("p", tuple(x.shape), 0, x.numel())]
    memories = [Memory(0), Memory(1)]
    for _ in range(2):
        total = exchange(ALL[name].usual(), torch.stack([x, x]), part, memories)
        assert total.shape == x.shape and bool(total.isfinite().all())
        if not x.any():
            assert not total.any(), "nothing comes of nothing"


@every
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_value_that_is_not_finite_affects_only_its_step(name: str, bad: float) -> None:
    """A value that is not finite may pass on or be dropped, but must never enter the memory."""
    parts, memories = placed((6, 8), (8,)), [Memory(0), Memory(1)]
    compressor = ALL[name].usual()
    good = torch.randn(2, 56, generator=torch.Generator().manual_seed(3))
    spoilt = good.clone()
    spoilt[0, 5] = bad
    exchange(compressor, good, parts, memories)
    exchange(compressor, spoilt, parts, memories)
    for _ in range(3):
        assert bool(exchange(compressor, good, parts, memories).isfinite().all())
    for memory in memories:
        assert all(bool(v.isfinite().all()) for slot in memory.buffers.values() for v in slot.values())


def fed_back(cls: type[Compressor]) -> bool:
    """Whether error feedback's residual holds what this compressor leaves unsent."""
    return cls.residual in ("", ErrorFeedback.residual) and ErrorFeedback(of=cls()).refuses() is None


@pytest.mark.parametrize(("name",), thinned(((n,) for n, cls in ALL.items() if fed_back(cls)), of=0, long=6))
def test_nothing_is_lost_under_error_feedback_over_random_live_changes(name: str) -> None:
    """The bytes sent plus the residual equal the sum of all gradients, through 500 changes of all settings."""
    rng = random.Random(name)
    ranks, parts = 3, placed(*[(12, 16), (8,)] * 6)
    n = parts[-1].stop
    memories = [Memory(r) for r in range(ranks)]
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    of = ALL[name]()
    for step in range(500):
        cut = rng.choice([1, 2, 3, 4, 6, 12])
        if rng.random() < 0.3:
            of = TopK(density=rng.uniform(0.02, 1.0)) if rng.random() < 0.5 else ALL[name]()
        g = torch.randn(ranks, n, generator=torch.Generator().manual_seed(step))
        owed += g.double().sum(0)
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=of), g, group, memories)
    left = sum(torch.cat([m.buffers["residual"][p.name] for p in parts]).double() for m in memories)
    assert (sent + left - owed).norm() <= ROUNDS.get(name, 1e-4) * owed.norm()


def test_turning_compression_off_sends_the_residual_once_and_forgets_it() -> None:
    sessions = run(experiment(2, 10, compressor=ErrorFeedback(of=TopK(density=0.1))), Change(6, "compressor", "Dense"))
    for s in sessions:
        assert "residual" not in s.rank.memory.buffers
        names = [name for step, name, _ in s.record.comm() if step == 7]
        assert names and all(name.startswith("all_reduce") for name in names)


@pytest.mark.parametrize("value", [0, 1.5, -1, "many"])
def test_an_impossible_density_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(KnobError, match=r"compressor.of.density=.*\[0.0001, 1\]"):
        experiment(compressor=TopK.usual()).set("density", value)
