"""Laws over all compressors, found by looking in their folder."""

from __future__ import annotations

import random

import pytest
import torch

from tests.ranks import exchange, experiment, placed, run, shipped
from workbench.canonical import state_hash
from workbench.compressors import Codec, Compressor, ErrorFeedback, TopK
from workbench.fabric import traffic
from workbench.knobs import Change, KnobError, knobs
from workbench.ops import Memory, Part

ALL = shipped(Compressor)
CODECS = {name: cls for name, cls in ALL.items() if issubclass(cls, Codec)}
EXPECTED = {
    "Dense": {"linear": True, "unbiased": True, "contraction": False, "immediate": True},
    "Cast": {"linear": True, "unbiased": False, "contraction": False, "immediate": False},
    "ByteGrad": {"linear": False, "unbiased": False, "contraction": False, "immediate": False},
    "OneBit": {"linear": False, "unbiased": False, "contraction": False, "immediate": False},
    "PowerSGD": {"linear": True, "unbiased": False, "contraction": False, "immediate": False},
    "TopK": {"linear": False, "unbiased": False, "contraction": True, "immediate": False},
    "ErrorFeedback": {"linear": False, "unbiased": False, "contraction": False, "immediate": False},
}
every = pytest.mark.parametrize("name", ALL)
every_codec = pytest.mark.parametrize("name", CODECS)


def claiming(claim: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("name", [n for n, cls in CODECS.items() if getattr(cls, claim)])


def test_each_shipped_compressor_carries_its_claims() -> None:
    for name, claims in EXPECTED.items():
        assert {k: getattr(ALL[name], k) for k in claims} == claims


@every
def test_the_result_is_bit_for_bit_the_same_on_all_ranks(name: str) -> None:
    sessions = run(experiment(3, 8, compressor=ALL[name].usual()))
    assert len({state_hash(s.layout) for s in sessions}) == 1


@every
def test_every_live_knob_changes_bytes_or_result(name: str) -> None:
    for k in knobs(ALL[name]):
        other = next(iter(set(k.choices) - {k.default}), None) or ("TopK" if k.family else k.high)
        plain = run(experiment(2, 8, compressor=ALL[name]()))[0]
        turned = run(experiment(2, 8, compressor=ALL[name]()), Change(4, f"compressor.{k.name}", other))[0]
        same_bytes = plain.record.comm() == turned.record.comm()
        assert not same_bytes or state_hash(plain.layout) != state_hash(turned.layout), k.name


@every_codec
def test_payload_bytes_on_the_record_are_those_of_what_encode_returns(name: str) -> None:
    codec = CODECS[name]()
    session = run(experiment(4, 4, compressor=codec))[0]
    verb = "all_reduce" if codec.linear else "all_gather"
    want = sum(
        traffic(verb, t.numel() * t.element_size(), 4)[0]
        for bucket in session.layout.buckets for t in codec.encode(bucket.data)
    )
    assert sum(n for step, _, n in session.record.comm() if step == 3) == want


@every_codec
def test_sizes_are_known_without_the_numbers(name: str) -> None:
    codec = CODECS[name]()
    real = codec.encode(torch.randn(1000))
    sizes = codec.encode(torch.empty(1000, device="meta"))
    assert [(t.shape, t.dtype) for t in real] == [(t.shape, t.dtype) for t in sizes]


@claiming("linear")
def test_a_linear_codec_adds_up(name: str) -> None:
    codec = CODECS[name]()
    dice = torch.Generator().manual_seed(1)
    x, y = (torch.randint(-64, 64, (500,), generator=dice).float() for _ in range(2))
    together = codec.decode(tuple(a + b for a, b in zip(codec.encode(x), codec.encode(y), strict=True)), x)
    torch.testing.assert_close(together, codec.decode(codec.encode(x + y), x))


@claiming("contraction")
def test_a_contraction_contracts(name: str) -> None:
    codec = CODECS[name]()
    for seed in range(20):
        x = torch.randn(400, generator=torch.Generator().manual_seed(seed)) ** 3
        left = (codec.decode(codec.encode(x), x) - x).square().sum()
        assert left <= (1 - codec.density) * x.square().sum() * (1 + 1e-6)


@every_codec
@pytest.mark.parametrize("x", [torch.zeros(5), torch.ones(1), torch.arange(8.0)[::2], torch.full((4,), 1e4),
                               torch.linspace(-2, 2, 7).bfloat16(), torch.linspace(-2, 2, 7).half()], ids=str)
def test_odd_inputs_come_back_with_their_shape_and_dtype(name: str, x: torch.Tensor) -> None:
    codec = CODECS[name]()
    back = codec.decode(codec.encode(x), x)
    assert back.shape == x.shape and back.dtype == x.dtype and bool(back.isfinite().all())


@pytest.mark.parametrize("name", [n for n in ALL if n != "ErrorFeedback"])
def test_nothing_is_lost_under_error_feedback_over_random_live_changes(name: str) -> None:
    """Everything sent plus what is left equals the sum of all gradients, through 500 changes of everything."""
    dice = random.Random(name)
    ranks, parts = 3, placed(*[(12, 16), (8,)] * 6)
    n = parts[-1].stop
    memories = [Memory() for _ in range(ranks)]
    sent, owed = torch.zeros(n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    of = ALL[name]()
    for step in range(500):
        cut = dice.choice([1, 2, 3, 4, 6, 12])
        if dice.random() < 0.3:
            of = TopK(density=dice.uniform(0.02, 1.0)) if dice.random() < 0.5 else ALL[name]()
        g = torch.randn(ranks, n, generator=torch.Generator().manual_seed(step))
        owed += g.double().sum(0)
        for b in range(0, len(parts), cut):
            group = parts[b : b + cut]
            sent[group[0].start : group[-1].stop] += exchange(ErrorFeedback(of=of), g, group, memories)
    left = sum(torch.cat([m.slots["residual"][p.name] for p in parts]).double() for m in memories)
    # Cast sums in its narrow type, and what the sum itself rounds away belongs to no rank's residual
    limit = 5e-3 if name in CODECS and ALL[name].linear else 1e-4
    assert (sent + left - owed).norm() <= limit * owed.norm()


def test_turning_compression_off_sends_the_residual_once_and_forgets_it() -> None:
    sessions = run(experiment(2, 10, compressor=ErrorFeedback(of=TopK(density=0.1))), Change(6, "compressor", "Dense"))
    for s in sessions:
        assert "residual" not in s.rank.memory.slots
        names = [name for step, name, _ in s.record.comm() if step == 7]
        assert names and all(name.startswith("all_reduce") for name in names)


@pytest.mark.parametrize("value", [0, 1.5, -1, "many"])
def test_a_ratio_that_cannot_be_is_refused_with_the_range(value: object) -> None:
    with pytest.raises(KnobError, match=r"compressor.of.density=.*\[0.0001, 1\]"):
        experiment(compressor=TopK.usual()).turn("density", value)


def test_a_non_finite_gradient_does_not_poison_the_residual() -> None:
    memory = [Memory(), Memory()]
    parts = [Part("p", (4,), 0, 4)]
    ef = ErrorFeedback(of=TopK(density=0.25))
    exchange(ef, torch.tensor([[1.0, float("inf"), 2.0, 3.0]] * 2), parts, memory)
    assert bool(memory[0].slots["residual"]["p"].isfinite().all())


