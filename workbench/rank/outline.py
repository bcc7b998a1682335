"""Helpers for tensors that have shapes and no values.

A simulation without values runs algorithms on tensors of torch's meta device. Shapes follow from the operations, at
some microseconds each. A function whose result depends on values needs `outlined`; code that reads numbers needs
`values_of`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from workbench.rank.bucket import Bucket

if TYPE_CHECKING:
    from torch import Tensor

F = TypeVar("F", bound=Callable[..., Any])


def outlined(by: Callable[..., Any]) -> Callable[[F], F]:
    """Makes `by` replace the decorated function when tensors have sizes only. It returns the same shapes.

    The first tensor (or bucket, or list of them) among the arguments decides. `by` assumes a size that depends on
    values, or saves torch the arithmetic on simple shapes. Both must be coroutine functions or neither.
    """

    def either(function: F) -> F:
        @wraps(function)
        def answered(*args: Any, **more: Any) -> Any:
            return (by if _sizes_only(args) else function)(*args, **more)

        @wraps(function)
        async def awaited(*args: Any, **more: Any) -> Any:
            return await answered(*args, **more)

        return cast(F, awaited if inspect.iscoroutinefunction(function) else answered)

    return either


def values_of(x: Tensor, otherwise: float) -> Tensor:
    """Returns `x` to read numbers from. With sizes only it is a CPU tensor filled with `otherwise`."""
    return x.new_full(x.shape, otherwise, device="cpu") if x.is_meta else x


def each(every: Tensor) -> Tensor:
    """Returns the gathered rows `(size, n)` to loop over. With sizes only, 1 row represents all."""
    return every[:1] if every.is_meta else every


def sizes_of(x: Tensor) -> Tensor:
    """Returns `x` without its values, to find a result's shape."""
    return x.new_empty(x.shape, device="meta")


def _sizes_only(args: tuple[Any, ...]) -> bool:
    for x in args:
        one = x[0] if isinstance(x, list) and x else x
        found = getattr(one.data if isinstance(one, Bucket) else one, "is_meta", None)
        if found is not None:
            return bool(found)
    return False
