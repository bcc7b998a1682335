"""The shortcut of `shape_cache.py` for torch's FakeTensors on a CPU.

torch recomputes a result at each call in 60 to 400 us. A plan needs 100,000 results. This cache also remembers views,
because shared storage decides how much memory a backward keeps.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.sim.fake.shape_cache import KEY_TYPES, MAX_REMEMBERED, SCALAR_TYPES, VALUE_ARGUMENTS

_CPU = torch.device("cpu")
_DEVICE = torch.ops.prim.device.default
_TENSORS = ("Tensor", "List[Tensor]")
_NEW, _VIEW, _SELF = 0, 1, 2  # new storage; the first argument's storage; the first argument itself
_made: dict[Any, tuple[type | None, list[tuple[Any, ...]]]] = {}  # by operation and sizes: (sequence type, results)
_never: set[Any] = set()  # with other results


class FakeCacheMode(TorchDispatchMode):
    """torch computes results on plain CPU FakeTensors once per combination of sizes."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `ShapeCacheMode`

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor and not args[0].fake_mode.in_kernel_invocation:
            return args[0].fake_device
        key = _make_operation_key(func, args, kwargs) if types and func not in _never else None
        if key is None:
            return func(*args, **(kwargs or {}))
        if (known := _made.get(key)) is None:
            made = func(*args, **(kwargs or {}))
            if (found := _describe_result(made, args)) is None:
                _never.add(func)
            else:
                if len(_made) >= MAX_REMEMBERED:
                    _made.clear()
                _made[key] = found
            return made
        kind, parts = known
        every = [_rebuild_result(part, args[0]) for part in parts]
        return every[0] if kind is None else kind(every)


def _make_operation_key(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns None if the operation changes an argument, or an argument is not plain."""
    telling = _list_telling_arguments(func)
    if telling is None or not args or type(args[0]) is not FakeTensor:
        return None
    parts: list[Any] = [func, torch.get_default_dtype()]
    for x, says in zip(args, telling, strict=False):
        kind = type(x)
        if kind is FakeTensor:
            if x.constant is not None or x.fake_device != _CPU or x.layout is not torch.strided:
                return None
            parts += (x.shape, x.stride(), x.storage_offset(), x.dtype)
        elif kind in SCALAR_TYPES:
            parts += (kind, x) if says else (kind,)
        elif kind in KEY_TYPES:
            parts.append(x)
        elif kind in (list, tuple) and all(type(n) is int for n in x):
            parts.append(tuple(x))
        else:
            return None
    for name, x in (kwargs or {}).items():
        if type(x) not in SCALAR_TYPES and type(x) not in KEY_TYPES:
            return None
        parts += (name, type(x), x)
    return tuple(parts)


@cache
def _list_telling_arguments(func: Any) -> tuple[bool, ...] | None:
    """By argument: whether its number can affect a shape. None for operations with other results or effects."""
    schema = func._schema
    if schema.is_mutable or not schema.returns or any(str(x.type) not in _TENSORS for x in schema.returns):
        return None
    return tuple(str(a.type) not in VALUE_ARGUMENTS for a in schema.arguments)


def _describe_result(made: Any, args: Any) -> tuple[type | None, list[tuple[Any, ...]]] | None:
    """Returns None if the description would be incomplete."""
    kind, others = (
        type(made) if type(made) in (list, tuple) else None,
        {_storage_id(x) for x in args[1:] if _is_fake(x)},
    )
    found = list[tuple[Any, ...]]()
    for x in (made,) if kind is None else made:
        if x is args[0]:
            found.append((_SELF,))
            continue
        if not _is_fake(x) or x.constant is not None or x.layout is not torch.strided or x.requires_grad:
            return None
        how = _VIEW if _storage_id(x) == _storage_id(args[0]) else _NEW
        found.append((how, x.shape, x.stride(), x.storage_offset(), x.dtype))
        like = _rebuild_result(found[-1], args[0])
        same = torch._C._dispatch_key_set(like) == torch._C._dispatch_key_set(x) and x.fake_device == _CPU
        if not same or like.untyped_storage().nbytes() != x.untyped_storage().nbytes():
            return None
        if how == _NEW and (_storage_id(x) in others or x.storage_offset()):
            return None
        if how == _NEW:
            others.add(_storage_id(x))
    return (kind, found) if found else None


def _is_fake(x: Any) -> bool:
    return type(x) is FakeTensor


def _storage_id(x: Tensor) -> int:
    return x.untyped_storage()._cdata


def _rebuild_result(found: tuple[Any, ...], first: Any) -> Tensor:
    if found[0] == _SELF:
        return first
    how, shape, strides, offset, dtype = found
    mode = first.fake_mode
    with in_kernel_invocation_manager(mode):
        made = torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        if how == _VIEW:
            made.set_(first.untyped_storage(), offset, shape, strides)
    return FakeTensor(mode, made, _CPU)
