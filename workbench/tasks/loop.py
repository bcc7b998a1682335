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
    """A notebook's function that trains: it makes model, optimizer and data. It loops over `workbench.steps`.

        def train():
            model = nn.Linear(4, 1)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for epoch in range(3):
                for x, y in workbench.steps(loader, model):
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        lab.run(Experiment(task=Loop(run=train)))

    Each rank calls it once. As in a `Script`, a step ends when the optimizers of all parameters have stepped. The run
    ends with the function. The experiment's `seed` seeds torch's and Python's random numbers on every rank. Put lines
    that need the result of all ranks after a block of `workbench.training`.

    run: () -> None

    When to use it: to keep a loop as it is written; `adopt` supports more if you can give its parts.
    """

    run: Callable[[], Any]

    lr: ClassVar[float] = 0.0
    batch: ClassVar[int] = 0
    has_own_loop: ClassVar[bool] = True
    keeps: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not callable(self.run) and not isinstance(self.run, str):  # a record has only its name
            raise KnobError("run: must be a function () -> None that trains (a record keeps only its name)")
        super().__post_init__()

    @classmethod
    def usual(cls) -> Loop:
        raise KnobError("task='Loop': needs your own function; give Loop(run=train)")

    def refuses(self, batch: int) -> str | None:
        return f"batch={batch}: the loop makes its own batches; set them there" if batch else None

    def build(self) -> Learner:
        raise KnobError(f"task=Loop: {ALONE}")
