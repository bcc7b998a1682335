"""Parameters that are not on this rank. Each fetches itself before it is read, so no layer needs to know.

An absent parameter has another class, whose `__torch_function__` runs before any torch function reads it, as with
torch's `UninitializedParameter`. A present parameter costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

# (absent, present parameters of one call): fetches the absent ones, or raises
Ask = Callable[[list[nn.Parameter], list[nn.Parameter]], None]
_SAYS = set(  # functions that read no values
    "size dim numel nelement element_size stride storage_offset is_floating_point is_complex is_contiguous get_device "
    "register_hook register_post_accumulate_grad_hook requires_grad_ zeros_like ones_like empty_like full_like "
    "rand_like randn_like randint_like new_zeros new_ones new_empty new_full new_tensor is_same_size __len__".split()
)
_SHOWS = [getattr(Tensor, name) for name in ("data", "T", "mT", "H", "mH", "real", "imag")]  # these read values
_DATA: Any = Tensor.data
_kinds: dict[type, type] = {}  # by a parameter's class, an absent one's


class UnmaterializedParameter:
    """The mixin of an absent parameter's class."""

    was: type
    ask: Ask

    @classmethod
    def __torch_function__(cls, func: Callable[..., object], types: Collection[type], args: tuple[Any, ...] = (),
                           kwargs: dict[str, Any] | None = None) -> Any:  # fmt: skip
        kwargs = kwargs or {}
        if _reads_no_values(func):
            with prevent_fetches():
                return func(*args, **kwargs)
        read = list(_find_parameters([args, kwargs]))
        away, here = (
            [p for p in read if isinstance(p, UnmaterializedParameter)],
            [p for p in read if not isinstance(p, UnmaterializedParameter)],
        )
        for ask in dict.fromkeys(p.ask for p in away):
            ask([p for p in away if p.ask == ask], here)
        if not any(isinstance(p, UnmaterializedParameter) for p in read):
            return func(*args, **kwargs)
        with prevent_fetches():  # `ask` only listens
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> Any:
        kind = self.was
        self.ask([self], [])  # type: ignore[list-item]
        copied = kind(read_data(self).clone(), self.requires_grad)  # type: ignore
        return memo.setdefault(id(self), copied)

    def __repr__(self) -> str:
        return f"Parameter of shape {tuple(self.shape)}, not on this rank"  # type: ignore[attr-defined]


def make_absent(param: nn.Parameter, ask: Ask) -> None:
    """Makes `param` absent: a read of it first calls `ask`."""
    kind = type(param)
    if not isinstance(param, UnmaterializedParameter):
        if kind not in _kinds:
            _kinds[kind] = type(f"Absent{kind.__name__}", (UnmaterializedParameter, kind), {"was": kind})
        param.__class__ = _kinds[kind]
    param.ask = ask  # type: ignore[attr-defined]


def make_present(param: nn.Parameter) -> None:
    """Makes `param` present again."""
    if isinstance(param, UnmaterializedParameter):
        param.__class__ = param.was
        del param.ask


def prevent_fetches() -> AbstractContextManager[None]:
    """Inside, absent parameters are used without a fetch."""
    return torch._C.DisableTorchFunctionSubclass()


def read_data(param: nn.Parameter) -> Tensor:
    """Returns `data` without a fetch."""
    with prevent_fetches():
        return param.data


def _reads_no_values(func: Callable[..., object]) -> bool:
    name = func.__name__
    if name == "__get__":
        return getattr(func, "__self__", None) not in _SHOWS
    if name == "__set__":  # new data goes into the whole parameter
        return getattr(func, "__self__", None) is not _DATA
    return name == "__delete__" or name in _SAYS


def _find_parameters(x: object) -> Iterator[nn.Parameter]:
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
