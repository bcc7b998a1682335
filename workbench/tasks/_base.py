"""What learns: a model and its data, as a few functions. No ranks, wires or records are known here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar

from workbench.settings import Family

EPOCHS = 1_000_000  # behind which an order of examples can go on: 15 s for 1,797 of them

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from workbench.tasks._split import Plan


class TaskError(RuntimeError):
    """A task that cannot be trained: says which of its functions did what, and what would do."""


@dataclass(frozen=True, kw_only=True)
class Learner:
    """A task as the engine uses it: five functions, and how the model may be spread over ranks.

    model:      () -> Module, the same on every rank (the engine seeds torch before, and checks)
    data:       (rank, ranks, batch, seed) -> an endless iterable of batches, each of `batch` examples; where they are
                `indexed` (rank, ranks, batch, seed, used)
    loss:       (model, batch) -> scalar Tensor
    optimizer:  (params, lr) -> Optimizer; lr = 0 leaves the rates that the optimizer was made with
    evaluate:   (model) -> held-out loss as a float, or a dict of floats with "loss" in it; None for none
    parts:      (model) -> Modules of its parameters, of which each takes what the one before returns, together what the
                model computes; None: it can be cut if it is a Sequential, or a decoder of transformers
    split:      (model) -> by module name how it is dealt out over ranks that compute together: Colwise(), Rowwise();
                None: as the model's own `_tp_plan` says, or where it is a Sequential. Of what lies between a Colwise()
                and a Rowwise() Linear a sub-model can be without some, too
    lookups:    (batch) -> by name of an embedding's weight, which of its rows the batch reads: int64 of any shape, and
                no others are read; all tables are named for every batch. None: it does not say
    indexed:    examples stand in one order, epoch after epoch, that depends on the seed alone; `data` begins behind the
                `used` first of it, and deals out what follows among the ranks one by one
    pure:       these functions, and the model, keep nothing from call to call but parameters and buffers: a step may be
                looked at beforehand
    schedule:   (step) -> by what the learning rate of that step is multiplied; None: by 1
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
    schedule: Callable[[int], float] | None = None


@dataclass(frozen=True, kw_only=True)
class TaskBase(Family):
    """A model with data that it can learn. `lr` and `batch` are what it likes best; 0 means its functions decide."""

    home: ClassVar[str] = "workbench.tasks"
    lr: ClassVar[float] = 1e-3
    batch: ClassVar[int] = 8
    metric: ClassVar[str] = "held-out loss"
    keeps: ClassVar[bool] = False  # is what ranks hold at the end of a run kept, where they have a step in common?
    looks_up: ClassVar[bool] = False  # do its functions say which rows of embedding tables a batch reads?
    leads: ClassVar[bool] = False  # does a loop of its own make the steps, which a strategy follows?

    def build(self) -> Learner:
        """The functions that the engine calls on each rank."""
        raise TypeError(f"{type(self).__name__} does not say how it is built")

    def refuses(self, batch: int) -> str | None:
        """Why this task cannot be, or not with `batch` examples per rank, in a sentence that says what would do."""
        return None


def at_rate(optimizer: Optimizer, lr: float) -> None:
    """Sets the learning rate of the first group to `lr` and scales the other groups' with it.

    So groups keep their ratio to each other, also through a rate of 0 if they say the `initial_lr` that torch's
    schedulers note, and an optimizer with one group simply gets `lr`.
    """
    groups = optimizer.param_groups
    own = [group.get("initial_lr", group["lr"]) for group in groups]
    for group, mine in zip(groups, own, strict=True):
        group["lr"] = lr * (mine / own[0] if own[0] else 1.0)


def stands_for(made: Any, of: Any) -> Any:
    """`made`, a parameter in the place of another (its slice, its size alone), of the same group of the optimizer."""
    if (group := getattr(of, "optimizer_group", None)) is not None:
        made.optimizer_group = group
    return made


def same_groups(made: Any, of: nn.Module) -> Any:
    """`made`, a copy of a Module: its parameters stand for those of the same names, as copies of themselves do not."""
    for name, p in of.named_parameters():
        stands_for(made.get_parameter(name), p)
    return made


def rate(optimizer: Optimizer) -> float:
    """The learning rate of the first group."""
    return float(optimizer.param_groups[0]["lr"])


def shuffled(examples: int, rank: int, ranks: int, batch: int, seed: int, used: int = 0) -> Iterator[Tensor]:
    """Indices of one rank's batches without end: (batch,) int64 each.

    Every epoch is shuffled anew, the same way on all ranks, and epochs follow each other in one line, of which the
    `used` first are gone. What follows is dealt out one by one, so that within an epoch no two ranks see the same
    example, nor one that was used before. Depends on the arguments and on nothing else.

    Raises ValueError where `used` is less than nothing or more than `EPOCHS` epochs: each is passed by one by one.
    """
    import torch

    if not 0 <= used <= EPOCHS * examples:
        raise ValueError(f"used={used}: of {examples} examples between 0 and {EPOCHS:,} times as many can be used up")
    generator = torch.Generator().manual_seed(seed)
    epochs = (torch.randperm(examples, generator=generator) for _ in count())
    yield from in_turn(epochs, rank, ranks, batch, used)


def in_turn(epochs: Iterator[Tensor], rank: int, ranks: int, batch: int, used: int = 0) -> Iterator[Tensor]:
    """Indices of one rank's batches, (batch,) int64 each: epochs, (n,) int64 each, follow each other in one line.

    Of it the `used` first are gone, and what follows is dealt out one by one.
    """
    import torch

    gone, turn = used, rank  # which of those that follow is this rank's next
    hand = torch.empty(0, dtype=torch.int64)
    for epoch in epochs:
        left, gone = epoch[gone:], max(0, gone - len(epoch))
        hand = torch.cat([hand, left[turn::ranks]])
        turn = (turn - len(left)) % ranks
        while len(hand) >= batch:
            yield hand[:batch]
            hand = hand[batch:]
