"""A function that trains, with a loop of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from workbench.settings import KnobError
from workbench.tasks._base import Learner, TaskBase
from workbench.tasks.script import ALONE


@dataclass(frozen=True, kw_only=True)
class Loop(TaskBase):
    """A function of a notebook that trains: it makes model, optimizer and data, and loops over `workbench.steps`.

        def train():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(3):
                for x, y in workbench.steps(loader, model):
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        lab.run(Experiment(task=Loop(run=train)))

    Each rank calls it once. What holds for a `Script` holds here: a step ends when the optimizers of all parameters
    have stepped, and the run ends with the function. Torch's and Python's random numbers begin with the experiment's
    `seed` on every rank. Lines that are to have what all ranks trained stand behind a block of `workbench.training`.

    run: () -> None

    When to use it: where a loop is to stay as it is written; `adopt` can do more with what it is made of.
    """

    run: Callable[[], Any]

    lr: ClassVar[float] = 0.0
    batch: ClassVar[int] = 0
    leads: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.run) and not isinstance(self.run, str):  # a name, read off a record
            raise KnobError("run: must be a function () -> None that trains (a record keeps only its name)")
        super().__post_init__()

    @classmethod
    def usual(cls) -> Loop:
        raise KnobError("task='Loop': is made of your own function; give Loop(run=train)")

    def refuses(self, batch: int) -> str | None:
        return f"batch={batch}: the loop makes its own batches; set them there" if batch else None

    def build(self) -> Learner:
        raise KnobError(f"task=Loop: {ALONE}")
