"""Tests that buckets have memory for gradients only if they are exchanged, and separate storage."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.ranks import experiment, run, toy
from workbench import simulate
from workbench.host.memory.storages import count_bytes, find_gradients
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.run import Run
from workbench.settings import Change
from workbench.strategies import DDP, LocalSGD, Strategy

pytestmark = pytest.mark.ranks


def stack() -> torch.nn.Module:
    width = (8, 16, 16, 16, 16, 4)
    return torch.nn.Sequential(*(torch.nn.Linear(a, b) for a, b in pairwise(width)))


def model_bytes() -> int:
    return sum(p.numel() * p.element_size() for p in stack().parameters())


@pytest.mark.parametrize("bucket_mb", [0.001, 0.003, 1.0])
def test_every_bucket_has_separate_storage(bucket_mb: float) -> None:
    model = stack()
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    layout = ParameterLayout(model, bucket_mb)
    where = [b.data.untyped_storage().data_ptr() for b in layout.list_params()]
    assert len(set(where)) == len(layout.buckets)
    assert all(
        w.untyped_storage().nbytes() == b.nbytes for w, b in zip(layout.weights, layout.list_params(), strict=True)
    )
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    for bucket, own in zip(layout.list_params(), where, strict=True):
        names = {part.name for part in bucket.parts}
        assert {p.data.untyped_storage().data_ptr() for n, p in model.named_parameters() if n in names} == {own}


def test_memory_for_gradients_is_allocated_once_and_freed() -> None:
    layout = ParameterLayout(stack(), 1.0)
    assert count_bytes(find_gradients(layout)) == 0 and [b.nbytes for b in layout.buckets] == [model_bytes()]
    layout.allocate_gradients()
    rooms = [b.data for b in layout.buckets]
    layout.allocate_gradients()
    assert all(b.data is room for b, room in zip(layout.buckets, rooms, strict=True))
    assert count_bytes(find_gradients(layout)) == model_bytes()
    layout.drop_gradients()
    assert count_bytes(find_gradients(layout)) == 0 and [b.nbytes for b in layout.buckets] == [model_bytes()]


@pytest.mark.parametrize(("strategy", "changes"), [
    (DDP(), ()), (LocalSGD(every=3), ()), (DDP(), (Change(6, "strategy", "LocalSGD"),)),
    (LocalSGD(every=3), (Change(6, "strategy", "DDP"),)),
], ids=str)  # fmt: skip
def test_unexchanged_gradients_take_at_most_the_models_memory(strategy: Strategy, changes: tuple[Change, ...]) -> None:
    """Without an exchange a whole model's memory would be unused. Alike on every host and after a live switch."""
    e = experiment(2, 12, task=toy(model=stack), strategy=strategy, pace=1)
    found = [run(e, *changes)[0].record.samples]
    found += [[(0, *row) for row in rows(simulate(e, changes=changes, real=real))] for real in (True, False)]
    said = [[value for _, name, _, value in samples if name == "memory gradients"] for samples in found]
    assert said[0] == said[1] == said[2]
    assert said[0][-1] == model_bytes()


def rows(made: Run) -> list[tuple[str, float, float]]:
    """Returns (name, time, value) of rank 0's samples."""
    found = made.timeline.samples.rows()
    found = found[found.rank == 0]
    return list(zip(map(str, found.name), found.t.tolist(), found.value.tolist(), strict=True))
