"""Finds the layer of a non-finite number, from a repeated batch or from current values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

Loss = Callable[[nn.Module, Any], Tensor]


class NonFiniteOrigin(NamedTuple):
    """A layer's name ("": none or unknown), and the reason."""

    layer: str
    why: str

    def to_json(self) -> dict[str, str]:
        return {"layer": self.layer, "why": self.why}


UNKNOWN = NonFiniteOrigin("", "")


def find_in_forward(model: nn.Module, loss: Loss, batch: object) -> NonFiniteOrigin:
    """Returns the layer that makes the loss of `batch` non-finite.

    If parameters are not finite, it is the layer that an earlier backward spoiled first. Else it is the first innermost
    layer with finite inputs and a non-finite output.
    """
    called: list[str] = []
    bad: list[str] = []
    fed: list[str] = []  # with non-finite inputs
    sound: dict[str, list[bool]] = {}

    def enter(name: str, _: nn.Module, args: object, kwargs: object) -> None:
        sound.setdefault(name, []).append(_is_finite((args, kwargs)))
        fed.extend([name] * (not sound[name][-1]))

    def leave(name: str, module: nn.Module, _: object, out: object) -> None:
        called.append(name)
        if sound[name].pop() and not bad and not _is_finite(out):
            bad.append(name)

    with _hook_modules(model, enter, leave), _preserve_state(model), torch.no_grad():
        again = _try_computing(lambda: loss(model, batch))
    if (spoiled := find_in_parameters(model, called)).layer:
        return spoiled
    if not _is_finite(batch):
        return NonFiniteOrigin("", "the batch holds numbers that are not finite")
    if bad:
        return NonFiniteOrigin(bad[0], "the first in forward order whose output is not finite")
    if fed:
        return NonFiniteOrigin("", "the input of the model is not finite")
    if again is None:
        return NonFiniteOrigin("", "the batch cannot be computed again")
    if _is_finite(again):
        return NonFiniteOrigin("", "the same batch, computed again, gives a finite loss")
    return NonFiniteOrigin("", "the output of every layer is finite, and the loss is not")


def find_in_backward(model: nn.Module, loss: Loss, batch: object) -> NonFiniteOrigin | None:
    """Returns the first layer in backward order with a non-finite gradient."""
    called: list[str] = []
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def leave(name: str, *_: object) -> None:
        called.append(name)

    def grads() -> Any:
        return torch.autograd.grad(loss(model, batch), list(named.values()), allow_unused=True)

    with _hook_modules(model, lambda *_: None, leave), _preserve_state(model), torch.enable_grad():
        found = _try_computing(grads)
    wrong = {name for name, g in zip(named, found or (), strict=False) if g is not None and not _is_finite(g)}
    return (
        _find_last_layer(called, wrong, "the first in backward order whose gradient is not finite") if wrong else None
    )


def find_in_gradients(model: nn.Module) -> NonFiniteOrigin:
    """Gradients may be sums over ranks."""
    wrong = {name for name, p in model.named_parameters() if p.grad is not None and not _is_finite(p.grad)}
    return _find_last_layer(
        list(_list_layers(model)), wrong, "the first in backward order whose gradient, summed over ranks, is not finite"
    )


def find_in_parameters(model: nn.Module, called: Iterable[str] = ()) -> NonFiniteOrigin:
    """Returns the layer that an update has spoiled first.

    called: names of modules in forward order, if known
    """
    wrong = {name for name, p in model.named_parameters() if not _is_finite(p.detach())}
    why = "the first in backward order whose parameters are not finite, because an earlier gradient was not"
    return _find_last_layer(list(called) or list(_list_layers(model)), wrong, why)


def _find_last_layer(called: list[str], wrong: set[str], why: str) -> NonFiniteOrigin:
    holders = {name.rpartition(".")[0] for name in wrong}
    if not wrong:
        return UNKNOWN
    return NonFiniteOrigin(next((name for name in reversed(called) if name in holders), sorted(holders)[-1]), why)


def _list_layers(model: nn.Module) -> Iterator[str]:
    return (name for name, _ in model.named_modules())


def _is_finite(x: object) -> bool:
    """Whether all floating-point tensors in `x` are finite."""
    if isinstance(x, Tensor):
        return x.is_meta or not (x.is_floating_point() or x.is_complex()) or bool(x.isfinite().all())
    if isinstance(x, Mapping):
        return all(map(_is_finite, x.values()))
    return all(map(_is_finite, x)) if isinstance(x, (list, tuple)) else True


def _try_computing(what: Callable[[], object]) -> Any:
    """Returns None if the model fails: hooks know enough."""
    try:
        return what()
    except Exception:
        return None


@contextmanager
def _hook_modules(model: nn.Module, enter: Callable[..., None], leave: Callable[..., None]) -> Iterator[None]:
    handles: list[RemovableHandle] = []
    try:
        for name, module in model.named_modules():
            handles.append(
                module.register_forward_pre_hook(lambda m, a, k, name=name: enter(name, m, a, k), with_kwargs=True)
            )
            handles.append(module.register_forward_hook(lambda m, a, out, name=name: leave(name, m, a, out)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _preserve_state(model: nn.Module) -> Iterator[None]:
    """Restores buffers and torch's random state after the block.

    Version counters stay, because autograd may need the original forward.
    """
    state, before = torch.get_rng_state(), [(b, b.clone()) for b in model.buffers()]
    with torch.autograd._unsafe_preserve_version_counter(tuple(b for b, _ in before)):
        try:
            yield
        finally:
            torch.set_rng_state(state)
            with torch.no_grad():
                for buffer, was in before:
                    buffer.copy_(was)
