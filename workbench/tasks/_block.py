"""A loop of your own in a block, at whose end the model is what all ranks have trained together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.settings import KnobError, short
from workbench.tasks._base import TaskError
from workbench.tasks._loops import Led, leads, steps
from workbench.tasks._written import written

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

B = TypeVar("B")


class Block:
    """What `training` gives to its block. `rank` of `ranks` runs it; by itself that is 0 of 1."""

    def __init__(self, model: nn.Module, led: Led | None) -> None:
        self._model, self._led, self._over = model, led, False
        self.rank, self.ranks = led.place if led is not None else (0, 1)

    def steps(self, loader: Iterable[B], accumulate: int = 1) -> Iterator[B]:
        """One pass over `loader`: `workbench.steps(loader, model, accumulate)`."""
        return steps(loader, self._model, accumulate)

    @property
    def changes(self) -> tuple[Any, ...]:
        """The knobs that were set so far, in order, each at the step before which all ranks made it."""
        return tuple(self._led.changes) if self._led is not None else ()

    def model(self) -> nn.Module:
        """The model that was given, trained, once the block is over: the same on all ranks.

        Of replicas that drifted apart it is the mean. Raises TaskError before, and where the block failed.
        """
        if not self._over:
            raise TaskError("model(): is there once the block of workbench.training is over; in it each rank has its "
                            "own, and from outside run.model(into=...) reads that of a live run")  # fmt: skip
        return self._model

    def save_model(self, path: Path | str) -> Path:
        """Writes the state dict of `model()` to `path`, on rank 0 alone: `.safetensors` as that, else as torch does.

        Raises what `model` does, and TaskError where it cannot be written.
        """
        model = self.model()
        return written(path, model.state_dict) if self.rank == 0 else Path(path)

    def __repr__(self) -> str:
        return f"workbench.training({type(self._model).__name__}): rank {self.rank} of {self.ranks}"


@contextmanager
def training(model: nn.Module, *optimizers: Optimizer) -> Iterator[Block]:
    """A loop of your own in a block, which ranks run together: `with training(model, optimizer) as run:`.

        with workbench.training(model, optimizer) as run:
            for epoch in range(3):
                for x, y in run.steps(loader):
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        run.save_model("model.pt")

    In a process by itself it is the loop, and nothing else. Under `workbench run train.py`, or in a `Loop`, `run.steps`
    deals out batches as `workbench.steps` does. The steps end with the block, also where `Experiment(steps=...)` or
    `lab.stop()` ends them earlier. Then `model` is what all ranks have together, and each rank goes on with the lines
    behind the block, by itself. An exception that leaves the block ends the run with it.

    model:      the Module that the loop calls; a run has one, and one block
    optimizers: that step it
    """
    led = leads()
    _check(model, optimizers)
    if led is not None:
        led.enter()
    block = Block(model, led)
    try:
        yield block
    except BaseException as error:
        if led is None or not led.leave(error):
            raise
    else:
        if led is not None:
            led.leave(None)
    block._over = True


def _check(model: Any, optimizers: tuple[Any, ...]) -> None:
    """Raises KnobError for what does not train together."""
    if not callable(getattr(model, "parameters", None)):
        raise KnobError(f"model={short(model)}: must be the Module that the loop calls")
    mine = {id(p) for p in model.parameters()}
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise KnobError(f"optimizer={short(one)}: must be an Optimizer that steps the model")
        if not mine & {id(p) for group in one.param_groups for p in group["params"]}:
            raise KnobError(f"optimizer={type(one).__name__}: has no parameter of the model; make it of "
                            f"model.parameters()")  # fmt: skip
