"""The model in torch's own DistributedDataParallel, as a baseline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from workbench.engine.collectives.lane import Lane
from workbench.engine.collectives.wire import Wire
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.rank import Op, StrategyError

MIXED_TENSORS_ERROR = "got mixed torch.Tensor and DTensor"  # in torch's error
CHANGED_GRAPH_ERRORS = ("training graph has changed", "Expected to have finished reduction")  # in torch's errors

ExchangeCallback = Callable[[str, float, int], None]  # gets (name, when it began, bytes) of an exchanged bucket
CommHook = tuple[Any, Callable[[Any, Any], Any]]  # (state, the function that exchanges a bucket)


def convert_to_mib(bucket_mb: float) -> float:
    """Converts MB to MiB, the unit of torch's DDP."""
    return bucket_mb * 1e6 / 2**20


def wrap_model(
    model: torch.nn.Module,
    wire: Wire,
    options: dict[str, Any],
    lane: Lane | None,
    seen: ExchangeCallback | None = None,
    now: Callable[[], float] = float,
    hook: CommHook | None = None,
) -> DistributedDataParallel:
    """Returns torch's DDP. With `lane`, a comm hook sends its buckets over the Link.

    seen: called after each bucket's exchange, without `lane`
    now:  returns the time
    hook: the script's own comm hook, which exchanges the buckets; only without `lane`
    """
    ddp = DistributedDataParallel(model, process_group=wire.lend_group(), init_sync=False, **options)
    if hook is not None:
        state, exchange = hook
        ddp.register_comm_hook(
            state, lambda state, bucket: _time_exchange(exchange(state, bucket), bucket, seen, now())
        )
    elif lane is not None:
        # torch checks the hook's annotations and refuses postponed ones, so this hook has none
        ddp.register_comm_hook(lane, lambda lane, bucket: _send_on_lane(lane, bucket))
    elif seen is not None:
        ddp.register_comm_hook(wire, lambda wire, bucket: _reduce_as_torch(wire, bucket, seen, now()))
    return ddp


def choose_options(find_unused_parameters: bool = False) -> dict[str, Any]:
    """Returns torch's fastest options: with a static graph, or for steps that use different parameters."""
    graph = {"find_unused_parameters": True} if find_unused_parameters else {"static_graph": True}
    return {"gradient_as_bucket_view": True, **graph}


@contextmanager
def require_all_grads(layout: ParameterLayout) -> Iterator[None]:
    """Makes all parameters require gradients inside: torch's DDP must register the same ones on every rank."""
    frozen = [place.param for place in layout.order if not place.param.requires_grad]
    for param in frozen:
        param.requires_grad_(True)
    yield
    for param in frozen:
        param.requires_grad_(False)


@contextmanager
def explain_errors() -> Iterator[None]:
    """Raises StrategyError for models that torch's own strategies cannot train.

    Under DDP a step must use the parameters of the first one. Under fully_shard a unit's parameter must not be read
    outside of the unit's forward.
    """
    try:
        yield
    except RuntimeError as error:
        if MIXED_TENSORS_ERROR in str(error):
            raise StrategyError(
                f"TorchFSDP: the model reads a parameter of a module outside of this module's forward, where torch's "
                f"fully_shard has it in shards; take ZeRO3, or a larger bucket_mb, with which the module is no unit of "
                f"its own. torch says: {error}"
            ) from error
        if not any(text in str(error) for text in CHANGED_GRAPH_ERRORS):
            raise
        raise StrategyError(
            f"TorchDDP: this step uses other parameters than the first one; set strategy.find_unused_parameters=True. "
            f"torch says: {error}"
        ) from error


def remove_hooks(module: Callable[..., Any]) -> None:
    """Removes torch's hooks: their references would keep the group's sockets open."""
    if not isinstance(module, DistributedDataParallel):
        return
    module._remove_autograd_hooks()
    del module.reducer
    for param in module.module.parameters():
        param.grad = None


def _reduce_as_torch(
    wire: Wire, bucket: Any, seen: ExchangeCallback, began: float
) -> torch.futures.Future[torch.Tensor]:
    """Makes torch's own all-reduce, and reports its end to `seen`. Does not wait."""
    buffer = _scale_buffer(bucket.buffer(), wire.size)
    sent = buffer._values() if buffer.is_sparse else buffer

    def over(made: Any) -> torch.Tensor:
        made.value()  # raises its error
        seen(f"all_reduce bucket {bucket.index()}", began, sent.numel() * sent.element_size())
        return buffer

    return wire.group.allreduce([buffer]).get_future().then(over)


def _scale_buffer(buffer: torch.Tensor, size: int) -> torch.Tensor:
    """Divides by the number of ranks in place. torch multiplies dense gradients, so 3 ranks round as without a hook."""
    return buffer.div_(size) if buffer.is_sparse else buffer.mul_(1.0 / size)


def _time_exchange(future: Any, bucket: Any, seen: ExchangeCallback | None, began: float) -> Any:
    """Calls `seen` when the future of the script's hook has a value."""
    if seen is None:
        return future
    noted = partial(seen, f"comm hook bucket {bucket.index()}", began, bucket.buffer().nbytes)

    def over(made: Any) -> Any:
        value = made.value()  # raises its error
        noted()
        return value

    return future.then(over)


def _send_on_lane(lane: Lane, bucket: Any) -> torch.futures.Future[torch.Tensor]:
    """Does not wait, so that backward can overlap."""
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    buffer = bucket.buffer()

    async def child() -> None:
        _scale_buffer(buffer, lane.size)
        await Op("all_reduce", buffer, "sum", f"bucket {bucket.index()}")

    handle = lane.start(child(), f"bucket {bucket.index()}")
    threading.Thread(target=_settle_future, args=(lane, handle, future, buffer), daemon=True).start()
    return future


def _settle_future(lane: Lane, handle: Any, future: Any, buffer: torch.Tensor) -> None:
    try:
        lane.wait(handle)
        future.set_result(buffer)
    except BaseException as error:
        future.set_exception(error)
