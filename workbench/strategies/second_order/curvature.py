"""Estimates curvature on one rank: second moments of its layers, and Gauss-Newton products.

Strategies sum over ranks. Hooks exist only while a strategy uses them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.hooks import RemovableHandle

from workbench.rank import Bucket, StrategyError
from workbench.rank.bucket import Part
from workbench.strategies.second_order.factors import Factors
from workbench.strategies.second_order.layer_rows import (
    Layer,
    factor_sizes,
    find_layers,
    make_input_rows,
    make_slope_rows,
    name_parameters,
)


class NamedParameter(Protocol):
    """A parameter and its name in the model."""

    @property
    def name(self) -> str: ...
    @property
    def param(self) -> nn.Parameter: ...


class CurvatureLayout(Protocol):
    """A model's trained parameters and their buckets."""

    @property
    def order(self) -> Sequence[NamedParameter]: ...
    @property
    def buckets(self) -> list[Bucket]: ...


_LOCK, _OPEN = threading.Lock(), list[ExitStack]()  # one stack per open block


@contextmanager
def _twice_differentiable() -> Iterator[None]:
    """Computes attention by the only kernel with a second derivative.

    The setting is process-wide: the first thread makes it, and the last one restores it.
    """
    with _LOCK:
        held = ExitStack()
        if not _OPEN:
            held.enter_context(sdpa_kernel(SDPBackend.MATH))
        _OPEN.append(held)
    try:
        yield
    finally:
        with _LOCK:
            if len(_OPEN) == 1:
                _OPEN.pop().close()
            else:
                _OPEN.pop()  # the first stack holds the setting


class _LayerSums:
    """Sums of a a^T (inputs) and g g^T (slopes), and their counts."""

    def __init__(self, layer: Layer) -> None:
        kind, like = torch.promote_types(layer.weight.dtype, torch.float32), layer.weight
        self.inputs, self.outputs = (torch.zeros(n, n, dtype=kind, device=like.device) for n in factor_sizes(layer))
        self.terms = self.slopes = 0

    def add_inputs(self, rows: Tensor, terms: int, again: bool) -> None:
        """Adds a call's rows of inputs, of `terms` terms of the loss. again: of a layer called before in this pass"""
        with torch.no_grad():
            self.inputs.addmm_(rows.T, rows)
        self.terms += terms
        self.slopes += 0 if again else len(rows)


class FactorCollector:
    """Collects inputs and slopes of Linear layers and convolutions, from now until `take_factors`.

    It assumes that the loss is the mean over the N rows of a Linear layer, or the N images of a convolution. So the
    gradient of one example's loss is N times autograd's. It sums a convolution's inputs over the T places of an image,
    and averages its slopes. All batches have equal weight. A layer called again in a pass adds rows of inputs, and
    gradients of the same N terms.

    """

    def __init__(self, model: nn.Module, layout: CurvatureLayout) -> None:
        self._layers = find_layers(model, {place.name for place in layout.order})
        self._sums = {name: _LayerSums(layer) for name, layer in self._layers.items()}
        self._called: set[str] = set()  # in this pass
        self._scale = 1.0  # of the loss in the current backward
        self._removers: list[RemovableHandle] = [model.register_forward_pre_hook(lambda *_: self._called.clear())]
        for name, layer in self._layers.items():
            self._removers.append(layer.register_forward_hook(partial(self._add_inputs, name)))

    def begin_backward(self, grad: float | None) -> None:
        """grad: the factor of the loss; None: 1"""
        self._scale = 1.0 if grad is None else grad

    def take_factors(self) -> list[Factors]:
        """Returns factors, zeros for a layer without a call. Removes the hooks."""
        for remover in self._removers:
            remover.remove()
        found = []
        for name, layer in self._layers.items():
            sums = self._sums[name]
            inputs, outputs = sums.inputs / max(1, sums.terms), sums.outputs / max(1, sums.slopes)
            found.append(Factors(*name_parameters(name, layer), inputs, outputs))
        return found

    def _add_inputs(self, name: str, layer: Layer, given: tuple[Tensor, ...], made: Tensor) -> None:
        if not made.requires_grad:  # an evaluation, or a repeated pass
            return
        sums = self._sums[name]
        with torch.no_grad():
            rows, terms = make_input_rows(layer, given[0], sums.inputs.dtype)
        sums.add_inputs(rows, terms, again=name in self._called)
        self._called.add(name)
        made.register_hook(partial(self._add_slopes, sums, layer, terms))

    def _add_slopes(self, sums: _LayerSums, layer: Layer, terms: int, grad: Tensor) -> None:
        g = make_slope_rows(layer, grad, sums.outputs.dtype)
        sums.outputs.addmm_(g.T, g, alpha=(terms / self._scale) ** 2)


class GaussNewtonProducts:
    """Products with the Gauss-Newton matrix J^T H J of one batch, at the initial parameters.

    J is the Jacobian of the model's output, H the Hessian of the loss with respect to that output. J v is the
    derivative of u -> J^T u. So a product is 3 backwards through one retained graph (Pearlmutter 1994; Schraudolph
    2002). Raises StrategyError if the loss does not call the model exactly once, or is linear in its output.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], batch: object, layout: CurvatureLayout) -> None:
        self._buckets, by_name = layout.buckets, {place.name: place.param for place in layout.order}
        params = [by_name[part.name] for bucket in self._buckets for part in bucket.parts]
        self._trains = [p.requires_grad for p in params]  # not by frozen ones
        self._trained = [p for p in params if p.requires_grad]
        calls: list[list[Tensor]] = []

        def cut(module: nn.Module, given: object, made: Any) -> Any:
            """Gives the loss its own graph."""
            flat, spec = tree_flatten(made)
            through = [isinstance(x, Tensor) and x.requires_grad for x in flat]
            self._made = [x for x, is_one in zip(flat, through, strict=True) if is_one]
            flat = [x.detach().requires_grad_() if is_one else x for x, is_one in zip(flat, through, strict=True)]
            calls.append([x for x, is_one in zip(flat, through, strict=True) if is_one])
            return tree_unflatten(flat, spec)

        hook = model.register_forward_hook(cut)
        try:
            with torch.enable_grad(), _twice_differentiable():
                value = loss(model, batch)
        finally:
            hook.remove()
        if len(calls) != 1 or not calls[0]:
            raise StrategyError(
                f"a Gauss-Newton product: the loss calls the model {len(calls)} times, and must call it once and use "
                f"only the tensors that it returns; change loss(model, batch), or take another strategy"
            )
        self._leaves = calls[0]
        with torch.enable_grad(), _twice_differentiable():
            slopes = torch.autograd.grad(value, self._leaves, create_graph=True, allow_unused=True)
            bent = [i for i, s in enumerate(slopes) if s is not None and s.requires_grad]
            if not bent:
                raise StrategyError(
                    "a Gauss-Newton product: the loss is linear in the model's output, so it has no curvature; "
                    "compute the loss from the model's predictions in loss(model, batch), or take another strategy"
                )
            self._made, self._leaves = [self._made[i] for i in bent], [self._leaves[i] for i in bent]
            self._slopes = [slopes[i] for i in bent]
            self._along = [torch.zeros_like(x, requires_grad=True) for x in self._made]
            back = self._to_params(self._along, create_graph=True)
        self._back = [(i, b) for i, b in enumerate(back) if b is not None and b.requires_grad]

    def _to_params(self, given: Sequence[Tensor], **how: bool) -> list[Tensor | None]:
        """Returns gradients, None for frozen parameters."""
        found = iter(torch.autograd.grad(self._made, self._trained, given, allow_unused=True, **how))
        return [next(found) if trains else None for trains in self._trains]

    def multiply_vector(self, vector: list[Tensor]) -> list[Tensor]:
        """vector and product: (n,) by bucket"""
        v = [x.view(shape) for flat, bucket in zip(vector, self._buckets, strict=True)
             for x, shape in _cut_parts(flat, bucket.parts)]  # fmt: skip
        with _twice_differentiable():
            out = torch.autograd.grad([b for _, b in self._back], self._along, [v[i] for i, _ in self._back],
                                      retain_graph=True, materialize_grads=True)  # fmt: skip
            pulled = torch.autograd.grad(self._slopes, self._leaves, out, retain_graph=True, materialize_grads=True)
            grads = self._to_params(pulled, retain_graph=True)
        found, flat = iter(grads), []
        for x, bucket in zip(vector, self._buckets, strict=True):
            product = torch.zeros_like(x)
            for (into, _), grad in zip(_cut_parts(product, bucket.parts), found, strict=False):
                if grad is not None:
                    into.copy_(grad.reshape(-1))
            flat.append(product)
        return flat


def _cut_parts(flat: Tensor, parts: Iterable[Part]) -> list[tuple[Tensor, tuple[int, ...]]]:
    return [(flat[part.start : part.stop], part.shape) for part in parts]


class CurvatureEstimator:
    """One rank's estimates."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], layout: CurvatureLayout) -> None:
        self._model, self._loss, self._layout = model, loss, layout
        self._batch: object = None  # the last forward's, until an update
        self._collecting: FactorCollector | None = None
        self._products: GaussNewtonProducts | None = None

    def note_forward(self, batch: object) -> None:
        self._batch, self._products = batch, None

    def note_backward(self, grad: float | None) -> None:
        if self._collecting is not None:
            self._collecting.begin_backward(grad)

    def note_update(self) -> None:
        self._batch = self._products = None

    def collect_factors(self) -> None:
        if self._collecting is not None:
            self._collecting.take_factors()
        self._collecting = FactorCollector(self._model, self._layout)

    def take_factors(self) -> list[Factors]:
        if self._collecting is None:
            raise StrategyError("factors were requested before `collect`")
        collecting, self._collecting = self._collecting, None
        return collecting.take_factors()

    def compute_product(self, vector: list[Tensor], step: int) -> list[Tensor]:
        if self._products is None:
            with self._repeat_batch(step):
                self._products = GaussNewtonProducts(self._model, self._loss, self._batch, self._layout)
        return self._products.multiply_vector(vector)

    def compute_value(self, step: int) -> Tensor:
        self._products = None
        with self._repeat_batch(step), torch.no_grad():
            return self._loss(self._model, self._batch).detach()

    @contextmanager
    def _repeat_batch(self, step: int) -> Iterator[None]:
        """Encloses another computation of the batch, with the step's random numbers.

        It discards buffer writes. Raises StrategyError before a forward and after the update.
        """
        if self._batch is None:
            raise StrategyError("a batch's loss was requested again before its forward, or after the update")
        where = next(self._model.parameters()).device
        kept = [(m, name, b) for m in self._model.modules() for name, b in m._buffers.items() if b is not None]
        for module, name, buffer in kept:
            module._buffers[name] = buffer.clone()
        try:
            with torch.random.fork_rng([where] if where.type == "cuda" else []):
                torch.manual_seed(step)
                yield
        finally:
            for module, name, buffer in kept:
                module._buffers[name] = buffer


class CurvatureOutline:
    """The same with sizes only. loss: a loss without a value"""

    def __init__(self, model: nn.Module, layout: CurvatureLayout, loss: Tensor) -> None:
        self._model, self._layout, self._loss = model, layout, loss

    def collect_factors(self) -> None:
        """Does nothing: inputs have no values."""

    def take_factors(self) -> list[Factors]:
        found = []
        for name, layer in find_layers(self._model, {place.name for place in self._layout.order}).items():
            kind = torch.promote_types(layer.weight.dtype, torch.float32)
            pair = (torch.empty(n, n, dtype=kind, device=layer.weight.device) for n in factor_sizes(layer))
            found.append(Factors(*name_parameters(name, layer), *pair))
        return found

    def compute_product(self, vector: list[Tensor], step: int) -> list[Tensor]:
        return [torch.empty_like(x) for x in vector]

    def compute_value(self, step: int) -> Tensor:
        return self._loss
