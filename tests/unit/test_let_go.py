"""Tests that passes without a backward leave nothing in memory, with any saved-tensor hooks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.piped import piped
from tests.ranks import experiment as lived
from tests.ranks import run
from workbench.host.passes import weight_versions
from workbench.host.passes.weight_versions import WeightVersion
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.sharding.access_trace import TraceListener
from workbench.host.sharding.unsharder import Unsharder
from workbench.partitions import Pipeline, Whole
from workbench.partitions.schedules import PipeDream, PipeDream2BW
from workbench.settings import Change
from workbench.strategies import ZeRO3

Passes = Callable[[nn.Module], AbstractContextManager[None]]
WAYS: dict[str, Passes] = {
    "a stage's version of its weights": lambda model: WeightVersion(ParameterLayout(model, 1.0)).read_in_forward(),
    "who listens": lambda model: TraceListener(dict(model.named_parameters())).listen_to_forward(),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_forward_without_backward_leaves_no_saved_tensors(way: str) -> None:
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


def test_a_forward_without_backward_leaves_no_packed_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    packed: list[weakref.ref[Tensor]] = []
    pack = Unsharder._pack_tensor

    def noted(self: Unsharder, x: Tensor) -> object:
        kept = pack(self, x)
        packed.append(weakref.ref(x)) if x.grad_fn is not None else None
        assert not isinstance(kept, Tensor) or kept.grad_fn is None
        return kept

    monkeypatch.setattr(Unsharder, "_pack_tensor", noted)
    run(lived(strategy=ZeRO3(), ranks=2, steps=4))
    gc.collect()
    assert packed and not any(ref() is not None for ref in packed)


@pytest.mark.parametrize(("schedule", "micros"), [(PipeDream(), 1), (PipeDream2BW(), 4)], ids=str)
def test_a_change_that_cancels_a_pipelines_early_forwards_frees_them(schedule: Any, micros: int) -> None:
    def kept() -> int:
        gc.collect()
        return sum(type(x) is weight_versions._SavedTensor for x in gc.get_objects())

    before, e = kept(), piped(4, 10, partition=Pipeline(stages=2, micros=micros, schedule=schedule))
    run(e, Change(4, "bucket_mb", 0.01), Change(7, "partition", Whole()))
    assert kept() == before
