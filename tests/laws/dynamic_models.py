"""Small models that change during training what they train, and plain torch's final parameters.

`reference` is a plain torch loop. It keeps one replica for each rank and follows DistributedDataParallel with
`find_unused_parameters=True`: a gradient is the mean over all ranks, and a rank that did not use the parameter counts
as zero. A parameter that no rank used keeps `grad = None`, so the optimizer does not move it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from workbench.tasks import Task

WIDTH, STEPS, RATE = 40, 6, 0.125  # a matrix fills one bucket, vectors share one


class Batch(NamedTuple):
    """One rank's batch number `index`; x: (2, WIDTH) float32."""

    rank: int
    index: int
    x: Tensor


class Model(nn.Module):
    """Parameters by name; `rule` computes the loss of a batch from them and may change what is trained."""

    def __init__(self, rule: Callable[[Any, Batch], Tensor], made: dict[str, Any]) -> None:
        super().__init__()
        self.rule = rule
        rng = torch.Generator().manual_seed(7)
        for name, what in made.items():
            if isinstance(what, Tensor):
                setattr(self, name, nn.Parameter(what))
            else:
                self.add_module(name, what)
        with torch.no_grad():
            for p in self.parameters():
                wide = torch.complex128 if p.is_complex() else torch.float64
                p.copy_(torch.randn(p.shape, generator=rng, dtype=wide) * 0.5)

    def forward(self, batch: Batch) -> Tensor:
        return self.rule(self, batch)


@dataclass(frozen=True)
class Dynamic:
    """One model of the law.

    made:       () -> by name, a tensor that becomes a parameter, or a Module
    rule:       (model, batch) -> the loss
    optimizer:  (params) -> Optimizer
    prepare:    (model) -> None, before training
    accumulate: number of batches whose gradients are added before an update
    dtype:      in which results are compared; it sets the tolerance
    writes: whether the model writes into its parameters: torch's fully_shard ignores some of that, and strategies that
        step a copy elsewhere refuse it
    find_unused: whether torch's DDP gets `find_unused_parameters`, which forbids re-entrant checkpointing
    """

    made: Callable[[], dict[str, Any]]
    rule: Callable[[Any, Batch], Tensor]
    optimizer: Callable[[Any], torch.optim.Optimizer] = partial(torch.optim.SGD, lr=RATE)
    prepare: Callable[[nn.Module], None] = lambda model: None
    accumulate: int = 1
    dtype: torch.dtype = torch.float32
    writes: bool = False
    find_unused: bool = True

    def model(self) -> nn.Module:
        made = Model(self.rule, self.made())
        self.prepare(made)
        return made

    def task(self, loss: Callable[[nn.Module, Any], Tensor] = lambda model, batch: model(batch)) -> Task:
        return Task(model=self.model, data=batches, loss=loss, optimizer=self.optimizer)

    @property
    def tolerance(self) -> dict[str, float]:
        return {"rtol": 3e-2, "atol": 3e-2} if self.dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-6}


def batches(rank: int, ranks: int, seed: int) -> list[Batch]:
    """Returns a rank's batches, a function of the arguments only."""
    made = []
    for index in range(4 * STEPS):
        rng = torch.Generator().manual_seed(1000 * index + rank)
        made.append(Batch(rank, index, torch.randn(2, WIDTH, generator=rng)))
    return made


def reference(case: Dynamic, ranks: int, steps: int = STEPS) -> dict[str, Tensor]:
    """Returns plain torch's final parameters by name. Raises AssertionError if its replicas differ."""
    replicas = [case.model().train() for _ in range(ranks)]
    optimizers = [case.optimizer(model.parameters()) for model in replicas]
    dealt = [iter(batches(rank, ranks, 0)) for rank in range(ranks)]
    for _ in range(steps):
        for model, own in zip(replicas, dealt, strict=True):
            for _ in range(case.accumulate):
                (model(next(own)) / case.accumulate).backward()
        for same in zip(*(model.parameters() for model in replicas), strict=True):
            average_gradients(same)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    ended = [{name: p.detach().clone() for name, p in model.named_parameters()} for model in replicas]
    for name, first in ended[0].items():
        assert all(torch.equal(first, other[name]) for other in ended), f"replicas differ in {name}"
    return ended[0]


def average_gradients(same: tuple[nn.Parameter, ...]) -> None:
    """Gives all replicas of a parameter the mean of their gradients, or None if none has one."""
    there = [p.grad for p in same if p.grad is not None]
    if not there:
        return
    mean = sum(grad.to_dense() / len(same) for grad in there)
    for p in same:
        assert isinstance(mean, Tensor)
        p.grad = mean.clone()


# -- parts of models --


def two() -> dict[str, Any]:
    return {"a": torch.zeros(WIDTH, WIDTH), "b": torch.zeros(WIDTH)}


def three() -> dict[str, Any]:
    return {**two(), "c": torch.zeros(3, WIDTH)}


def layers() -> dict[str, Any]:
    return {name: nn.Linear(WIDTH, WIDTH) for name in ("first", "second", "third")}


def pull(p: Tensor, batch: Batch) -> Tensor:
    """A loss of one parameter whose gradient depends on its value and on the batch."""
    aim = batch.x.mean(0).to(p.dtype)
    return (p - aim).abs().square().mean()


def of_all(model: Any, batch: Batch) -> Tensor:
    return sum(pull(p, batch) for p in model.parameters())  # type: ignore[return-value]


def one_of_two(second: Callable[[Batch], bool]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, batch: pull(model.b if second(batch) else model.a, batch)


def with_b_if(used: Callable[[Batch], bool]) -> Callable[[Any, Batch], Tensor]:
    return lambda model, batch: pull(model.a, batch) + (pull(model.b, batch) if used(batch) else 0)


def trained_if(trains: Callable[[Batch], bool]) -> Callable[[Any, Batch], Tensor]:
    """b takes part in each loss; the model itself unfreezes and freezes it."""

    def rule(model: Any, batch: Batch) -> Tensor:
        model.b.requires_grad_(trains(batch))
        return pull(model.a, batch) + pull(model.b, batch)

    return rule


def freeze_b(model: Any) -> None:
    model.b.requires_grad_(False)


def through(model: Any, batch: Batch, order: tuple[str, ...] = ("first", "second", "third")) -> Tensor:
    x = batch.x
    for name in order:
        x = torch.tanh(getattr(model, name)(x))
    return x.square().mean()


def dropped_layer(model: Any, batch: Batch) -> Tensor:
    """Stochastic depth: each rank and step skips a different layer."""
    left = (batch.index + batch.rank) % 3
    return through(model, batch, tuple(name for i, name in enumerate(("first", "second", "third")) if i != left))


def order_by_step(model: Any, batch: Batch) -> Tensor:
    return through(model, batch, ("first", "second", "third") if batch.index % 2 else ("third", "first", "second"))


def checkpointed(reentrant: bool) -> Callable[[Any, Batch], Tensor]:
    def rule(model: Any, batch: Batch) -> Tensor:
        x = batch.x.clone().requires_grad_()
        for name in ("first", "second", "third"):
            x = checkpoint(getattr(model, name), x, use_reentrant=reentrant)
        return x.square().mean()

    return rule


def tie(model: Any) -> None:
    model.third.weight = model.first.weight


def experts(model: Any, batch: Batch) -> Tensor:
    """A mixture of experts: each rank uses one of two experts, and no rank uses the third."""
    chosen = ("first", "second")[(batch.rank + batch.index) % 2]
    return getattr(model, chosen)(batch.x).square().mean()


def embedded(model: Any, batch: Batch) -> Tensor:
    rows = torch.tensor([batch.rank, 2 + batch.index % 3])
    return model.table(rows).square().mean() + pull(model.a, batch)


def reads_value(model: Any, batch: Batch) -> Tensor:
    return through(model, batch) * (2.0 if float(batch.x.sum()) > 0 else 1.0)


def forget_by_hand(model: Any, batch: Batch) -> Tensor:
    """In the second of two accumulated batches the model drops the first batch's gradient of b."""
    if batch.index % 2:
        model.b.grad = None
    return pull(model.a, batch) + (0 if batch.index % 2 else pull(model.b, batch))


def transpose(model: Any) -> None:
    model.c.data = model.c.data.t().contiguous().t()


def masked(model: Any, batch: Batch) -> Tensor:
    return (model.first(batch.x) * model.mask[:2]).square().mean()


def add_mask(model: Any) -> None:
    model.register_buffer("mask", torch.ones(WIDTH, 3).t() * torch.tensor([[1.0], [2.0], [3.0]]))


def with_new_data(model: Any, batch: Batch) -> Tensor:
    """Each forward replaces the data of one parameter, and clips another one in place."""
    model.a.data = model.a.data / model.a.data.norm()
    if batch.index % 2:
        model.b.data = torch.full_like(model.b, 0.25)
    with torch.no_grad():
        model.c.clamp_(-0.2, 0.2)
    return of_all(model, batch)


def written_in_place(model: Any, batch: Batch) -> Tensor:
    """Each forward changes a parameter twice before it is read: once in place, once by other data."""
    with torch.no_grad():
        model.a.add_(0.1)
    model.a.data = model.a.data * 0.9
    return of_all(model, batch)


def scaled_by_hook(model: Any) -> None:
    model.a.register_hook(lambda grad: 3 * grad)


def clipped_by_hooks(model: Any) -> None:
    """Clips one gradient before it is added, and the other after that."""

    def clip(p: Any) -> None:
        p.grad = p.grad.clamp(-0.01, 0.01)

    model.a.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    model.b.register_post_accumulate_grad_hook(clip)


def kinds() -> dict[str, Any]:
    return {"a": torch.zeros(WIDTH), "b": torch.zeros(WIDTH, dtype=torch.float64),
            "c": torch.zeros(WIDTH, dtype=torch.bfloat16)}  # fmt: skip


def in_float32(model: Any, batch: Batch) -> Tensor:
    return sum(pull(p, batch).float() for p in model.parameters())  # type: ignore[return-value]


def in_kind(dtype: torch.dtype) -> Callable[[], dict[str, Any]]:
    return lambda: {"a": torch.zeros(WIDTH, dtype=dtype), "b": torch.zeros(3, WIDTH, dtype=dtype)}


def momentum(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=RATE, momentum=0.5)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=RATE, weight_decay=0.25)


def last_only(params: Any) -> torch.optim.Optimizer:
    return adamw(list(params)[-2:])


def two_groups(params: Any) -> torch.optim.Optimizer:
    first, *others = params
    return torch.optim.AdamW([{"params": [first], "lr": RATE / 2, "weight_decay": 0.0}, {"params": others}], lr=RATE)


PLAIN = Dynamic(three, of_all, adamw)
CASES: dict[str, Dynamic] = {
    "all used": PLAIN,
    "two groups": replace(PLAIN, optimizer=two_groups),
    "branch by step": Dynamic(two, one_of_two(lambda b: b.index % 2 == 1), adamw),
    "branch by rank": Dynamic(two, one_of_two(lambda b: b.rank % 2 == 1), momentum),
    "branch by rank and step": Dynamic(two, one_of_two(lambda b: (b.rank + b.index) % 3 == 1), adamw),
    "branch by accumulated batch": Dynamic(two, one_of_two(lambda b: b.index % 2 == 1), adamw, accumulate=2),
    "branch by accumulated batch and rank": Dynamic(
        two, one_of_two(lambda b: (b.index // 2 + b.rank) % 2 == 1), momentum, accumulate=2),
    "unused for ever": Dynamic(two, with_b_if(lambda b: False), adamw),
    "unused for ever, accumulated": Dynamic(two, with_b_if(lambda b: False), adamw, accumulate=2),
    "unused later": Dynamic(two, with_b_if(lambda b: b.index < 3), momentum),
    "used later": Dynamic(two, with_b_if(lambda b: b.index >= 3), adamw),
    "used by one rank at times": Dynamic(two, with_b_if(lambda b: b.rank == 0 and b.index % 2 == 0), adamw),
    "unfrozen": Dynamic(two, trained_if(lambda b: b.index >= 2), adamw, prepare=freeze_b),
    "frozen": Dynamic(two, trained_if(lambda b: b.index < 3), adamw),
    "frozen and unfrozen": Dynamic(two, trained_if(lambda b: b.index % 3 == 1), momentum),
    "optimizer of some parameters": Dynamic(layers, through, last_only),
    "optimizer of some parameters, one unused": Dynamic(three, with_b_if(lambda b: b.index % 2 == 0), last_only),
    "tied weights": Dynamic(layers, through, momentum, prepare=tie),
    "layer used twice": Dynamic(layers, partial(through, order=("first", "second", "third", "second")), momentum),
    "layers dropped": Dynamic(layers, dropped_layer, adamw),
    "order of gradients by step": Dynamic(layers, order_by_step, adamw),
    "experts": Dynamic(layers, experts, adamw),
    "complex": Dynamic(in_kind(torch.complex64), of_all, momentum),
    "bf16": Dynamic(in_kind(torch.bfloat16), of_all, dtype=torch.bfloat16),
    "float64": Dynamic(in_kind(torch.float64), of_all, adamw),
    "several element types": Dynamic(kinds, in_float32, dtype=torch.bfloat16),
    "parameter without elements": Dynamic(
        lambda: {**two(), "none": torch.zeros(0, WIDTH)},
        lambda m, b: pull(m.a, b) + pull(m.b, b) + m.none.sum(), adamw),
    "parameters of no dimension": Dynamic(
        lambda: {"a": torch.zeros(()), "b": torch.zeros(())},
        lambda m, b: (m.a * b.x.mean() - 1).square() + (m.b.square() if b.index % 2 else 0), adamw),
    "buffer that is not contiguous": Dynamic(
        lambda: {"first": nn.Linear(WIDTH, WIDTH)}, masked, momentum, prepare=add_mask),
    "parameter that is not contiguous": Dynamic(three, of_all, adamw, prepare=transpose),
    "ordinary checkpointing": Dynamic(layers, checkpointed(False), adamw),
    "re-entrant checkpointing": Dynamic(layers, checkpointed(True), adamw, find_unused=False),
    "embedding": Dynamic(lambda: {"a": torch.zeros(WIDTH), "table": nn.Embedding(6, WIDTH)}, embedded, adamw),
    "sparse embedding": Dynamic(
        lambda: {"a": torch.zeros(WIDTH), "table": nn.Embedding(6, WIDTH, sparse=True)}, embedded),
    "loss that reads a value": Dynamic(layers, reads_value, adamw),
    "gradient set to None by hand": Dynamic(two, forget_by_hand, momentum, accumulate=2),
    "data of parameters replaced": Dynamic(three, with_new_data, adamw, writes=True),
    "a parameter written in each forward": Dynamic(three, written_in_place, momentum, writes=True),
    "hook on a gradient": Dynamic(two, of_all, momentum, prepare=scaled_by_hook),
    "hooks that clip gradients": Dynamic(two, of_all, momentum, prepare=clipped_by_hooks),
}  # fmt: skip
