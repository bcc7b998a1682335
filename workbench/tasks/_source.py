"""The text that ByteGPT reads: the standard library of the running Python, by file."""

from __future__ import annotations

import os
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from workbench.tasks._base import TaskError

ENOUGH = 4_000_000  # bytes
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "__pycache__"}
EVERY = 10  # one file in this many is held out


def source(held_out: bool) -> Tensor:
    """Returns the training or held-out text: `(n,)` uint8, read once."""
    return _read(held_out)[0]


def ends(held_out: bool) -> Tensor:
    """Returns each file's end in that text: `(files,)` int64, rising."""
    return _read(held_out)[1]


@cache
def _read(held_out: bool) -> tuple[Tensor, Tensor]:
    text, stops = bytearray(), []
    for number, path in enumerate(_files()):
        if (number % EVERY == EVERY - 1) == held_out:
            text += path.read_bytes()
            stops.append(len(text))
        if len(text) >= (ENOUGH // EVERY if held_out else ENOUGH):
            break
    if len(text) < 100_000:
        raise TaskError(
            f"ByteGPT reads the standard library's .py files, and {sysconfig.get_path('stdlib')} has too few. "
            "Take task=Digits or a Python with its sources"
        )
    return torch.frombuffer(text, dtype=torch.uint8), torch.tensor(stops)


@cache
def _files() -> tuple[Path, ...]:
    """Returns the library's modules by name, equal on all machines with the same Python."""
    found: list[Path] = []
    for folder, inside, names in os.walk(sysconfig.get_path("stdlib")):
        inside[:] = sorted(set(inside) - SKIPPED)
        found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return tuple(found)
