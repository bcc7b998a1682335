"""The plain torch training of the other systems' processes, and their logs.

Those processes import this module, so it imports nothing of the workbench. The layers are those of `Digits`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

PACE = 0.05  # seconds of each step in addition to its arithmetic
SAVES = 20  # steps between two checkpoints

Write = Callable[[str, int, int], None]  # event, step, size of the group


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1024, 384), nn.ReLU(), nn.Linear(384, 10),
    )  # fmt: skip


def begun() -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Returns the model and its optimizer, on one thread."""
    torch.set_num_threads(1)
    model = network()
    return model, torch.optim.Adam(model.parameters(), 1e-3)


def loss(model: nn.Module) -> Tensor:
    """Returns the loss of a batch of noise after the pace; learning does not matter here."""
    time.sleep(PACE)
    return nn.functional.cross_entropy(model(torch.randn(32, 1, 8, 8)), torch.randint(0, 10, (32,)))


@contextmanager
def writing(folder: Path) -> Iterator[Write]:
    """Writes lines into a file named after this process."""
    with (folder / str(os.getpid())).open("w", buffering=1) as file:
        yield lambda word, step, size: print(time.time(), word, step, size, file=file)


def train(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int, size: int, save: Callable[[int], None]
) -> None:
    """Makes steps for ever from `step` on. A failed step ends the process, as its launcher expects."""
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
