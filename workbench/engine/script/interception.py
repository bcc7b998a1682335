"""Intercepts a loop's calls of torch: DistributedDataParallel, backward, state dicts and optimizer steps.

Threads without a loop (see workbench.tasks.LED_RANKS), such as the engine's, still get torch's own functions.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from workbench.host.memory.batches import move_to_device
from workbench.settings import KnobError
from workbench.tasks._loops import find_led_rank

REDUCER_OPTIONS = (
    "bucket_cap_mb",
    "bucket_cap_mb_list",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "static_graph",
    "skip_all_reduce_unused_params",
    "batched_grad_copy",
)
REFUSED_OPTIONS = ("mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce")
DDP_SIGNATURE = inspect.signature(DistributedDataParallel.__init__)


class LoopEnded(BaseException):
    """Ends a loop because its rank has ended, or the rank's step because the loop is over."""


class DDPShim(DistributedDataParallel):
    """A script's DistributedDataParallel. Its forward calls the strategy's wrapper of the model, if there is one.

    torch's own constructor checks the arguments and synchronises parameters and buffers. Then its reducer is removed,
    because the strategy exchanges the gradients. This class synchronises the buffers under all strategies.

    options:   the script's arguments for torch's reducer, which TorchDDP uses
    comm_hook: the script's (state, hook), which TorchDDP registers
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = DDP_SIGNATURE.bind(self, *args, **kwargs).arguments
        given = {name: value for name, value in given.items() if value is not None}
        if name := next((name for name in REFUSED_OPTIONS if name in given), None):
            raise KnobError(f"DistributedDataParallel({name}=...): no strategy supports this argument; remove it, or "
            f"run the script with torchrun")  # fmt: skip
        super().__init__(*args, **kwargs)
        self._remove_autograd_hooks()
        del self.reducer, self.logger
        self.led_rank = find_led_rank()
        self._require_all()
        self.options = {name: given[name] for name in REDUCER_OPTIONS if name in given}
        self.comm_hook: tuple[object, Callable[..., Any]] | None = None
        self.led_rank.wrappers.append(weakref.ref(self))

    def _require_all(self) -> None:
        """Every strategy includes all ranks and parameters, so this raises KnobError if the script excludes some."""
        size, every = dist.get_world_size(self.process_group), dist.get_world_size()
        if size != every:
            raise KnobError(f"DistributedDataParallel(process_group=...): the group has {size} of {every} ranks, and "
            f"a run exchanges over all ranks; create the group with all ranks")  # fmt: skip
        trained = {name for name, p in self.module.named_parameters() if p.requires_grad}
        if left := sorted(trained & set(self.parameters_to_ignore)):
            raise KnobError(f"DistributedDataParallel: the module excludes parameter {left[0]!r}, and a run "
            f"exchanges every trained parameter; freeze it, or run the script with torchrun")  # fmt: skip

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.device_ids:
            args, kwargs = move_to_device((args, kwargs), str(self.device))
        learns = torch.is_grad_enabled()
        run = self.led_rank.enter_forward(self.module, self.require_backward_grad_sync) if learns else self.module
        if self.will_sync_module_buffers() and (self.led_rank.settled or not self.led_rank.has_left):
            self._sync_buffers()
        self.require_forward_param_sync = learns and self.require_backward_grad_sync  # torch's rule
        return run(*args, **kwargs)

    def join(self, *_: Any, **__: Any) -> Any:
        raise KnobError("join(): ranks must have the same number of batches; give each rank as many, as "
        "DistributedSampler does")  # fmt: skip

    join_hook = join  # for `torch.distributed.algorithms.Join`

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        self._check_comm_hook(hook)
        self._require_no_hook("register_comm_hook")
        self.comm_hook = state, hook

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._require_no_hook("_register_builtin_comm_hook")
        raise KnobError(f"{comm_hook_type}: TorchDDP takes only hooks written in Python; take the hook of that name "
        f"in torch.distributed.algorithms.ddp_comm_hooks.default_hooks")  # fmt: skip

    def _register_buffer_comm_hook(self, *_: Any, **__: Any) -> None:
        raise KnobError("_register_buffer_comm_hook: a run broadcasts buffers from rank 0; remove the hook")

    def _register_fused_optim(self, *_: Any, **__: Any) -> None:
        raise KnobError("_register_fused_optim: a run cannot update inside a backward; step the optimizer in the "
        "loop")  # fmt: skip

    def _require_no_hook(self, name: str) -> None:
        if self.comm_hook is not None:
            raise RuntimeError(f"{name}: a communication hook can be registered only once")
        if self.led_rank.model is self.module:
            raise KnobError(f"{name}: the first step has begun; register the hook before the first forward")

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        return {name: value for name, value in self.__dict__.items() if name not in ("process_group", "led_rank")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super(DistributedDataParallel, self).__setstate__(state)
        self.process_group, self.led_rank = dist.distributed_c10d._get_default_group(), find_led_rank()

    def _get_ddp_logging_data(self) -> dict[str, Any]:
        return {}

    def _set_static_graph(self) -> None:
        if hasattr(self, "reducer"):  # torch's constructor calls this
            super()._set_static_graph()
        else:
            self.static_graph = self.options["static_graph"] = True


def hook_name(hook: tuple[object, Callable[..., Any]]) -> str:
    """Returns the name of the script's communication hook."""
    return str(getattr(hook[1], "__name__", type(hook[1]).__name__))


@cache
def install_hooks() -> None:
    """Replaces torch's functions in this process, for good."""
    DistributedDataParallel.__new__ = staticmethod(_new_ddp)  # type: ignore[method-assign]
    owners: list[tuple[Any, str, Callable[..., Any]]] = [
        (torch.autograd, "backward", _wrap_backward),
        (torch.amp.grad_scaler.GradScaler, "scale", _wrap_scale),
        (nn.Module, "_save_to_state_dict", _wrap_save),
        (torch.multiprocessing, "spawn", _wrap_spawn),
    ]
    for owner, name, wrap in owners:
        setattr(owner, name, wrap(getattr(owner, name)))
    register_optimizer_step_pre_hook(_on_step_begin)
    register_optimizer_step_post_hook(_on_step_end)


def _new_ddp(cls: Any, *_: Any, **__: Any) -> Any:
    return object.__new__(cls if find_led_rank() is None or issubclass(cls, DDPShim) else _make_shim_class(cls))


@cache
def _make_shim_class(cls: type[Any]) -> type:
    """Combines DDPShim with a script's own subclass of DistributedDataParallel, if it has one."""
    return DDPShim if cls is DistributedDataParallel else type(cls.__name__, (cls, DDPShim), {})


def _wrap_backward(really: Callable[..., None]) -> Callable[..., None]:
    @wraps(really)
    def backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, create_graph: bool = False,
                 grad_variables: Any = None, inputs: Any = None) -> None:  # fmt: skip
        if (led := find_led_rank()) is None:
            return really(tensors, grad_tensors, retain_graph, create_graph, grad_variables, inputs)
        given = grad_variables if grad_tensors is None else grad_tensors
        led.intercept_backward(
            really, tensors, given, retain_graph=retain_graph, create_graph=create_graph, inputs=inputs
        )

    return backward


def join_losses(losses: Any, given: Any) -> Tensor:
    """Returns one scalar with the gradients of `losses` (a tensor or several), weighted by `given`."""
    of = [losses] if isinstance(losses, Tensor) else list(losses)
    if len(of) == 1 and given is None and of[0].numel() == 1:
        return of[0]
    weights = [given] if isinstance(given, Tensor) else given or [None] * len(of)
    parts = [(x if weight is None else x * weight).sum() for x, weight in zip(of, weights, strict=True)]
    return torch.stack(parts).sum()


def _wrap_scale(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def scale(self: Any, outputs: Any) -> Any:
        made = really(self, outputs)
        if find_led_rank() is not None and isinstance(made, Tensor) and made is not outputs:
            made.unscaled = outputs.detach()  # type: ignore[attr-defined]
        return made

    return scale


def _wrap_save(really: Callable[..., None]) -> Callable[..., None]:
    @wraps(really)
    def save(self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        really(self, destination, prefix, keep_vars)
        if (led := find_led_rank()) is not None and not keep_vars:
            for name in self._parameters:
                if (x := destination.get(prefix + name)) is not None:
                    destination[prefix + name] = led.separate_storage(x)

    return save


def _wrap_spawn(really: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(really)
    def spawn(*args: Any, **kwargs: Any) -> Any:
        if find_led_rank() is None:
            return really(*args, **kwargs)
        raise KnobError("mp.spawn: starts its own ranks; read RANK and WORLD_SIZE in the script, as for torchrun")

    return spawn


def _on_step_begin(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (led := find_led_rank()) is not None:
        led.check_step(optimizer)


def _on_step_end(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if (led := find_led_rank()) is not None:
        led.note_step(optimizer)
