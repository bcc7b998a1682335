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

BEST = {"gradient_as_bucket_view": True, "static_graph": True}


Seen = Callable[[str, float, int], None]  # (name, when it began, bytes) of a bucket that has been exchanged


def wrap(model: torch.nn.Module, wire: Wire, bucket_mb: float, lane: Lane | None, seen: Seen | None = None,
         now: Callable[[], float] = float, options: dict[str, Any] = BEST) -> DistributedDataParallel:  # fmt: skip
    """DDP at its best, or with a script's own options; with `lane` its buckets go over the Link by a comm hook.

    seen: told of every bucket, where there is no `lane`; now: the time
    """
    ddp = DistributedDataParallel(
        model, process_group=wire.lend(), bucket_cap_mb=bucket_mb * 1e6 / 2**20, init_sync=False,
        **options,
    )
    if lane is not None:
        # torch reads the hook's annotations and takes no postponed ones, so what it is given has none
        ddp.register_comm_hook(lane, lambda lane, bucket: _over_the_link(lane, bucket))
    elif seen is not None:
        ddp.register_comm_hook(wire, lambda wire, bucket: _as_torch_does(wire, bucket, seen, now()))
    return ddp


def unwrap(module: Callable[..., Any]) -> None:
    """Takes torch's hooks off a wrapped model again; kept references would keep the group's sockets open."""
    if not isinstance(module, DistributedDataParallel):
        return
    module._remove_autograd_hooks()
    del module.reducer
    for param in module.module.parameters():
        param.grad = None


def _as_torch_does(wire: Wire, bucket: Any, seen: Seen, began: float) -> torch.futures.Future[torch.Tensor]:
    """The all-reduce that torch makes without a hook, and when it was over; nobody waits for it here."""
    buffer = bucket.buffer().div_(wire.size)

    def over(made: Any) -> torch.Tensor:
        made.value()  # raises what it failed with
        seen(f"all_reduce bucket {bucket.index()}", began, buffer.numel() * buffer.element_size())
        return buffer

    return wire.group.allreduce([buffer]).get_future().then(over)


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
