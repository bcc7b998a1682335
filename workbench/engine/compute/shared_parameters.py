"""Shared parameters: one block of memory that every rank of a host maps.

Rank 0 writes a file, all ranks map it, and rank 0 removes the name. However ranks end, the last one frees the memory.
No descriptor stays open. /dev/shm is too small in containers.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workbench.engine.collectives.wire import Wire
from workbench.engine.control.canonical import check_equal, gather_numbers
from workbench.host.placement.canonical_state import hash_model_state
from workbench.host.placement.parameter_layout import ParameterLayout

ALIGN_BYTES = 64  # a vector begins at a multiple


class SharedParameters:
    """One rank's access to the block. All ranks call each method at once, between steps.

    is_shared: whether the parameters are in the block
    file: returns a path by its name; all ranks see it
    """

    def __init__(self, layout: ParameterLayout, control: Wire | None, file: Callable[[str], Path]) -> None:
        self.layout, self.control, self.make_path = layout, control, file
        self.is_shared = False
        self._number = 0  # blocks so far, for unique names

    def share_parameters(self) -> None:
        """Moves the parameters into one block. They must be equal on all ranks."""
        layout, control = self.layout, self.control
        if control is None:
            return
        self._number += 1
        path = self.make_path(f"-{self._number}.shared")
        try:
            if control.rank == 0:
                _write_block(path, layout.weights)
            check_equal(control, hash_model_state(layout), "before they are shared the parameters")
            if not path.exists():
                gather_numbers(control, 0)  # raises here if a peer has failed and removed the file
                raise RuntimeError(
                    f"{path}: this rank does not see the file of rank 0; the ranks of a host need a common disk"
                )
            layout.adopt_vectors(_map_block(path, layout.weights))
            gather_numbers(control, 0)  # all ranks have mapped the file; the name goes
        finally:
            path.unlink(missing_ok=True)
        self.is_shared = True

    def unshare_parameters(self) -> None:
        if not self.is_shared:
            return
        self.take_own_copy()
        check_equal(self.control, hash_model_state(self.layout), "no longer shared, the parameters")

    def take_own_copy(self) -> None:
        """Leaves the block without the other ranks."""
        if self.is_shared:
            self.layout.adopt_vectors([w.clone() for w in self.layout.weights])
            self.is_shared = False

    def share_again(self, lay: Callable[[], None]) -> None:
        """Lays the parameters out by `lay` in the rank's own memory, then shares them again."""
        if not self.is_shared:
            return lay()
        gather_numbers(self.control, 0)  # from here on no rank changes a value
        lay()
        self.share_parameters()


def explain_refusal(strategy: Any, size: int, device: str, local: bool) -> str | None:
    """Returns why `strategy` cannot share its memory here, with an alternative; or None."""
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
            f"strategy={name}: ranks share one memory, and ranks on several hosts cannot; take a lab on one host, or "
            f"a strategy that sends (AsyncServer, DDP)"
        )
    return None


def _find_offsets(weights: list[Tensor]) -> tuple[list[int], int]:
    """Returns each vector's offset, and the block's length, in bytes."""
    at, places = 0, []
    for w in weights:
        places.append(at)
        at += -(-w.numel() * w.element_size() // ALIGN_BYTES) * ALIGN_BYTES
    return places, max(at, ALIGN_BYTES)


def _write_block(path: Path, weights: list[Tensor]) -> None:
    """Writes a file for this user only. A full disk raises an error here."""
    places, nbytes = _find_offsets(weights)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(bytes(nbytes))
        for at, w in zip(places, weights, strict=True):
            file.seek(at)
            file.write(w.detach().view(torch.uint8).numpy().data)


def _map_block(path: Path, weights: list[Tensor]) -> list[Tensor]:
    places, nbytes = _find_offsets(weights)
    block = torch.UntypedStorage.from_file(str(path), True, nbytes)
    assert isinstance(block, torch.UntypedStorage)  # torch's annotation is wider
    return [torch.empty(0, dtype=w.dtype).set_(block, at // w.element_size(), w.shape, (1,))
            for at, w in zip(places, weights, strict=True)]  # fmt: skip
