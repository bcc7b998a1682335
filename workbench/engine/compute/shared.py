"""Parameters in common: one block of memory that every rank of a host maps, and what it takes to get there and back.

Rank 0 writes a file, all map it, and then its name goes: what is left is memory that ends with the last rank that maps
it, however that ends. No descriptor stays open, and /dev/shm, which is small in containers, is not asked for. Nothing
here knows what a strategy does with it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.engine.control.canonical import all_equal, check_equal
from workbench.engine.wire.collectives import Wire
from workbench.host.placement.canonical import state_hash
from workbench.host.placement.layout import Layout

ALIGNED = 64  # bytes: where in the block a vector may begin


class SharedParameters:
    """One rank's way to the memory in common. All of it is called by all ranks at once, while their steps stand still.

    held: do the parameters lie there now?
    file: where a file lies that all ranks see, by its name
    """

    def __init__(self, layout: Layout, control: Wire | None, file: Callable[[str], Path]) -> None:
        self.layout, self.control, self.file = layout, control, file
        self.held = False
        self._number = 0  # of blocks so far, so that no two have one name

    def enter(self) -> None:
        """The parameters, equal on all ranks, move into one block."""
        layout, control = self.layout, self.control
        if control is None:
            return
        self._number += 1
        path = self.file(f"-{self._number}.shared")
        try:
            if control.rank == 0:
                _write(path, layout.weights)
            check_equal(control, state_hash(layout), "before they are shared the parameters")
            if not path.exists():
                all_equal(control, 0)  # a peer that failed took the file along, and is heard of here
                raise RuntimeError(f"{path}: this rank does not see what rank 0 made; a host's ranks need one disk")
            layout.lie_in(_mapped(path, layout.weights))
            all_equal(control, 0)  # the name goes once all have come
        finally:
            path.unlink(missing_ok=True)
        self.held = True

    def leave(self) -> None:
        """Each rank has parameters of its own again."""
        if not self.held:
            return
        layout = self.layout
        layout.lie_in([w.clone() for w in layout.weights])
        self.held = False
        check_equal(self.control, state_hash(layout), "no longer shared, the parameters")

    def relay(self, lay: Callable[[], None]) -> None:
        """Lays the parameters out anew by `lay`, which takes memory of the rank's own; then they are in common."""
        if not self.held:
            return lay()
        all_equal(self.control, 0)  # nobody changes a value any more
        lay()
        self.enter()


def refused(strategy: Any, size: int, device: str, local: bool) -> str | None:
    """Why `strategy` cannot have its memory in common here, in a sentence that says what would do; or None."""
    name = type(strategy).__name__
    if not strategy.shared or size == 1:
        return None
    if device.startswith("cuda"):
        return (
            f"strategy={name}: ranks share the memory of their host, and the parameters are on {device}; "
            f"take a lab with device='cpu', or DDP"
        )
    if not local:
        return (
            f"strategy={name}: ranks share one memory, which those of several hosts do not have; take a lab on one "
            f"host, or a strategy that sends (AsyncServer, DDP)"
        )
    return None


def _places(weights: list[Tensor]) -> tuple[list[int], int]:
    """Where in the block each vector begins, and how long the block is; in bytes."""
    at, places = 0, []
    for w in weights:
        places.append(at)
        at += -(-w.numel() * w.element_size() // ALIGNED) * ALIGNED
    return places, max(at, ALIGNED)


def _write(path: Path, weights: list[Tensor]) -> None:
    """Makes the block with the values of `weights`, readable by this user only; a full disk is an error here."""
    places, nbytes = _places(weights)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(bytes(nbytes))
        for at, w in zip(places, weights, strict=True):
            file.seek(at)
            file.write(w.detach().view(torch.uint8).numpy().data)


def _mapped(path: Path, weights: list[Tensor]) -> list[Tensor]:
    """Vectors like `weights` in the block at `path`."""
    places, nbytes = _places(weights)
    block = torch.UntypedStorage.from_file(str(path), True, nbytes)
    assert isinstance(block, torch.UntypedStorage)  # torch's annotation leaves that open
    return [torch.empty(0, dtype=w.dtype).set_(block, at // w.element_size(), w.shape, (1,))
            for at, w in zip(places, weights, strict=True)]  # fmt: skip
