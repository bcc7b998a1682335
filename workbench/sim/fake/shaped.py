"""Tensors without data, for strategies in simulations with sizes only.

torch takes 2 to 200 us for an operation on its meta device, and a thousand ranks need millions. A `ShapedTensor`
answers in Python. torch runs each operation on given sizes once, which shows the kind of result: new memory, a view of
an argument, an argument or a plain value. So operations need no rules here, and torch's errors stay. If torch needs its
own tensor, it gets `actual_tensor`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from workbench.rank import Bucket
from workbench.sim.fake.tensor_kind import MAX_REMEMBERED, ShapedTensor, find_kind

_CONST, _ARGUMENT, _NEW, _VIEW, _SEVERAL = range(5)  # of results: value, argument, new memory, view, sequence

Known = tuple[Any, ...]


_known: dict[Any, Known] = {}  # by operation, default dtype and arguments


def make_shaped(x: Any) -> Any:
    """Returns a stand-in that shares a plain meta tensor's memory. Returns other objects unchanged."""
    return x if (kind := find_kind(x)) is None else ShapedTensor(kind, None, x)


def shape_bucket(bucket: Bucket) -> Bucket:
    """Replaces the bucket's data in place."""
    bucket.data = make_shaped(bucket.data)
    return bucket


# -- results of operations --


def _compute_result(func: Any, plain: bool, args: tuple[Any, ...], kwargs: Any) -> Any:
    """plain: whether `func` is arithmetic, so that numbers do not affect shapes"""
    try:
        key = (
            func,
            torch.get_default_dtype(),
            *[x.kind if type(x) is ShapedTensor else _argument_key(x, plain) for x in args],
        )
        if kwargs:
            key += tuple([(name, _argument_key(x, plain)) for name, x in kwargs.items()])
        known = _known.get(key)
    except _UnclearArgument:
        return _run_torch(func, args, kwargs)[0]
    if known is None:
        made, found = _run_torch(func, args, kwargs)
        if found is not None and func not in _NEVER:
            if len(_known) >= MAX_REMEMBERED:
                _known.clear()
            _known[key] = found
        return made
    return _rebuild_result(known, args)


def _rebuild_result(known: Known, args: tuple[Any, ...]) -> Any:
    how, what = known[0], known[1]
    if how == _NEW:
        return ShapedTensor(what)
    if how == _ARGUMENT:
        return args[what]
    if how == _VIEW:
        of = args[known[2]]
        return ShapedTensor(what, of.root_tensor if type(of) is ShapedTensor else make_shaped(of))
    if how == _CONST:
        return what
    return what([_rebuild_result(each, args) for each in known[2]])


class _UnclearArgument(Exception):
    """An argument cannot be part of a key."""


def _argument_key(x: Any, plain: bool) -> Any:
    """Raises _UnclearArgument."""
    kind = type(x)
    if kind is ShapedTensor:
        return x.kind
    if kind is float:
        return float
    if kind is int or kind is bool:
        return kind if plain else (kind, x)
    if x is None or x is Ellipsis or kind in (str, torch.dtype, torch.device, torch.layout, torch.memory_format):
        return x
    if kind is slice:
        return slice, _argument_key(x.start, False), _argument_key(x.stop, False), _argument_key(x.step, False)
    if kind in (list, tuple, torch.Size):
        return (kind, *[_argument_key(each, plain) for each in x])
    if isinstance(x, Tensor) and (found := find_kind(x)) is not None:
        return found
    raise _UnclearArgument


def _run_torch(func: Any, args: tuple[Any, ...], kwargs: Any) -> tuple[Any, Known | None]:
    """Returns torch's result, and the form to remember; None: run it every time."""
    stands: dict[int, ShapedTensor] = {}  # by torch's tensor: the ShapedTensor that it replaced
    lies: dict[int, int] = {}  # by storage: the first argument in it
    for at, x in enumerate(args):
        if isinstance(x, Tensor) and x.layout is torch.strided:
            lies.setdefault(_unwrap_shaped(x, stands).untyped_storage()._cdata, at)
    made = func(*_unwrap_shaped(args, stands), **_unwrap_shaped(kwargs or {}, stands))
    if isinstance(made, (list, tuple)) and type(made) is not torch.Size:  # also named tuples, as by `max`
        parts = [_describe_result(x, args, stands, lies) for x in made]
        known = [found for _, found in parts]
        several = (_SEVERAL, type(made), known) if None not in known else None
        return type(made)([x for x, _ in parts]), several
    return _describe_result(made, args, stands, lies)


def _unwrap_shaped(x: Any, stands: dict[int, ShapedTensor]) -> Any:
    kind = type(x)
    if kind is ShapedTensor:
        stands[id(x.actual_tensor)] = x
        return x.actual_tensor
    if kind is list or kind is tuple:
        return kind(_unwrap_shaped(each, stands) for each in x)
    if kind is dict:
        return {name: _unwrap_shaped(each, stands) for name, each in x.items()}
    if kind is slice:
        return slice(*[_unwrap_shaped(each, stands) for each in (x.start, x.stop, x.step)])
    return x


def _describe_result(made: Any, args: tuple[Any, ...], stands: dict[int, ShapedTensor], lies: dict[int, int]
           ) -> tuple[Any, Known | None]:  # fmt: skip
    """Returns a result for the caller, and the form to remember."""
    if not isinstance(made, Tensor):
        plain = made is None or type(made) in (bool, int, float, str, torch.dtype, torch.device, torch.Size)
        return made, (_CONST, made) if plain else None
    if id(made) in stands:
        made = stands[id(made)]
    for at, x in enumerate(args):
        if x is made:
            return made, (_ARGUMENT, at)
    if type(made) is ShapedTensor or (kind := find_kind(made)) is None:
        return made, None
    at = lies.get(made.untyped_storage()._cdata, -1)
    if at >= 0:
        of = args[at] if type(args[at]) is ShapedTensor else make_shaped(args[at])
        return ShapedTensor(kind, of.root_tensor), (_VIEW, kind, at)
    for of in stands.values():  # a view of a tensor in a list
        if of.actual_tensor.untyped_storage()._cdata == made.untyped_storage()._cdata:
            return ShapedTensor(kind, of.root_tensor), None
    whole = made.storage_offset() == 0 and made.untyped_storage().nbytes() == kind.nbytes
    return ShapedTensor(kind, None, made), (_NEW, kind) if whole else None


# -- every method and attribute of torch's tensors --

_OPERATORS = ("add", "sub", "mul", "truediv", "pow", "eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = (
    "add", "sub", "mul", "div", "true_divide", "pow", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "clamp",
    "clamp_min", "clamp_max", "eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "sign", "sqrt", "square", "exp", "log",
    "round", "floor", "ceil", "fill", "copy", "zero", "where",
)  # fmt: skip
_NAMES = {*_ARITHMETIC, *(f"{name}_" for name in _ARITHMETIC), *(f"__{w}{name}__" for name in _OPERATORS
                                                                 for w in ("", "r", "i"))}  # fmt: skip
_PLAIN = {found for where in (Tensor, torch) for name in _NAMES if (found := getattr(where, name, None)) is not None}
_VALUES = ("data_ptr", "storage", "is_set_to", "__reduce_ex__", "__array__", "requires_grad_", "set_", "resize_")
_NEVER = {getattr(Tensor, name) for name in _VALUES}  # their results depend on more than sizes
_OWN = {"__class__", "__dict__", "__doc__", "__module__", "__weakref__", "__new__", "__init__", "__init_subclass__",
        "__getattribute__", "__setattr__", "__delattr__", "__subclasshook__", "__dir__", "__sizeof__",
        "__torch_dispatch__", "__torch_function__", "__hash__", "__getstate__", "__reduce__", "__slots__"}  # fmt: skip


def _make_shaped_method(func: Callable[..., Any], plain: bool) -> Callable[..., Any]:
    def asked(self: ShapedTensor, *args: Any, **kwargs: Any) -> Any:
        return _compute_result(func, plain, (self, *args), kwargs)

    return asked


def _make_shaped_property(name: str) -> property:
    """The property takes the shortcut if sizes determine the attribute, otherwise torch's tensor."""

    def views(x: Any) -> Any:
        return getattr(x, name)

    if name in ("data", "T", "mT", "H", "mH", "real", "imag"):
        return property(lambda self: _compute_result(views, False, (self,), None))
    return property(lambda self: getattr(self.actual_tensor, name))


def _fill_class(names: Iterable[str]) -> None:
    for name in names:
        if name not in _OWN and name not in vars(ShapedTensor):
            found = getattr(Tensor, name)
            setattr(
                ShapedTensor,
                name,
                _make_shaped_method(found, name in _NAMES) if callable(found) else _make_shaped_property(name),
            )


def _torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return _compute_result(func, func in _PLAIN, args, kwargs)


_fill_class(dir(Tensor))
setattr(ShapedTensor, "__torch_function__", classmethod(_torch_function))  # noqa: B010 (mypy knows it as a method)
