"""Lets a model's hooks on parameters and modules see the gradient of a rank's own loss.

A strategy scales a rank's loss so that the sum over ranks is the mean gradient. A hook that clips would clip this
smaller gradient. Hooks on a parameter's gradient run before the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from workbench.host.placement import unmaterialized
from workbench.rank import StrategyError

Hook = Callable[[Tensor], Tensor | None]
ModuleHook = Callable[..., object]
H = TypeVar("H", Hook, ModuleHook)


@contextmanager
def unscale_grads(params: Iterable[nn.Parameter], share: float | None) -> Iterator[None]:
    """Inside, the model's hooks on these parameters see gradients as if `share` had not scaled the loss.

    share: the loss's factor in the backward inside; None: 1
    """
    wrapped_hooks: list[tuple[dict[int, Hook], int, Hook]] = []
    scale = 1.0 if share is None else float(share)
    with unmaterialized.prevent_fetches():
        for p in params:
            before: dict[int, Hook] | None = p._backward_hooks
            after: dict[int, Hook] | None = p._post_accumulate_grad_hooks
            if not before and (not after or (len(after) == 1 and _is_hosts_hook(*after.values()))):
                continue  # of nearly all parameters
            wrappers: tuple[Callable[..., Tensor | None], ...] = (_run_hook, _run_final_hook)
            for held, wrapped in zip((before, after), wrappers, strict=True):
                if not held:
                    continue
                for number, hook in _move_hosts_hooks_last(held):
                    wrapped_hooks.append((held, number, hook))
                    if scale != 1.0:
                        held[number] = partial(wrapped, hook=hook, scale=scale)
    try:
        yield
    finally:
        _restore_hooks(wrapped_hooks)


class BackwardInLoss:
    """Finds out whether the task's loss function makes gradients itself: these are not scaled as the loss is.

    params:   returns (name, parameter) of each trained parameter
    scripted: a script's own backwards run there, which know the scale; nothing is watched
    """

    def __init__(self, params: Callable[[], Iterable[tuple[str, nn.Parameter]]], scripted: bool) -> None:
        self._params, self._scripted = params, scripted
        self._name: str | None = None  # a parameter that got a gradient in a forward

    @contextmanager
    def watch_forward(self) -> Iterator[None]:
        """Encloses the call of a loss function."""
        if self._scripted or self._name is not None:
            yield
            return
        with unmaterialized.prevent_fetches():
            empty = [(name, p) for name, p in self._params() if p.grad is None]
        yield
        with unmaterialized.prevent_fetches():
            self._name = next((name for name, p in empty if p.grad is not None), None)

    def require_scale(self, share: float | None) -> None:
        """Raises StrategyError if a forward has made gradients, and `share` now scales the loss of its backward."""
        if self._name is not None and share is not None and float(share) != 1.0:
            raise StrategyError(
                f"parameter {self._name}: the loss function has called backward, and this gradient would count "
                f"{1 / float(share):.3g} times; return the whole loss, and leave the backward to the workbench"
            )


class ModuleHooks:
    """Lets module backward hooks see gradients as if the loss had not been scaled.

    torch reads a module's hooks in its forward and calls them in the backward.

    share: the factor of the loss in the present backward
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.share = model, 1.0
        # The modules with hooks, and what must not have changed since: the number of hooks that this process has
        # registered, and the children of each module.
        self._hooked: list[nn.Module] = []
        self._next_hook, self._children, self._copies = -1, list[dict[str, Any]](), list[dict[str, Any]]()

    @contextmanager
    def wrap_hooks(self, share: float | None = None) -> Iterator[None]:
        """Encloses a forward, or a backward of the loss times `share`, which may recompute forwards."""
        self.share = 1.0 if share is None else float(share)
        wrapped: list[tuple[dict[int, ModuleHook], int, ModuleHook]] = []
        for module in self._list_hooked():
            every: list[dict[int, ModuleHook]] = [module._backward_hooks, module._backward_pre_hooks]
            for held in every:
                for number, hook in list(held.items()) if held else ():
                    wrapped.append((held, number, hook))
                    held[number] = partial(self._run_hook, hook)
        try:
            yield
        finally:
            _restore_hooks(wrapped)

    def _list_hooked(self) -> list[nn.Module]:
        """Returns the modules that had a backward hook when the model was last searched.

        Every forward and backward asks. So it searches again only after a new hook or a change of the model's modules.
        """
        if self._next_hook != RemovableHandle.next_id or self._children != self._copies:
            modules = list(self._model.modules())
            self._hooked = [m for m in modules if m._backward_hooks or m._backward_pre_hooks]
            self._next_hook, self._children = RemovableHandle.next_id, [m._modules for m in modules]
            self._copies = [dict(children) for children in self._children]
        return self._hooked

    def _run_hook(self, hook: ModuleHook, module: nn.Module, *grads: object) -> object:
        if self.share == 1.0:
            return hook(module, *grads)
        made = hook(module, *(_multiply_each(grad, 1 / self.share) for grad in grads))
        return None if made is None else _multiply_each(made, self.share)


def _restore_hooks(wrapped: Iterable[tuple[dict[int, H], int, H]]) -> None:
    """Puts hooks back in place of their wrappers. Removed hooks stay removed."""
    for held, number, hook in wrapped:
        if number in held:
            held[number] = hook


def _multiply_each(grads: object, by: float) -> object:
    """Returns a tensor, or a tuple of tensors and None, times `by`."""
    if isinstance(grads, tuple | list):
        return tuple(_multiply_each(grad, by) for grad in grads)
    return grads * by if isinstance(grads, Tensor) else grads


def require_gradient(name: str, p: Tensor) -> bool:
    """Returns whether a backward made a gradient. It makes none if the model froze `p` since its forward.

    Raises StrategyError if a hook has set the gradient to None, as an optimizer in a hook does.
    """
    if p.grad is None and p.requires_grad:
        raise StrategyError(
            f"parameter {name}: a hook of the model has set its gradient to None before ranks could exchange it; "
            f"keep the gradient in the hook, and leave the update to the task's optimizer"
        )
    return p.grad is not None


def _move_hosts_hooks_last(held: dict[int, Hook]) -> list[tuple[int, Hook]]:
    hosts = [number for number, hook in held.items() if _is_hosts_hook(hook)]
    if len(hosts) == len(held):
        return []
    for number in hosts:
        held[number] = held.pop(number)
    return list(held.items())[: len(held) - len(hosts)]


def _is_hosts_hook(hook: object) -> bool:
    module: str = getattr(getattr(hook, "func", hook), "__module__", None) or ""
    return module.startswith("workbench.")


def _run_hook(grad: Tensor, hook: Hook, scale: float) -> Tensor | None:
    made = hook(grad / scale)
    return None if made is None else made * scale


def _run_final_hook(p: Tensor, hook: Hook, scale: float) -> None:
    if p.grad is not None:
        p.grad.div_(scale)
    hook(p)
    if p.grad is not None:
        p.grad.mul_(scale)
