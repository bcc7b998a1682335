"""An unchanged training script with its own loop."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from workbench.settings import KnobError, short
from workbench.tasks._base import Learner, TaskBase

ALONE = "its own loop makes the steps, so it runs only on ranks: Lab(4).run(...), or `workbench run`"


@dataclass(frozen=True, kw_only=True)
class Script(TaskBase):
    """An unchanged training script, written for torchrun or with a loop over `workbench.steps`.

        lab.run(Experiment(task=Script(file="train.py", args=("--epochs", "3")), strategy=TorchDDP()))

    Each rank runs it as torchrun would: as `__main__`, with a real process group. The environment has RANK, WORLD_SIZE,
    LOCAL_RANK, MASTER_ADDR and so on. Under TorchDDP its only `DistributedDataParallel` is torch's
    own. Strategies that follow a loop (forward, backward, update) can replace it live. A step ends when the optimizers
    of all its parameters have stepped. The run ends with the script, or after `steps`.

    The script keeps its own data, batches, optimizers, rates and precision. It cannot go back: its runs cannot be
    resumed, resized or rolled back.

    file:   the script's path, on every machine with ranks
    args:   its command-line arguments
    folder: its working directory; "" is that of this process

    When to use it: to watch and steer an existing job.
    """

    file: str
    args: tuple[str, ...] = ()
    folder: str = ""

    lr: ClassVar[float] = 0.0
    batch: ClassVar[int] = 0
    has_own_loop: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.file, str | os.PathLike) or not str(self.file):
            raise KnobError(f"file={short(self.file)}: must be the path of a script, such as 'train.py'")
        if isinstance(self.args, str) or not all(isinstance(a, str) for a in self.args):
            raise KnobError(f"args={short(self.args)}: must be words, such as ('--epochs', '3')")
        object.__setattr__(self, "file", str(self.file))
        object.__setattr__(self, "args", tuple(self.args))
        object.__setattr__(self, "folder", str(self.folder or Path.cwd()))
        super().__post_init__()

    @classmethod
    def usual(cls) -> Script:
        raise KnobError("task='Script': needs a file; give Script(file='train.py')")

    @property
    def path(self) -> Path:
        return Path(self.folder) / self.file

    def refuses(self, batch: int) -> str | None:
        return f"batch={batch}: the script makes its own batches; set them there" if batch else None

    def build(self) -> Learner:
        raise KnobError(f"task=Script(file={self.file!r}): {ALONE}")
