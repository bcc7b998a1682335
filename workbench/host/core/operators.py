"""Lets one thread at a time make the Python object of a torch operator.

[Note: Operators made twice] torch makes an operator's object when a dispatch mode first sees it, and puts it into
`torch.ops`. C++ keeps a pointer, but no reference. If two threads make the object at once, Python frees the first. A
later call then reads freed memory. torch 2.13 shows errors such as "'Tickets' object has no attribute '__qualname__'"
and crashes in malloc.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

from torch._ops import OpOverloadPacket, _OpNamespace

_LOCK = threading.RLock()


def make_operators_once() -> None:
    """Locks both of torch's places that make such an object. A second call does nothing."""
    for kind in (_OpNamespace, OpOverloadPacket):
        if not hasattr(kind.__getattr__, "__wrapped__"):
            kind.__getattr__ = _guard_maker(kind.__getattr__)  # type: ignore[method-assign]


def _guard_maker(make: Callable[[Any, str], object]) -> Callable[[Any, str], Any]:
    @wraps(make)
    def find_or_make(space: Any, name: str) -> Any:
        with _LOCK:
            if name in space.__dict__:  # by another thread
                return space.__dict__[name]
            return make(space, name)

    return find_or_make
