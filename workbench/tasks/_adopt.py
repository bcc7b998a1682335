"""Turns a script's own objects into a `Task`."""

from __future__ import annotations

from typing import Any

from workbench.settings import KnobError, short
from workbench.tasks.own import Function, Task

SAFE = ("bf16", "bfloat16", "torch.bfloat16")


def adopt(
    model: Any, optimizer: Any, loader: Any, loss: Any, *, evaluate: Function | None = None, scheduler: Any = None,
    scheduler_every: int = 1, accumulate: int = 1, autocast: Any = None, batch: int = 0, parts: Function | None = None,
    split: Function | None = None, lookups: Function | None = None, pure: bool = False,
) -> Task:  # fmt: skip
    """Returns a `Task` of a script's own objects: `lab.run(Experiment(task=adopt(model, optimizer, loader, loss)))`.

    model:     a Module. Ranks copy it with its present weights, without torch's DistributedDataParallel or compile
    optimizer: a torch Optimizer of its parameters. Each rank makes one of the same class, settings and groups. Its
               state is empty. Several optimizers of one class step together. Parameters without an optimizer are frozen
    loader:    a DataLoader. Ranks take its examples by index in the sampler's order, each once per pass. Each rank gets
               `batch_size` per batch. A batch may continue into the next pass, so none is shorter. Ranks take turns on
               the batches of a batch sampler. Every rank reads all batches of an IterableDataset or a list, and keeps
               its own. A Dataset is shuffled and needs `batch`. Ranks ignore `num_workers`
    loss:      `(model, batch)` -> scalar Tensor, or a criterion `(output, target)` for batches `(input, target)`
    evaluate:  `(model)` -> held-out loss, or `{"loss": ..., "accuracy": ...}`
    scheduler: of torch.optim.lr_scheduler for this optimizer. It steps after `scheduler_every` steps. It may change
               only learning rates, by the same factor in all groups
    scheduler_every: steps between two steps of the scheduler
    accumulate: the loader's batches per step and rank. One backward averages their gradients
    autocast:  "bf16": forward and loss under torch.autocast
    batch:     a Dataset's examples per rank and batch
    parts, split, lookups, pure: as in `Task`

    On one rank the result equals the script's own loop, seeded with the experiment's `seed` before its first pass.
    Tries a first batch at once. Raises KnobError if the script cannot be adopted.
    """
    import torch
    from torch import nn

    from workbench.tasks._groups import Groups, Schedule
    from workbench.tasks._judged import Model, fitting
    from workbench.tasks._loader_shards import adopt_loader
    from workbench.tasks._shared_storage import require_own_storage

    model = getattr(model, "_orig_mod", model)  # torch.compile's
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        raise KnobError(f"model={short(model)}: must be a torch.nn.Module, with the weights that training begins with")
    if not any(p.requires_grad for p in model.parameters()):
        raise KnobError(f"model={type(model).__name__}: has no parameters that learn; give one that has")
    if any(type(p.data) is not torch.Tensor for p in model.parameters()):
        raise KnobError(f"model={type(model).__name__}: its parameters are already sharded; adopt it before that")
    require_own_storage(model)
    if not callable(loss):
        raise KnobError(f"loss={short(loss)}: must be a function (model, batch) or a criterion (output, target)")
    if evaluate is not None and not callable(evaluate):
        raise KnobError(f"evaluate={short(evaluate)}: must be a function (model) -> held-out loss, or None")
    counts = {"accumulate": (accumulate, 1), "scheduler_every": (scheduler_every, 1), "batch": (batch, 0)}
    for name, (value, least) in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= 10**6:
            raise KnobError(f"{name}={short(value)}: must be an integer in [{least}, 1000000]")
    if autocast is not None and str(autocast) not in SAFE:
        scaled = "float16 needs scaled losses, which ranks cannot adopt; " if "16" in str(autocast) else ""
        raise KnobError(f"autocast={short(str(autocast))}: {scaled}must be 'bf16' or None")
    groups = Groups(optimizer, model)
    data = adopt_loader(loader, batch, accumulate)
    precision = None if autocast is None else torch.bfloat16
    return Task(
        model=Model(model, groups.of), data=data, loss=fitting(model, data, loss, accumulate, precision),
        optimizer=groups, evaluate=evaluate, parts=parts, split=split, lookups=lookups, pure=pure, keeps=True,
        schedule=None if scheduler is None else Schedule(scheduler, optimizer, scheduler_every),
    )  # fmt: skip
