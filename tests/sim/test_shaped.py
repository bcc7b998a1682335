"""Checks that the stand-ins for tensors in a simulation without values match torch's meta device exactly."""

from __future__ import annotations

import weakref
from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import make_fitting, shipped
from tests.sim.virtual import same
from workbench import simulate
from workbench.compressors import Compressor
from workbench.experiment import Experiment
from workbench.fabric import Fabric, Link, Noisy
from workbench.optimizers import SGD
from workbench.rank import Rank
from workbench.settings import Change
from workbench.sim.fake import shaped, tensor_kind
from workbench.sim.fake.tensor_kind import ShapedTensor
from workbench.strategies import DDP, LocalSGD, Strategy
from workbench.tasks import ByteGPT

E = Experiment(task=ByteGPT(layers=1), ranks=4, steps=5, pace=60.0, bucket_mb=0.2,
               fabric=Fabric(link=Link(bandwidth=2000.0), host=2.0, disk=0.5, faults=(Noisy(spread=0.2),)))  # fmt: skip


def vector(n: int) -> Any:
    return shaped.make_shaped(torch.empty(n, device="meta"))


def both(e: Experiment, monkeypatch: pytest.MonkeyPatch, *changes: Change) -> None:
    """Simulates twice, the second time with torch's own tensors, and compares."""
    quick = simulate(e, changes=changes)
    with monkeypatch.context() as patch:
        patch.setattr(shaped, "find_kind", lambda x: None)
        assert same(quick, simulate(e, changes=changes))


def simulated(cls: type[Strategy]) -> bool:
    """Whether the simulator has the strategy: not torch's own, and no tables, which ByteGPT lacks."""
    return not cls.opaque and not cls().tables


@pytest.mark.ranks
@pytest.mark.parametrize("name", [name for name, cls in shipped(Strategy).items() if simulated(cls)])
def test_a_strategy_does_the_same_with_stand_ins_for_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    both(replace(E, strategy=make_fitting(shipped(Strategy)[name], E.ranks)), monkeypatch)


@pytest.mark.ranks
def test_two_strategies_in_turn_do_the_same_with_stand_ins_for_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    both(E, monkeypatch, Change(2, "strategy", LocalSGD(every=2)), Change(4, "strategy", DDP()))


@pytest.mark.ranks
@pytest.mark.parametrize("name", shipped(Compressor))
def test_a_compressor_does_the_same_with_stand_ins_for_tensors(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    e = replace(E, compressor=shipped(Compressor)[name].usual(), measure_every=2)
    e = replace(e, optimizer=SGD(momentum=0.9)) if name == "DGC" else e
    both(e, monkeypatch, Change(2, "bucket_mb", 0.5))


def test_in_place_operations_return_the_same_tensor_object() -> None:
    x, y = vector(6), vector(6)
    assert x.add_(y) is x and x.mul_(2) is x and torch.maximum(x, y, out=x) is x
    torchs = torch.empty(6, device="meta")
    assert torchs.copy_(x) is torchs


def test_a_view_shares_its_tensors_storage_and_a_result_does_not() -> None:
    for _ in range(2):  # first torch answers, then the cache
        x = vector(6)
        lies = x.untyped_storage()._cdata
        views = x[2:], x.view(2, 3)[1], *x.chunk(2), x.detach(), x.data, x.reshape(3, 2).T
        assert {v.untyped_storage()._cdata for v in views} == {lies}
        assert {m.untyped_storage()._cdata == lies for m in (x + 1, x.clone(), x[2:] * 2, torch.cat([x, x]))} == {False}
        assert (x + 1).untyped_storage().nbytes() == 24 and x[2:].actual_tensor.storage_offset() == 2


def test_two_storages_at_once_have_different_identities() -> None:
    """A storage may outlive its tensor, and another tensor may get the address of that tensor."""
    storages = [(vector(3) + 1).untyped_storage() for _ in range(50)]
    assert len({storage._cdata for storage in storages}) == 50


def test_the_storage_of_a_stand_in_is_freed_with_it() -> None:
    x = vector(6) + 1
    where = weakref.ref(x.untyped_storage())
    view = x[2:]
    del x
    assert where() is not None and view.untyped_storage().nbytes() == 24
    del view
    assert where() is None


@pytest.mark.parametrize(
    "asked",
    [lambda x: x.sum(1), lambda x: x > 0.5, lambda x: x.double() * 2, lambda x: 3 / x, lambda x: x**2,
     lambda x: x[:, None], lambda x: x[..., 1:2], lambda x: x.mT @ x, lambda x: x.topk(2).indices,
     lambda x: torch.stack([x, x], 1), lambda x: x.to(torch.int8), lambda x: x.max(1).values, lambda x: x.split([1, 2]),
     lambda x: torch.where(x > 0, x, 0), lambda x: x.expand(4, 3, 5), lambda x: torch.empty_like(x)],
)  # fmt: skip
def test_a_stand_in_answers_like_torchs_meta_tensor(asked: Any) -> None:
    torchs = torch.empty(3, 5, device="meta")
    for _ in range(2):
        mine, its = asked(shaped.make_shaped(torchs)), asked(torchs)
        for one, other in zip(*([x] if not isinstance(x, tuple) else x for x in (mine, its)), strict=True):
            if isinstance(other, Tensor):
                assert isinstance(one, Tensor) and type(one) is ShapedTensor
                assert (one.shape, one.dtype, one.stride()) == (other.shape, other.dtype, other.stride())


@pytest.mark.parametrize("asked", [lambda x: x.item(), lambda x: bool(x.sum() > 0), lambda x: x.view(4),
                                   lambda x: x[7:] + x, lambda x: x.index_select(2, x)])  # fmt: skip
def test_a_stand_in_raises_torchs_own_errors(asked: Any) -> None:
    said = []
    for x in (vector(6), torch.empty(6, device="meta")):
        with pytest.raises((RuntimeError, IndexError)) as caught:
            asked(x)
        said.append(f"{type(caught.value)}{caught.value}")
    assert said[0] == said[1]


def test_it_follows_a_default_dtype_that_changes_in_a_simulation() -> None:
    counts = shaped.make_shaped(torch.empty(3, dtype=torch.int64, device="meta"))
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float32, torch.float64, torch.float32):
            torch.set_default_dtype(dtype)
            assert (counts / 2).dtype is dtype
    finally:
        torch.set_default_dtype(before)


def test_one_simulation_remembers_a_bounded_number_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    for where, remembered in ((shaped, "_known"), (tensor_kind, "_kinds")):
        monkeypatch.setattr(where, "MAX_REMEMBERED", 20)
        monkeypatch.setattr(where, remembered, {})
    for _, n in product(range(2), range(100)):
        assert (vector(200)[n:] + 1).shape == (200 - n,)
        assert len(shaped._known) <= 20 and len(tensor_kind._kinds) <= 20


class Unbound(DDP):
    """A strategy that calls torch's class and its C functions; some functions read tensor memory."""

    async def step(self, rank: Rank, state: Any) -> Any:
        data = [bucket.data for bucket in await rank.params()]
        assert max(map(Tensor.numel, data)) == max(torch.where(x > 0, x, torch.nan).numel() for x in data)
        return await super().step(rank, state)


def test_a_stand_in_works_in_torchs_c_code(monkeypatch: pytest.MonkeyPatch) -> None:
    both(replace(E, strategy=Unbound()), monkeypatch)
    assert issubclass(type(vector(3)), Tensor), "not by what it says of itself: C reads a tensor's memory then"
