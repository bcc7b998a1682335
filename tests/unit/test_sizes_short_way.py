"""Tests fast arithmetic on sizes: the same shapes and errors as torch."""

from __future__ import annotations

import pytest
import torch

from workbench.sim.fake.shape_cache import ShapeCacheMode


def test_shapes_dtypes_and_errors_are_torchs() -> None:
    a, b = torch.empty(6, device="meta"), torch.empty(6, device="meta")
    wide, row, count = (torch.empty(n, device="meta", dtype=d)
                        for n, d in ((6, torch.float64), (1, torch.float32), (6, torch.int64)))  # fmt: skip
    ways = [
        lambda: a * b, lambda: a + 0.5, lambda: a - wide, lambda: a / row, lambda: count * 0.5, lambda: count / count,
        lambda: -a.view(2, 3).T, lambda: torch.cat([a, b]), lambda: torch.cat([a, wide]),
        lambda: torch.cat([a.view(2, 3)] * 2, 1), lambda: a.add_(b, alpha=0.5), lambda: a.lerp_(b, 0.1),
        lambda: a.copy_(wide), lambda: a.mul_(row), lambda: 2.0 * a, lambda: torch.maximum(a, b),
    ]  # fmt: skip
    for number, way in enumerate(ways):
        want = way()
        with ShapeCacheMode():
            found = way()
        assert (found.shape, found.dtype, found.is_meta) == (want.shape, want.dtype, True), number
        assert found.stride() == want.stride(), number
        assert (found is a) == (want is a), number
    for wrong in (lambda: a * torch.empty(5, device="meta"), lambda: a.add_(torch.empty(2, 6, device="meta"))):
        with ShapeCacheMode(), pytest.raises(RuntimeError):
            wrong()


def test_results_are_new_tensors_and_inputs_with_values_stay_unchanged() -> None:
    a, x = torch.empty(6, device="meta"), torch.arange(3.0)
    with ShapeCacheMode():
        made = a * 1.0
        assert made.untyped_storage()._cdata != a.untyped_storage()._cdata
        assert (x * 2.0 + x).tolist() == [0.0, 3.0, 6.0] and torch.cat([x, x]).tolist() == [0.0, 1.0, 2.0] * 2
        assert x.add_(1.0).tolist() == [1.0, 2.0, 3.0]


def test_a_cached_result_is_not_used_for_another_operation() -> None:
    a, wide, count = (torch.empty(4, 6, device="meta", dtype=d) for d in (torch.float32, torch.float64, torch.int64))
    few, more = (torch.empty(n, device="meta", dtype=torch.int64) for n in (2, 3))
    ways = [
        lambda: a.index_select(0, few), lambda: a.index_select(0, more), lambda: a.index_select(1, more),
        lambda: a.sum(0), lambda: a.sum(1), lambda: a.T.clone(), lambda: a.clone(), lambda: wide.clone(),
        lambda: count + 1, lambda: count + 1.0, lambda: a > 1, lambda: a.lerp(a, 0.5), lambda: a.topk(2, 1).values,
        lambda: a.topk(3, 1).indices, lambda: a @ a.T, lambda: a.T @ a, lambda: torch.nn.functional.layer_norm(a, (6,)),
    ]  # fmt: skip
    for _ in range(2):  # first from torch, then from the cache
        for number, way in enumerate(ways):
            want = way()
            with ShapeCacheMode():
                found = way()
            assert (found.shape, found.stride(), found.dtype) == (want.shape, want.stride(), want.dtype), number
            assert found.untyped_storage().nbytes() == want.untyped_storage().nbytes(), number
    with ShapeCacheMode():
        assert a.reshape(-1).untyped_storage()._cdata == a.untyped_storage()._cdata, "a view is one every time"
        assert a.clone().untyped_storage()._cdata != a.clone().untyped_storage()._cdata


def test_fake_cpu_tensors_have_torchs_shapes_and_strides() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from workbench.sim.fake.fake_cache import FakeCacheMode

    with FakeTensorMode():
        a, count = torch.empty(4, 6), torch.empty(4, 6, dtype=torch.int64)
    ways = [
        lambda: a.view(6, 4), lambda: a.view(24), lambda: a.T, lambda: a[1:3], lambda: a[2:4], lambda: a.detach(),
        lambda: a.unbind()[1], lambda: a.split(2, 1)[1], lambda: a.reshape(-1), lambda: a.T.reshape(-1), lambda: a * 2,
        lambda: a + count, lambda: count + 1, lambda: count + 1.0, lambda: a @ a.T, lambda: a.float(),
        lambda: count.float(), lambda: a.expand(2, 4, 6), lambda: a.to(torch.float64), lambda: a.clone(),
        lambda: torch.nn.functional.layer_norm(a, (6,)), lambda: a[1].add_(1.0), lambda: a.sum(0), lambda: a.sum(1),
    ]  # fmt: skip
    for _ in range(2):  # first from torch, then from the cache
        for number, way in enumerate(ways):
            want = way()
            with FakeCacheMode():
                found = way()
            for said in ("shape", "dtype", "device", "is_meta"):
                assert getattr(found, said) == getattr(want, said), (number, said)
            assert (found.stride(), found.storage_offset()) == (want.stride(), want.storage_offset()), number
            mine, own = found.untyped_storage(), want.untyped_storage()
            shared = own._cdata == a.untyped_storage()._cdata
            assert (mine._cdata == a.untyped_storage()._cdata, mine.nbytes()) == (shared, own.nbytes()), number
