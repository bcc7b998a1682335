"""Passes whose backward never comes: what autograd kept of them goes with them, whoever packs it."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import experiment as lived
from tests.ranks import run
from workbench.host.layout import Layout
from workbench.host.reading import Reading
from workbench.host.trial import Listening
from workbench.host.versions import Version
from workbench.strategies import ZeRO3

Passes = Callable[[nn.Module], AbstractContextManager[None]]
WAYS: dict[str, Passes] = {
    "a stage's version of its weights": lambda model: Version(Layout(model, 1.0)).forward(),
    "who listens": lambda model: Listening(dict(model.named_parameters())).forward(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_that_nobody_goes_back_through_leaves_nothing(way: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Sigmoid())
    with WAYS[way](model):
        out = model(torch.ones(2, 4))
    out.sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    with WAYS[way](model):
        out = model(torch.ones(2, 4))
    there = weakref.ref(out)
    del out
    gc.collect()
    assert there() is None


def test_what_shards_pack_leaves_nothing_either(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[weakref.ref[Tensor]] = []
    pack = Reading._pack

    def noted(self: Reading, x: Tensor) -> object:
        kept = pack(self, x)
        packed.append(weakref.ref(x)) if x.grad_fn is not None else None
        assert not isinstance(kept, Tensor) or kept.grad_fn is None
        return kept

    monkeypatch.setattr(Reading, "_pack", noted)
    run(lived(strategy=ZeRO3(), ranks=2, steps=4))
    gc.collect()
    assert packed and not any(ref() is not None for ref in packed)
