"""Tests invalid wrappings of compressors: refused before a start, with an alternative."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.ranks import experiment, run, toy, weights
from workbench.compressors import (
    DGC,
    Accordion,
    Compressor,
    ErrorFeedback,
    Layers,
    LGreCo,
    RandomK,
    ScaleCom,
    TernGrad,
    TopK,
    WarmUp,
)
from workbench.settings import KnobError


@pytest.mark.parametrize(("compressor", "why", "instead"), [
    (ErrorFeedback(of=TernGrad()), "grow without bound", "EFSignSGD"),
    (ErrorFeedback(of=RandomK(scaled=True)), "would grow", "scaled=False"),
    (ErrorFeedback(of=Layers(of=TernGrad())), "grow without bound", "without"),
    (Layers(of=DGC()), "would have none", r"DGC\(momentum=0\)"),
    (Accordion(gentle=DGC(), harsh=TopK()), "would have none", "DGC for both"),
    (LGreCo(of=DGC()), "a trial cannot measure", "TopK or PowerSGD"),
    (ErrorFeedback(of=LGreCo(of=ScaleCom())), "a trial cannot measure", "TopK or PowerSGD"),
], ids=str)  # fmt: skip
def test_an_invalid_wrapping_is_refused_with_an_alternative(compressor: Compressor, why: str, instead: str) -> None:
    with pytest.raises(KnobError, match=f"(?s){why}.*{instead}"):
        experiment(compressor=compressor)


def test_similar_valid_wrappings_are_accepted() -> None:
    for good in (Layers(of=DGC(momentum=0.0)), Accordion(gentle=DGC(density=0.1), harsh=DGC()), LGreCo(of=TopK())):
        assert experiment(compressor=good).compressor == good


@pytest.mark.ranks
def test_dgc_keeps_the_momentum_while_it_warms_up() -> None:
    """Its first steps are sent whole but by DGC, so they equal those of SGD with momentum."""

    def sgd(params: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.02, momentum=0.9)

    rest = {"task": toy(optimizer=sgd)}
    warm = run(experiment(2, 8, compressor=WarmUp(of=DGC(), steps=100), **rest))[0]
    torch.testing.assert_close(weights(warm), weights(run(experiment(2, 8, **rest))[0]), rtol=1e-4, atol=1e-6)
    assert "momentum" in warm.rank.memory.buffers
