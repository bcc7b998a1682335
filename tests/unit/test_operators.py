"""Checks that threads that first use a torch operator at the same time get the same object."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from torch._ops import OpOverload, OpOverloadPacket

import workbench.host.memory.storage_tracker  # noqa: F401  what the test is about: each dispatch mode of ours imports the lock
from workbench.host.core.operators import make_operators_once

THREADS = 4


def get_in_threads(thing: Any, name: str) -> list[Any]:
    """Returns the attribute as seen by threads that all read it at once."""
    barrier, found = threading.Barrier(THREADS), list[Any]()

    def get() -> None:
        barrier.wait()
        found.append(getattr(thing, name))

    threads = [threading.Thread(target=get) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


@pytest.mark.parametrize("kind", [OpOverloadPacket, OpOverload])
def test_threads_get_one_object_of_an_operator(kind: type, monkeypatch: pytest.MonkeyPatch) -> None:
    make = kind.__init__

    def make_slowly(self: Any, *args: Any, **named: Any) -> None:
        make(self, *args, **named)
        time.sleep(0.05)  # gives the other threads time to make the same object

    name = f"fresh_{kind.__name__.lower()}"
    library = torch.library.Library("workbench_tests", "FRAGMENT")
    try:
        library.define(f"{name}(Tensor x) -> Tensor")
        space = torch.ops.workbench_tests
        packet = getattr(space, name) if kind is OpOverload else None
        monkeypatch.setattr(kind, "__init__", make_slowly)
        found = get_in_threads(packet, "default") if packet is not None else get_in_threads(space, name)
    finally:
        library._destroy()
    assert len(found) == THREADS and len(set(map(id, found))) == 1


def test_the_lock_is_put_on_once() -> None:
    before = OpOverloadPacket.__getattr__
    make_operators_once()
    assert OpOverloadPacket.__getattr__ is before
