"""Parameters that are not here: whoever would read one asks for it first, and no layer need know.

While a parameter is absent it has another class, of which torch asks before any of its functions takes it; what tells
only of its size, dtype or gradient is answered without. A parameter that is here costs nothing: its class is its own.
torch's `UninitializedParameter` changes its class in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

# brings the first, which are absent, here, or raises; the others, which are here, are read in the same call
Ask = Callable[[list[nn.Parameter], list[nn.Parameter]], None]
_SAYS = set(  # functions that look at no value
    "size dim numel nelement element_size stride storage_offset is_floating_point is_complex is_contiguous get_device "
    "register_hook register_post_accumulate_grad_hook requires_grad_ zeros_like ones_like empty_like full_like "
    "rand_like randn_like randint_like new_zeros new_ones new_empty new_full new_tensor is_same_size __len__".split()
)
_SHOWS = [getattr(Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")]  # attributes that do
_kinds: dict[type, type] = {}  # by the class of a parameter, that of an absent one


class Absent:
    """The part of an absent parameter's class that asks."""

    was: type
    ask: Ask

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _says(func):
            with unasked():
                return func(*args, **kwargs)
        read = list(_within([args, kwargs]))
        away, here = [p for p in read if isinstance(p, Absent)], [p for p in read if not isinstance(p, Absent)]
        for ask in dict.fromkeys(p.ask for p in away):
            ask([p for p in away if p.ask == ask], here)
        if not any(isinstance(p, Absent) for p in read):
            return func(*args, **kwargs)
        with unasked():  # who asked only wants to know
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        kind = self.was
        self.ask([self], [])  # type: ignore[list-item]
        copied = kind(data_of(self).clone(), self.requires_grad)  # type: ignore
        return memo.setdefault(id(self), copied)

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(self.shape)}, not on this rank"  # type: ignore[attr-defined]


def leave(param: nn.Parameter, ask: Ask) -> None:
    """`param` is absent from now on: `ask` is called with it, and others, before one is read."""
    kind = type(param)
    if not isinstance(param, Absent):
        if kind not in _kinds:
            _kinds[kind] = type(f"Absent{kind.__name__}", (Absent, kind), {"was": kind})
        param.__class__ = _kinds[kind]
    param.ask = ask  # type: ignore[attr-defined]


def come(param: nn.Parameter) -> None:
    """`param` is here again."""
    if isinstance(param, Absent):
        param.__class__ = param.was
        del param.ask


def unasked() -> Any:
    """Within it absent parameters are handled as they lie, and ask nobody."""
    return torch._C.DisableTorchFunctionSubclass()


def data_of(param: nn.Parameter) -> Tensor:
    """Its `data` as it lies."""
    with unasked():
        return param.data


def _says(func: Any) -> bool:
    """Does `func` look at no value?"""
    name = func.__name__
    if name == "__get__":
        return func.__self__ not in _SHOWS
    return name in ("__set__", "__delete__") or name in _SAYS


def _within(x: Any) -> Iterator[nn.Parameter]:
    """The parameters in the arguments of a call, once each and in their order."""
    seen: set[int] = set()
    todo = [x]
    while todo:
        x = todo.pop(0)
        if isinstance(x, nn.Parameter):
            if id(x) not in seen:
                seen.add(id(x))
                yield x
        elif isinstance(x, dict):
            todo[:0] = x.values()
        elif isinstance(x, list | tuple):
            todo[:0] = x
