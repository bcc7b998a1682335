"""Compares with torch's own tensor parallelism (DTensor): the same layers split by `parallelize_module`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.ranks import run
from tests.split import PLAN, Small, entropy, near, spread, texts, together
from workbench.partitions import Tensor
from workbench.tasks import Colwise, Rowwise

pytestmark = pytest.mark.ranks
STEPS, LR = 6, 0.1


def learn(rank: int, ways: int, meet: str, out: str) -> None:
    """One rank of torch's own; rank 0 writes losses, gradients of the last step and parameters."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(meet, ways), rank=rank, world_size=ways)
    model = Small()
    plan: dict[str, Any] = {}
    for name, way in PLAN.items():
        if name == "words":
            plan[name] = RowwiseParallel(input_layouts=Replicate())
        elif isinstance(way, Colwise):
            plan[name] = ColwiseParallel(output_layouts=Replicate()) if way.gather else ColwiseParallel()
        elif isinstance(way, Rowwise):
            plan[name] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (ways,)), plan)
    optimizer = torch.optim.SGD(model.parameters(), LR)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return x.full_tensor() if isinstance(x, DTensor) else x

    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = entropy(model, texts(0, 1, 0)[step % 8])
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    grads = {name: whole(p.grad).clone() for name, p in model.named_parameters()}
    params = {name: whole(p.detach()).clone() for name, p in model.named_parameters()}
    if rank == 0:
        torch.save((losses, grads, params), out)
    dist.barrier()  # the first rank to finish must not close files that others still read
    dist.destroy_process_group()


@pytest.mark.parametrize("ways", [2, 4])
def test_it_learns_as_dtensor_does(ways: int, tmp_path: Path) -> None:
    """The loss agrees within 1e-5 in every step, and the last gradients, which parameters show, within 1e-6."""
    out = tmp_path / "oracle.pt"
    mp.spawn(learn, (ways, str(tmp_path / "ranks"), str(out)), nprocs=ways)
    losses, grads, params = torch.load(out)
    for sequence in (False, True) if ways == 2 else (False,):  # six positions cannot be split over four ranks
        e = spread(ways, STEPS, partition=Tensor(ways=ways, sequence=sequence), lr=LR)
        short, full = run(replace(e, steps=STEPS - 1)), run(e)
        assert full[0].record.losses() == pytest.approx(losses, abs=1e-5)
        near(together(full), params, 1e-6)
        before, after = together(short), together(full)
        near({name: (before[name] - after[name]) / LR for name in before}, grads, 1e-6)
