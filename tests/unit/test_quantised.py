"""Tests Quantised: Q(S(x)) against its formula, its bound with and without scaling, and valid compositions."""

from __future__ import annotations

import pytest
import torch

from tests.ranks import experiment, run, weights
from workbench.compressors import QSGD, Cast, Dense, ErrorFeedback, Float8, OneBit, PowerSGD, Quantised, TernGrad, TopK
from workbench.host.placement.canonical_state import hash_model_state
from workbench.rank import Memory
from workbench.settings import Change, KnobError
from workbench.strategies import LocalSGD

pytestmark = pytest.mark.ranks
COARSE = QSGD(block=512)


def through(compressor: Quantised | QSGD | TopK, x: torch.Tensor, seed: int = 1) -> torch.Tensor:
    coder = compressor.coder(Memory(seed))
    return coder.decode(coder.encode(x), x)


def test_quantised_top_k_equals_qsgd_of_the_kept_values() -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    values, index = TopK(density=0.1).encode(x)
    want = torch.zeros(3000).index_copy(0, index.long(), through(QSGD(block=64), values))
    assert torch.equal(through(Quantised(of=TopK(density=0.1)), x), want)


@pytest.mark.parametrize(("of", "by"), [(Dense(), QSGD()), (TopK(), Dense())], ids=["only rounds", "only chooses"])
def test_with_dense_on_one_side_it_equals_the_other_compressor(of: Dense | TopK, by: Dense | QSGD) -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    alone = by if isinstance(of, Dense) else of
    assert torch.equal(through(Quantised(of=of, by=by), x), through(alone, x))


ROUNDINGS = [(QSGD(block=64), False), (COARSE, True), (QSGD(norm="l2", block=512), True)]


@pytest.mark.parametrize(("by", "scaled"), ROUNDINGS,
                         ids=["fine", "coarse, scaled", "coarse l2, scaled"])  # fmt: skip
@pytest.mark.parametrize("power", [1, 3])
def test_it_contracts_by_the_bound_of_the_paper_on_average(by: QSGD, scaled: bool, power: int) -> None:
    n, density = 4000, 0.25
    x = torch.randn(n, generator=torch.Generator().manual_seed(2)) ** power
    compressor = Quantised(of=TopK(density=density), by=by, scaled=scaled)
    b = compressor.adds
    assert b is not None
    left = [float((x - through(compressor, x, seed)).square().sum()) for seed in range(30)]
    bound = 1 - density / (1 + b) if scaled else 1 - (1 - b) * density
    assert sum(left) / len(left) <= bound * float(x.square().sum())


def test_the_scale_is_one_over_one_plus_b() -> None:
    x = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    plain, scaled = (Quantised(by=COARSE, scaled=s) for s in (False, True))
    torch.testing.assert_close(through(scaled, x) * (1 + scaled.adds), through(plain, x))


@pytest.mark.parametrize(("chosen", "says"), [
    (lambda: Quantised(of=PowerSGD()), "use TopK"), (lambda: Quantised(by=TernGrad()), "use TopK"),
    (lambda: Quantised(of=QSGD()), "only integers"), (lambda: Quantised(by=OneBit(), scaled=True), "scaled=False"),
    (lambda: ErrorFeedback(of=Quantised(by=COARSE)), "scaled=True"),
], ids=["no codec", "rounds by no codec", "nothing to round", "not known", "grows"])  # fmt: skip
def test_an_invalid_composition_is_refused_with_an_alternative(chosen: object, says: str) -> None:
    with pytest.raises(KnobError, match=says):
        experiment(2, 3, compressor=chosen())


@pytest.mark.parametrize("chosen", [
    ErrorFeedback(of=Quantised(by=COARSE, scaled=True)), ErrorFeedback(of=Quantised(of=TopK(density=0.1), by=Float8())),
    Quantised(of=Cast(), by=QSGD(bits=8)),
], ids=["coarse", "bytes", "sixteen bits"])  # fmt: skip
def test_valid_compositions_run_and_ranks_agree(chosen: ErrorFeedback | Quantised) -> None:
    sessions = run(experiment(3, 6, compressor=chosen))
    assert len({hash_model_state(s.layout) for s in sessions}) == 1


def test_it_is_switched_on_and_off_live_and_the_residual_is_sent() -> None:
    """In at step 4, out at step 9: Qsparse-local-SGD, after which no state is left and ranks agree."""
    e = experiment(3, 14, strategy=LocalSGD(every=2))
    changes = [Change(4, "compressor", "Quantised"), Change(9, "compressor", "Dense")]
    sessions = run(e, *changes)
    assert len({hash_model_state(s.layout) for s in sessions}) == 1
    assert all(ErrorFeedback.residual not in s.rank.memory.buffers for s in sessions)
    [sent] = sessions[0].record.noted("residual")
    assert sent[0] >= 9
    assert not torch.equal(weights(sessions[0]), weights(run(e)[0]))
