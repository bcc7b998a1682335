"""A training script as it is, whose own loop makes the steps."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from workbench.settings import KnobError, short
from workbench.tasks._base import Learner, TaskBase

ALONE = "its own loop makes the steps, and it runs on ranks alone: Lab(4).run(...), or `workbench run`"


@dataclass(frozen=True, kw_only=True)
class Script(TaskBase):
    """A training script, unchanged: one that is written for torchrun, or whose loop goes over `workbench.steps`.

        lab.run(Experiment(task=Script(file="train.py", args=("--epochs", "3")), strategy=TorchDDP()))

    Each rank runs it as torchrun would: as `__main__`, with RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and so on in the
    environment. Its process group is real. Its one `DistributedDataParallel` is torch's own under TorchDDP, and can be
    replaced live by strategies that follow a loop: forward, backward, update. A step ends when the optimizers of all
    its parameters have stepped; the run ends with the script, or after `steps`.

    What is the script's stays the script's: its data, batches, optimizers, rates and precision. It cannot go back,
    so no run is resumed, resized or rolled back.

    file:   the script, on every machine that has ranks
    args:   what follows it on the command line
    folder: where it runs; "" is where this process is

    When to use it: to look at, and to steer, a job that exists.
    """

    file: str
    args: tuple[str, ...] = ()
    folder: str = ""

    lr: ClassVar[float] = 0.0
    batch: ClassVar[int] = 0
    leads: ClassVar[bool] = True
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
        raise KnobError("task='Script': is of a file; give Script(file='train.py')")

    @property
    def path(self) -> Path:
        """The file, from the root of the machine."""
        return Path(self.folder) / self.file

    def refuses(self, batch: int) -> str | None:
        return f"batch={batch}: the script makes its own batches; set them there" if batch else None

    def build(self) -> Learner:
        raise KnobError(f"task=Script(file={self.file!r}): {ALONE}")
