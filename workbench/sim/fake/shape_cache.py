"""A shortcut for operations on the meta device: remembers the shapes that each operation returns.

torch computes the shape of `a * b` on the meta device in 60 us, and a thousand ranks need it a million times. The cache
runs an operation once per combination of sizes. Views, lists and other tensor types take torch's path with its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from workbench.host.core.operators import make_operators_once

make_operators_once()
_aten = torch.ops.aten
_MADE = {  # returns a new tensor like its first argument
    _aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor, _aten.maximum.default,
    _aten.minimum.default, _aten.neg.default, _aten.sqrt.default, _aten.abs.default, _aten.sign.default,
}  # fmt: skip
_CHANGED = {  # changes its first argument and returns it
    _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor, _aten.lerp_.Scalar, _aten.lerp_.Tensor,
    _aten.addcmul_.default, _aten.addcdiv_.default, _aten.copy_.default, _aten.sqrt_.default, _aten.neg_.default,
    _aten.zero_.default, _aten.fill_.Scalar,
}  # fmt: skip
_NUMBERS = (int, float)
_PLAIN = (Tensor, nn.Parameter)
SCALAR_TYPES = (int, float, bool)
KEY_TYPES = (str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
VALUE_ARGUMENTS = (
    "Tensor",
    "Optional[Tensor]",
    "number",
    "Optional[number]",
)  # types of arguments that cannot affect a shape
MAX_REMEMBERED = 20_000  # remembered operations, at most
_made: dict[Any, tuple[Any, ...]] = {}  # by operation and argument sizes: each result's shape, strides, dtype
_kinds: dict[Any, tuple[bool, ...] | None] = {}  # by operation: which arguments' numbers can affect a shape


class ShapeCacheMode(TorchDispatchMode):
    """The shortcut for plain operations on plain meta tensors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # otherwise torch loads its compiler, which costs seconds and half of each call

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHANGED:
            if _are_alike(args):
                return args[0]
        elif func in _MADE:
            if _are_alike(args) and args[0].is_contiguous():
                return args[0].new_empty(args[0].shape)
        elif func is _aten.cat.default and len(args) == 1 and (n := _joined_length(args[0])) >= 0:
            return args[0][0].new_empty(n)
        key = _make_operation_key(func, args, kwargs)
        if key is None:
            return func(*args, **(kwargs or {}))
        if (known := _made.get(key)) is None:
            made = func(*args, **(kwargs or {}))
            found = [_describe_result(x, args) for x in (made if type(made) is tuple else (made,))]
            if None in found:
                _kinds[func] = None
            else:
                if len(_made) >= MAX_REMEMBERED:
                    _made.clear()
                _made[key] = tuple(found)
            return made
        if len(known) == 1:
            shape, strides, dtype = known[0]
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        return tuple(torch.empty_strided(shape, strides, dtype=dtype, device="meta") for shape, strides, dtype in known)


def _make_operation_key(func: Any, args: Any, kwargs: Any) -> Any:
    """Returns None if the result cannot be remembered."""
    if func not in _kinds:
        _kinds[func] = _list_telling_arguments(func)
    telling = _kinds[func]
    if telling is None:
        return None
    parts: list[Any] = [func, torch.get_default_dtype()]
    some = False
    for x, tells in zip(args, telling, strict=False):
        kind = type(x)
        if kind in _PLAIN:
            if not x.is_meta:
                return None
            some = True
            parts += (x.shape, x.stride(), x.dtype)
        elif kind in SCALAR_TYPES:
            parts += (kind, x) if tells else (kind,)
        elif kind in KEY_TYPES:
            parts.append(x)
        elif kind in (list, tuple) and all(type(n) is int for n in x):
            parts.append(tuple(x))
        else:
            return None
    if kwargs:
        if any(type(x) not in SCALAR_TYPES and type(x) not in KEY_TYPES for x in kwargs.values()):
            return None
        parts += ((name, type(x), x) for name, x in kwargs.items())
    return tuple(parts) if some else None


def _list_telling_arguments(func: Any) -> tuple[bool, ...] | None:
    """By argument: whether its number can affect a shape. None if some results are not new tensors."""
    schema = func._schema
    fresh = all(each.alias_info is None and str(each.type) == "Tensor" for each in schema.returns)
    if schema.is_mutable or not fresh or not schema.returns:
        return None
    return tuple(str(a.type) not in VALUE_ARGUMENTS for a in schema.arguments)


def _describe_result(made: Any, args: Any) -> tuple[Any, ...] | None:
    """Returns (shape, strides, dtype), or None if they do not describe the result completely."""
    if type(made) is not Tensor or not made.is_meta or made.storage_offset() or made.is_conj() or made.is_neg():
        return None
    found = made.shape, made.stride(), made.dtype
    like = torch.empty_strided(*found[:2], dtype=found[2], device="meta")
    where = made.untyped_storage()
    old = any(type(x) in _PLAIN and x.untyped_storage()._cdata == where._cdata for x in args)
    return found if not old and like.untyped_storage().nbytes() == where.nbytes() else None


def _are_alike(args: Sequence[Any]) -> bool:
    """Whether arguments are floating-point tensors of one shape and dtype, or numbers after the first."""
    first = args[0]
    if type(first) is not Tensor or not first.is_meta or not first.is_floating_point():
        return False
    for x in args[1:]:
        if isinstance(x, Tensor):
            if type(x) is not Tensor or not x.is_meta or x.dtype is not first.dtype or x.shape != first.shape:
                return False
        elif not isinstance(x, _NUMBERS):
            return False
    return True


def _joined_length(parts: Sequence[Tensor]) -> int:
    """Returns -1 unless the parts are vectors of one dtype."""
    dtype, length = parts[0].dtype, 0
    for x in parts:
        if type(x) is not Tensor or not x.is_meta or x.dim() != 1 or x.dtype is not dtype:
            return -1
        length += x.shape[0]
    return length
