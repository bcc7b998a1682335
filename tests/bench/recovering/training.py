"""What the processes of the others train, in plain torch, and how each writes down what it did.

Imported by their processes, so nothing of the workbench is. The layers are those of `Digits`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

PACE = 0.05  # seconds of each step beside its arithmetic
SAVES = 20  # steps between two checkpoints

Write = Callable[[str, int, int], None]  # what happened, at which step, in a group of how many


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 384), nn.ReLU(), nn.Linear(384, 10),
    )  # fmt: skip


def begun() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """The model and its optimizer, on one thread."""
    torch.set_num_threads(1)
    model = network()
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def loss(model: nn.Module) -> Tensor:
    """That of a batch of noise, after the pace: what is learned does not matter here."""
    time.sleep(PACE)
    return nn.functional.cross_entropy(model(torch.randn(32, 1, 8, 8)), torch.randint(0, 10, (32,)))


@contextmanager
def writing(folder: Path) -> Iterator[Write]:
    """Into a file named after this process, a line each."""
    with (folder / str(os.getpid())).open("w", buffering=1) as file:
        yield lambda word, step, size: print(time.time(), word, step, size, file=file)


def train(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, size: int, save: Callable[[int], None]
) -> None:
    """Steps without end, from after `step`; one that fails ends the process, as whoever starts it expects."""
    with writing(folder) as write:
        while True:
            try:
                optimizer.zero_grad()
                loss(model).backward()
                optimizer.step()
                step += 1
                write("made", step, size)
                if step % SAVES == 0:
                    save(step)
            except RuntimeError:
                write("failed", step, size)
                raise
