"""torch's own DistributedDataParallel around the model, for the opaque baseline."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from workbench.engine.collectives import Wire
from workbench.engine.lane import Lane
from workbench.rank import Op


def wrap(model: torch.nn.Module, wire: Wire, bucket_mb: float, lane: Lane | None) -> DistributedDataParallel:
    """DDP at its best; with `lane` its buckets go over the emulated Link by a comm hook."""
    ddp = DistributedDataParallel(
        model, process_group=wire.lend(), bucket_cap_mb=bucket_mb * 1e6 / 2**20, gradient_as_bucket_view=True,
        static_graph=True, init_sync=False,
    )
    if lane is not None:
        # torch reads the hook's annotations and takes no postponed ones, so what it is given has none
        ddp.register_comm_hook(lane, lambda lane, bucket: _over_the_link(lane, bucket))
    return ddp


def unwrap(module: Callable[..., Any]) -> None:
    """Takes torch's hooks off a wrapped model again; kept references would keep the group's sockets open."""
    if not isinstance(module, DistributedDataParallel):
        return
    module._remove_autograd_hooks()
    del module.reducer
    for param in module.module.parameters():
        param.grad = None


def _over_the_link(lane: Lane, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Hands torch's bucket to the lane's thread, where the Link shapes it; waiting here would hide nothing."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer()

    async def child() -> None:
        buffer.div_(lane.size)
        await Op("all_reduce", buffer, "sum", f"bucket {bucket.index()}")

    handle = lane.start(child(), f"bucket {bucket.index()}")
    threading.Thread(target=_settle, args=(lane, handle, future, buffer), daemon=True).start()
    return future


def _settle(lane: Lane, handle: Any, future: Any, buffer: torch.Tensor) -> None:
    try:
        lane.wait(handle)
        future.set_result(buffer)
    except BaseException as error:
        future.set_exception(error)
