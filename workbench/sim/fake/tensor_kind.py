"""`ShapedTensor`, a tensor without data, and `TensorKind`, its shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import torch
from torch import Tensor


class TensorKind:
    """The properties of a `ShapedTensor` except its memory. Equal tensors share one object."""

    __slots__ = ("dtype", "nbytes", "numel", "offset", "shape", "strides", "width")

    def __init__(self, shape: torch.Size, strides: tuple[int, ...], offset: int, dtype: torch.dtype) -> None:
        self.shape, self.strides, self.offset, self.dtype = shape, strides, offset, dtype
        self.numel, self.width = shape.numel(), dtype.itemsize
        reach = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) if self.numel else 0
        self.nbytes = reach * self.width  # of the memory of a tensor that is not a view


MAX_REMEMBERED = 50_000  # kinds, and operations on them
_kinds: dict[Any, TensorKind] = {}


def find_kind(x: Any) -> TensorKind | None:
    """Returns a torch tensor's TensorKind, or None if none describes it."""
    if type(x) is not Tensor or not x.is_meta or x.requires_grad or x.layout is not torch.strided:
        return None
    if x.is_conj() or x.is_neg():
        return None
    return _remember_kind(x.shape, x.stride(), x.storage_offset(), x.dtype)


def _remember_kind(*told: Any) -> TensorKind:
    found = _kinds.get(told)
    if found is None:
        if len(_kinds) >= MAX_REMEMBERED:
            _kinds.clear()
        found = _kinds[told] = TensorKind(*told)
    return found


class ShapedStorage:
    """The storage of a `ShapedTensor`, like torch's: an identity and a size in bytes."""

    __slots__ = ("__weakref__", "_cdata", "_nbytes")
    _numbers = count(1)

    def __init__(self, nbytes: int) -> None:
        self._cdata, self._nbytes = -next(self._numbers), nbytes  # negative: no address of a torch storage

    def nbytes(self) -> int:
        return self._nbytes


_NOTHING = torch.empty(0, device="meta")


class ShapedTensor(Tensor):
    """Stands for a tensor of the meta device.

    It is an empty torch tensor, because torch's C code reads the memory of every instance of Tensor.
    """

    __slots__ = ("_actual", "_room", "base", "kind")

    is_meta = True
    is_cuda = is_cpu = is_sparse = is_quantized = requires_grad = False
    is_leaf = True
    grad = grad_fn = None
    device = torch.device("meta")
    layout = torch.strided

    def __new__(cls, kind: TensorKind, base: ShapedTensor | None = None, actual: Tensor | None = None) -> ShapedTensor:
        return Tensor._make_subclass(cls, _NOTHING)

    def __init__(self, kind: TensorKind, base: ShapedTensor | None = None, actual: Tensor | None = None) -> None:
        """base: the tensor with the memory that this one views; actual: the torch tensor that it stands for"""
        self.kind, self.base, self._actual = kind, base, actual
        self._room: Any = None

    @property
    def actual_tensor(self) -> Tensor:
        """The torch tensor that it stands for, always the same object."""
        if self._actual is None:
            kind, dtype = self.kind, self.kind.dtype
            if self.base is None:
                self._actual = torch.empty_strided(kind.shape, kind.strides, dtype=dtype, device="meta")
            else:
                where = self.base.actual_tensor.untyped_storage()
                self._actual = torch.empty(0, dtype=dtype, device="meta")
                self._actual.set_(where, kind.offset, kind.shape, kind.strides)
        return self._actual

    def untyped_storage(self) -> Any:
        if self.base is not None:
            return self.base.untyped_storage()
        if self._room is None:
            at = self._actual
            self._room = ShapedStorage(self.kind.nbytes) if at is None else at.untyped_storage()
        return self._room

    # -- frequent attributes and methods --

    shape = property(lambda self: self.kind.shape)
    dtype = property(lambda self: self.kind.dtype)
    ndim = property(lambda self: len(self.kind.shape))
    itemsize = property(lambda self: self.kind.width)
    nbytes = property(lambda self: self.kind.numel * self.kind.width)

    def numel(self) -> int:
        return self.kind.numel

    nelement = numel

    def element_size(self) -> int:
        return self.kind.width

    def dim(self) -> int:
        return len(self.kind.shape)

    def __len__(self) -> int:
        return self.kind.shape[0] if self.kind.shape else len(self.actual_tensor)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.unbind(0)) if self.kind.shape else iter(self.actual_tensor)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShapedTensor:
        memo[id(self)] = made = ShapedTensor(self.kind, None, None if self.base is None else self.actual_tensor.clone())
        return made

    __hash__ = object.__hash__

    def __repr__(self) -> str:  # type: ignore[override]
        return repr(self.actual_tensor)

    @property
    def root_tensor(self) -> ShapedTensor:
        """The tensor that owns the memory."""
        return self if self.base is None else self.base
