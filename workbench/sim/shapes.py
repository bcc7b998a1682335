"""Arithmetic on sizes, by a short way: what has the shape of its arguments is not worked out anew each time.

torch decides the shape of `a * b` on the meta device in Python, in 60 us; a thousand ranks ask for it a million times.
What is not plain (other shapes, other dtypes, views out of order) goes torch's own way, and so do its errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_aten = torch.ops.aten
_MADE = {  # makes a tensor like its first argument
    _aten.mul.Tensor, _aten.add.Tensor, _aten.sub.Tensor, _aten.div.Tensor, _aten.maximum.default,
    _aten.minimum.default, _aten.neg.default, _aten.sqrt.default, _aten.abs.default, _aten.sign.default,
}  # fmt: skip
_CHANGED = {  # changes its first argument, which it returns
    _aten.add_.Tensor, _aten.sub_.Tensor, _aten.mul_.Tensor, _aten.div_.Tensor, _aten.lerp_.Scalar, _aten.lerp_.Tensor,
    _aten.addcmul_.default, _aten.addcdiv_.default, _aten.copy_.default, _aten.sqrt_.default, _aten.neg_.default,
    _aten.zero_.default, _aten.fill_.Scalar,
}  # fmt: skip
_NUMBERS = (int, float)


class Shapes(TorchDispatchMode):
    """Inside, plain arithmetic on plain tensors of the meta device takes the short way."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch wraps what follows, and loads its compiler for it, which costs seconds and half of each call."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _CHANGED:
            if _alike(args):
                return args[0]
        elif func in _MADE:
            if _alike(args) and args[0].is_contiguous():
                return args[0].new_empty(args[0].shape)
        elif func is _aten.cat.default and len(args) == 1 and (n := _joined(args[0])) >= 0:
            return args[0][0].new_empty(n)
        return func(*args, **(kwargs or {}))


def _alike(args: Sequence[Any]) -> bool:
    """Are they tensors of floating-point numbers, of one shape and dtype, and numbers beside the first?"""
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


def _joined(parts: Sequence[Tensor]) -> int:
    """The length of vectors of one dtype, one after the other; -1 where they are anything else."""
    dtype, length = parts[0].dtype, 0
    for x in parts:
        if type(x) is not Tensor or not x.is_meta or x.dim() != 1 or x.dtype is not dtype:
            return -1
        length += x.shape[0]
    return length
