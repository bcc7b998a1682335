"""What a loop of its own asks of torch, heard: its DistributedDataParallel, its backwards, its optimizers' steps.

Each is torch's own again on threads that are nobody's loop (see workbench.tasks.LEADS), the engine's among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from workbench.host.batches import to_device
from workbench.settings import KnobError
from workbench.tasks._loops import leads

AT_ONCE = 250 * 2**20  # bytes that torch's own constructor broadcasts at a time
OURS = ("find_unused_parameters", "gradient_as_bucket_view", "static_graph", "broadcast_buffers")


class Over(BaseException):
    """The loop is over, or is to leave: the rank that it leads has ended."""


class Wrapped(DistributedDataParallel):
    """A script's DistributedDataParallel, whose forward goes through what the strategy has put around the model."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0,
                 broadcast_buffers: bool | None = None, init_sync: bool = True, process_group: Any = None,
                 bucket_cap_mb: float | None = None, **more: Any) -> None:  # fmt: skip
        nn.Module.__init__(self)
        if not any(p.requires_grad for p in module.parameters()):
            raise RuntimeError("DistributedDataParallel is not needed when a module doesn't have any parameters that "
                               "require a gradient.")  # fmt: skip
        self.module, self.device_ids, self.process_group = module, device_ids, process_group
        self.device = next(module.parameters()).device
        self.require_backward_grad_sync = True
        self.led = leads()
        given = {"broadcast_buffers": broadcast_buffers, **more}
        self.options = {name: given[name] for name in OURS if given.get(name) is not None}
        self.static_graph = bool(more.get("static_graph"))
        self.find_unused_parameters = bool(more.get("find_unused_parameters"))
        if init_sync and dist.is_initialized():
            group = process_group or dist.distributed_c10d._get_default_group()
            _sync_module_states(module, group, AT_ONCE, 0, ())

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            args, kwargs = to_device((args, kwargs), str(self.device))
        self.led.options = self.options
        return self.led.forward(self.module, self.require_backward_grad_sync, self.module, args, kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        was, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = was

    def join(self, *_: Any, **__: Any) -> Any:
        raise KnobError("join(): ranks with unequal numbers of batches cannot be followed; give each as many, as "
                        "DistributedSampler does")  # fmt: skip

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self.led.run.mark("log", {"stream": "stderr", "text": "the script's comm hook is left out: what crosses the "
                                  "wire is the run's compressor, such as lab.set('compressor', 'Cast')"})  # fmt: skip

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _set_static_graph(self) -> None:
        self.options["static_graph"] = True


@cache
def heard() -> None:
    """From now on what loops ask of torch is heard. For good: on other threads nothing is otherwise."""
    DistributedDataParallel.__new__ = staticmethod(_new)  # type: ignore[method-assign]
    torch.autograd.backward = _backward(torch.autograd.backward)
    torch.amp.grad_scaler.GradScaler.scale = _scale(torch.amp.grad_scaler.GradScaler.scale)  # type: ignore[method-assign]
    torch.multiprocessing.spawn = _spawn(torch.multiprocessing.spawn)
    register_optimizer_step_post_hook(_stepped)


def _new(cls: type, *_: Any, **__: Any) -> Any:
    return object.__new__(Wrapped if cls is DistributedDataParallel and leads() is not None else cls)


def _backward(really: Callable[..., None]) -> Callable[..., None]:
    @wraps(really)
    def backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
                 grad_variables: Any = None, inputs: Any = None) -> None:  # fmt: skip
        if (led := leads()) is None:
            return really(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        given = grad_variables if grad_tensors is None else grad_tensors
        led.backward(really, tensors, given, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs)

    return backward


def one_loss(losses: Any, given: Any) -> Tensor:
    """The number of which the gradients are those of `losses`, a tensor or several, weighted as `given`."""
    of = [losses] if isinstance(losses, Tensor) else list(losses)
    if len(of) == 1 and given is None and of[0].numel() == 1:
        return of[0]
    weights = [given] if isinstance(given, Tensor) else given or [None] * len(of)
    parts = [(x if weight is None else x * weight).sum() for x, weight in zip(of, weights, strict=True)]
    return torch.stack(parts).sum()


def _scale(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def scale(self: Any, outputs: Any) -> Any:
        made = really(self, outputs)
        if leads() is not None and isinstance(made, Tensor) and made is not outputs:
            made.unscaled = outputs.detach()  # type: ignore[attr-defined]
        return made

    return scale


def _spawn(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if leads() is None:
            return really(*args, **kwargs)
        raise KnobError("mp.spawn: starts ranks of its own; let the script read RANK and WORLD_SIZE, as for torchrun")

    return spawn


def _stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (led := leads()) is not None:
        led.stepped(optimizer)
