"""The task family: a model and its data as a few functions, independent of ranks and records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.settings import Family

EPOCHS = 1_000_000  # skippable by `used`: 15 s for 1,797 examples

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from workbench.tasks._split import Plan


class TaskError(RuntimeError):
    """A task that cannot be trained. On real ranks it arrives as a RankError.

    What to do: correct the function that the message names, by the remedy that it gives.
    """


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A task's functions for the engine.

    model:      `() -> Module`, the same on every rank. The engine seeds torch before it, and compares ranks
    data:       `(rank, ranks, batch, seed)` -> an endless iterable of batches, each of `batch` examples. With
                `indexed` it also takes `used`
    loss:       `(model, batch)` -> scalar Tensor
    optimizer:  `(params, lr) -> Optimizer`; lr = 0 keeps its own rates
    evaluate:   `(model)` -> held-out loss as a float, or a dict of floats with "loss". None: no evaluation
    parts:      `(model)` -> Modules that hold the model's parameters and compute it in sequence. None: only a
                Sequential or a decoder of transformers can be cut
    split:      `(model)` -> `{module name: Colwise() or Rowwise()}`: the tensor-parallel plan. None: the model's own
                `_tp_plan`, or a Sequential's layers. A sub-model can leave out features between a Colwise() and a
                Rowwise() Linear
    lookups:    `(batch)` -> {name of an embedding's weight: the rows that the batch reads}, int64 of any shape. It
                always names all tables and all rows. None: unknown
    indexed:    examples have one order over all epochs that depends on the seed alone. `data` skips its first `used`
                and assigns the following ones to the ranks in turn
    pure:       these functions and the model keep no state between calls except parameters and buffers. So a trace of a
                step is possible
    scripted:   a script's own code runs inside of `loss`, and may call `backward` there
    schedule:   `(step)` -> the factor of that step's learning rate; None: 1
    """

    model: Callable[[], nn.Module]
    data: Callable[..., Iterable[Any]]
    loss: Callable[[nn.Module, Any], Tensor]
    optimizer: Callable[[Iterable[Any], float], Optimizer]
    evaluate: Callable[[nn.Module], float | dict[str, float]] | None = None
    parts: Callable[[nn.Module], list[nn.Module]] | None = None
    split: Callable[[nn.Module], Plan] | None = None
    lookups: Callable[[Any], Mapping[str, Tensor]] | None = None
    indexed: bool = False
    pure: bool = False
    scripted: bool = False
    schedule: Callable[[int], float] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskBase(Family):
    """A model with data that it can learn. `lr` and `batch` are its defaults; 0 lets its functions decide."""

    home: ClassVar[str] = "workbench.tasks"
    lr: ClassVar[float] = 1e-3
    batch: ClassVar[int] = 8
    metric: ClassVar[str] = "held-out loss"
    keeps: ClassVar[bool] = False  # whether the run's end saves a checkpoint, if ranks have a common step
    looks_up: ClassVar[bool] = False  # whether it names a batch's rows of embedding tables
    has_own_loop: ClassVar[bool] = False

    def build(self) -> Learner:
        """Returns the functions that the engine calls on each rank."""
        raise TypeError(f"{type(self).__name__}: must define build() -> Learner")

    def refuses(self, batch: int) -> str | None:
        """Returns why this task is invalid with `batch` examples per rank, with a remedy. None: it is valid."""
        return None


def at_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the first group's learning rate to `lr`, and scales the other groups with it.

    Groups keep their ratio, even through a rate of 0 by the `initial_lr` of torch's schedulers.
    """
    groups = optimizer.param_groups
    own = [group.get("initial_lr", group["lr"]) for group in groups]
    for group, mine in zip(groups, own, strict=True):
        group["lr"] = lr * (mine / own[0] if own[0] else 1.0)


def stands_for(made: Any, of: Any) -> Any:
    """Puts `made`, which replaces parameter `of`, into the same optimizer group. Returns `made`."""
    if (group := getattr(of, "optimizer_group", None)) is not None:
        made.optimizer_group = group
    return made


def same_groups(made: Any, of: nn.Module) -> Any:
    """Restores the optimizer groups that `made`, a copy of Module `of`, has lost. Returns `made`."""
    for name, p in of.named_parameters():
        stands_for(made.get_parameter(name), p)
    return made


def rate(optimizer: Optimizer) -> float:
    """Returns the learning rate of the first group."""
    return float(optimizer.param_groups[0]["lr"])


def shuffled(examples: int, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[Tensor]:
    """Yields indices of one rank's batches without end: `(batch,)` int64 each.

    All ranks shuffle each epoch alike. They skip the `used` first examples and take the following ones in turn. So
    no two ranks see the same example within an epoch, and none sees a used one. The result depends on the arguments
    alone.

    Raises ValueError if `used` is negative or exceeds `EPOCHS` epochs, because skipping costs time.
    """
    import torch

    if not 0 <= used <= EPOCHS * examples:
        raise ValueError(f"used={used}: must be from 0 to {EPOCHS:,} epochs of {examples} examples")
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(examples, generator=generator) for _ in count())
    yield from in_turn(epochs, rank, ranks, batch, used)


def in_turn(epochs: Iterator[Tensor], rank: int, ranks: int, batch: int, used: int = 0) -> Iterator[Tensor]:
    """Yields indices of one rank's batches, `(batch,)` int64, from consecutive epochs, `(n,)` int64.

    Skips the `used` first indices, and assigns the following ones to ranks in turn.
    """
    import torch

    gone, turn = used, rank  # offset of this rank's next index in the next epoch
    hand = torch.empty(0, dtype=torch.int64)
    for epoch in epochs:
        left, gone = epoch[gone:], max(0, gone - len(epoch))
        hand = torch.cat([hand, left[turn::ranks]])
        turn = (turn - len(left)) % ranks
        while len(hand) >= batch:
            yield hand[:batch]
            hand = hand[batch:]
