"""Sizes only: what is answered where tensors have shapes and no values, so that no algorithm has to ask.

A simulation without values hands an algorithm tensors of torch's meta device. Shapes follow there as anywhere, at some
microseconds for each operation. What does not follow is said once, beside the function that it is about (`outlined`),
or where a number is read out of a tensor (`values_of`). It knows no host.
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
    """Where there are sizes only, `by` answers in the function's place: called alike, it returns the same shapes.

    Whether there are is seen by the first tensor (or bucket, or list of them) among the arguments. `by` says of what
    depends on values how much it is taken to be, or spares torch the arithmetic on shapes that are plain. Either both
    are coroutine functions or neither is.
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
    """`x`, to read numbers from; where there are sizes only, as many times `otherwise`, on the CPU."""
    return x.new_full(x.shape, otherwise, device="cpu") if x.is_meta else x


def each(every: Tensor) -> Tensor:
    """(size, n): what ranks have gathered, to go through row by row; where there are sizes only one row says all."""
    return every[:1] if every.is_meta else every


def sizes_of(x: Tensor) -> Tensor:
    """`x` without its values: for asking what a function would make of it."""
    return x.new_empty(x.shape, device="meta")


def _sizes_only(args: tuple[Any, ...]) -> bool:
    for x in args:
        one = x[0] if isinstance(x, list) and x else x
        found = getattr(one.data if isinstance(one, Bucket) else one, "is_meta", None)
        if found is not None:
            return bool(found)
    return False
