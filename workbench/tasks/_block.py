"""A context manager around a training loop; after it all ranks have the same model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from workbench.settings import KnobError, short
from workbench.tasks._base import TaskError
from workbench.tasks._loops import LedRank, find_led_rank, steps
from workbench.tasks._written import written

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

B = TypeVar("B")


class Block:
    """The object that `training` gives to its block, on rank `rank` of `ranks`. A process alone is rank 0 of 1."""

    def __init__(self, model: nn.Module, led: LedRank | None) -> None:
        self._model, self._led, self._over = model, led, False
        self.rank, self.ranks = led.rank_and_size if led is not None else (0, 1)

    def steps(self, loader: Iterable[B], accumulate: int = 1) -> Iterator[B]:
        """Returns one pass over `loader`: `workbench.steps(loader, model, accumulate)`."""
        return steps(loader, self._model, accumulate)

    @property
    def changes(self) -> tuple[Any, ...]:
        """The knob changes so far in order, each with its first step."""
        return tuple(self._led.changes) if self._led is not None else ()

    def model(self) -> nn.Module:
        """Returns the trained model after the block, the same on all ranks. Drifted replicas are averaged.

        Raises TaskError inside the block and after a block that failed.
        """
        if not self._over:
            raise TaskError("model(): ranks share a result only after the block of workbench.training; inside it each "
                            "rank has its own model; run.model(into=...) reads a live run from outside")  # fmt: skip
        return self._model

    def save_model(self, path: Path | str) -> Path:
        """Writes the state dict of `model()` to `path`, on rank 0 alone.

        The suffix `.safetensors` selects that format, any other suffix torch's. Raises the errors of `model`, and
        TaskError if the file cannot be written.
        """
        model = self.model()
        return written(path, model.state_dict) if self.rank == 0 else Path(path)

    def __repr__(self) -> str:
        return f"workbench.training({type(self._model).__name__}): rank {self.rank} of {self.ranks}"


@contextmanager
def training(model: nn.Module, *optimizers: Optimizer) -> Iterator[Block]:
    """Runs a loop of your own, which ranks run together: `with training(model, optimizer) as run:`.

        with workbench.training(model, optimizer) as run:
            for epoch in range(3):
                for x, y in run.steps(loader):
                    F.mse_loss(model(x), y).backward()
                    optimizer.step()
                    optimizer.zero_grad()
        run.save_model("model.pt")

    In a process alone the loop runs unchanged. Under `workbench run train.py` or in a `Loop`, `run.steps` divides
    batches among ranks as `workbench.steps` does. Training ends with the block, or earlier by `Experiment(steps=...)`
    or `lab.stop()`. Then `model` holds the common result, and each rank runs the lines after the block by itself. An
    exception that leaves the block ends the run.

    model:      the Module that the loop calls. A run has one model and one block
    optimizers: the optimizers that step it
    """
    led = find_led_rank()
    _check(model, optimizers)
    if led is not None:
        led.enter_block()
    block = Block(model, led)
    try:
        yield block
    except BaseException as error:
        if led is None or not led.leave_block(error):
            raise
    else:
        if led is not None:
            led.leave_block(None)
    block._over = True


def _check(model: Any, optimizers: tuple[Any, ...]) -> None:
    """Raises KnobError if the optimizers do not step the model."""
    if not callable(getattr(model, "parameters", None)):
        raise KnobError(f"model={short(model)}: must be the Module that the loop calls")
    mine = {id(p) for p in model.parameters()}
    for one in optimizers:
        if not hasattr(one, "param_groups"):
            raise KnobError(f"optimizer={short(one)}: must be an Optimizer that steps the model")
        if not mine & {id(p) for group in one.param_groups for p in group["params"]}:
            raise KnobError(f"optimizer={type(one).__name__}: has no parameter of the model; make it of "
                            f"model.parameters()")  # fmt: skip
