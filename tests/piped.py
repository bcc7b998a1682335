"""A model for pipelines, and its result in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from tests.ranks import experiment, toy
from workbench.engine.rank.session import Session
from workbench.experiment import Experiment
from workbench.host.passes.stage_module import cut_batch
from workbench.optimizers import AdamW
from workbench.partitions import Pipeline
from workbench.partitions.schedules import PipeDream, PipeDream2BW

WIDTH, DEPTH, ROWS = 12, 6, 8


def deep() -> nn.Module:
    """Makes 6 layers of one size from a separate generator, because ranks on threads share torch's."""
    rng = torch.Generator().manual_seed(7)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(DEPTH)]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 4))
    for p in model.parameters():
        p.data = 0.4 * torch.randn(p.shape, generator=rng)
    return model


def batches(rank: int, ranks: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    rng = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(ROWS, WIDTH, generator=rng), torch.randn(ROWS, 4, generator=rng)) for _ in range(8)]


def held_out(model: nn.Module) -> float:
    x, y = batches(99, 1, 0)[0]
    return float(nn.functional.mse_loss(model(x), y))


def loss(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(pair[0]), pair[1])


def piped(ranks: int, steps: int = 6, **rest: Any) -> Experiment:
    task = toy(model=deep, data=batches, evaluate=held_out, loss=loss)
    return experiment(ranks, steps, **{"task": task, "optimizer": AdamW(), "lr": 1e-2, "bucket_mb": 0.01, **rest})


def assembled(sessions: list[Session], stages: int, replica: int = 0) -> dict[str, torch.Tensor]:
    """Returns all parameters of one replica by name, from the ranks that hold them."""
    mine = sessions[replica * stages : (replica + 1) * stages]
    found = [(place.name, place.param.data) for s in mine for place in s.layout.order]
    assert len({name for name, _ in found}) == len(found)
    return dict(found)


def alone(e: Experiment, *phases: tuple[int, int, int], longest: float = 0.0) -> dict[str, torch.Tensor]:
    """Returns the result of one process that adds the same micro-batches and replica sums in the same order.

    phases: (steps, replicas, micro-batches) one after the other, each with the data from its beginning
    """
    model = deep()
    params = list(model.parameters())
    optimizer = e.optimizer.make(params, e.lr, lambda lr: torch.optim.SGD(params, lr))
    for step, replicas, micros in ((k, *rest) for steps, *rest in phases for k in range(steps)):
        sums: list[list[torch.Tensor]] = []
        for replica in range(replicas):
            model.zero_grad()
            for part in cut_batch(batches(replica, replicas, 0)[step % 8], micros):
                loss(model, part).backward(torch.tensor(1.0 / micros))
            sums.append([p.grad.clone() for p in params])
        for p, *grads in zip(params, *sums, strict=True):
            p.grad = sum(grads[1:], grads[0]) / replicas if replicas > 1 else grads[0]
        if longest:
            nn.utils.clip_grad_norm_(params, longest)
        optimizer.step()
    return dict(model.named_parameters())


def same(sessions: list[Session], stages: int, want: dict[str, torch.Tensor]) -> None:
    """Checks that every replica's parameters are bit-identical to these; each rank holds a part of them."""
    for replica in range(len(sessions) // stages):
        found = assembled(sessions, stages, replica)
        assert found.keys() == want.keys()
        assert [name for name, x in want.items() if not torch.equal(found[name], x)] == []


def seen(session: Session, name: str) -> list[float]:
    return [value for _, what, _, value in session.record.samples if what == name]


def dream(stages: int, **rest: Any) -> Pipeline:
    return Pipeline(stages=stages, micros=1, schedule=PipeDream(), **rest)


def twice(stages: int, micros: int, **rest: Any) -> Pipeline:
    return Pipeline(stages=stages, micros=micros, schedule=PipeDream2BW(), **rest)
