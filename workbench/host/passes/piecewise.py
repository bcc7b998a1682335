"""Passes a model piece by piece: a forward takes memory that another batch's backward frees."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from workbench.host.core.gradient_hooks import BackwardInLoss, unscale_grads
from workbench.host.passes.stage_module import StageDone, enter_graph
from workbench.host.placement.stage_cuts import estimate_compute, list_parts, replace_forward, run_parts
from workbench.rank import StrategyError
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

_WRITTEN = "leaf Variable that requires grad"  # an in-place write to a leaf


class _OpenBatch:
    """One batch between two pieces.

    falls:  whether its backward runs by pieces, too
    made:   the latest piece's output
    graphs: of each piece before its backward, the edge of its output, and the tensor with its input's gradient
    grad:   the gradient of the next piece's output
    """

    def __init__(self, batch: object, of: int, falls: bool) -> None:
        self.batch, self.of, self.falls = batch, of, falls
        self.made: Any = None
        self.graphs: list[tuple[GradientEdge | None, Tensor | None]] = []
        self.grad: Tensor | None = None
        self.loss: Tensor | None = None

    def end_piece(self, made: object) -> object:
        """Keeps the output of a piece of the forward. Returns the batch."""
        self.made = made
        return self.batch

    def end_forward(self, loss: Tensor) -> object:
        """Keeps only the loss. Returns the batch."""
        batch, self.batch, self.made, self.loss = self.batch, None, None, loss.detach()
        return batch

    def end_backward(self, entry: Tensor | None) -> None:
        """Keeps the gradient of a piece's input `entry`, for the piece before."""
        self.grad = None if entry is None else entry.grad


class PiecewisePass:
    """Batches that a rank computes in pieces. They *rise* (forward) and *fall* (backward).

    If a batch falls by pieces, each piece's graph begins at its input. Then only the next piece has an output.
    """

    def __init__(self, model: nn.Module, learner: Learner) -> None:
        self._model, self._learner = model, learner
        self._risen: dict[int, _OpenBatch] = {}
        self._backward_in_loss = BackwardInLoss(model.named_parameters, learner.scripted)
        self._parts: list[nn.Module] | None = None

    @property
    def model_parts(self) -> list[nn.Module]:
        """Empty if the task defines none."""
        if self._parts is None:
            try:
                self._parts = list_parts(self._model, self._learner)
            except KnobError:
                self._parts = []
        return self._parts

    def count_pieces(self, most: int) -> int:
        return max(1, min(most, len(self.model_parts)))

    def estimate_share(self, piece: int, of: int) -> float:
        if of == 1:
            return 1.0
        return sum(map(estimate_compute, self._list_parts(piece, of))) / sum(map(estimate_compute, self.model_parts))

    def list_open(self) -> Iterable[Any]:
        """Yields objects whose `grad_fn` leads into the open batches' graphs."""
        for risen in self._risen.values():
            if not risen.falls and risen.made is not None:
                yield risen.made
            yield from (SimpleNamespace(grad_fn=edge.node) for edge, _ in risen.graphs if edge is not None)

    def piece_forward(
        self, draw: Callable[[], Any], micro: int, piece: int, of: int, falls: bool
    ) -> tuple[Any, Tensor | None]:
        """Returns the batch, and its loss after the last piece."""
        if piece == 0:
            if micro in self._risen:
                raise StrategyError(f"batch {micro} starts another forward before its backward has ended")
            self._risen[micro] = _OpenBatch(draw(), of, falls)
        risen = self._find_open(micro, of)
        x, entry = risen.made, None
        if piece and falls:
            x, entry = self._enter_piece(x, piece, of)
        try:
            with self._backward_in_loss.watch_forward():
                made = self._run_piece(risen.batch, x, piece, of)
        except RuntimeError as error:
            if entry is None or _WRITTEN not in text_of(error):
                raise
            raise StrategyError(
                f"piece {piece} of {of} writes into its input: compute x = x + y instead of x += y, or take pieces=1"
            ) from error
        if piece == of - 1 and not (isinstance(made, Tensor) and made.numel() == 1 and made.requires_grad):
            raise TypeError("the loss must be a scalar tensor with a gradient")
        if falls:
            risen.graphs.append((get_gradient_edge(made) if made.requires_grad else None, entry))
            made = made.detach()
        if piece < of - 1:
            return risen.end_piece(made), None
        batch = risen.end_forward(made)
        if not falls:
            del self._risen[micro]
        return batch, made

    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None:
        risen = self._find_open(micro, of)
        if not risen.falls or risen.loss is None or len(risen.graphs) != piece + 1:
            raise StrategyError(
                f"batch {micro} cannot go backward through piece {piece} of {of} now: the last piece comes first"
            )
        self._backward_in_loss.require_scale(grad)
        edge, entry = risen.graphs.pop()
        seed = torch.full_like(risen.loss, grad) if piece == of - 1 else risen.grad
        if edge is not None and seed is not None:
            with unscale_grads([p for part in self._list_parts(piece, of) for p in part.parameters()], grad):
                torch.autograd.backward((edge,), (seed,))
        risen.end_backward(entry)
        if not piece:
            del self._risen[micro]

    def _enter_piece(self, x: Tensor, piece: int, of: int) -> tuple[Tensor, Tensor]:
        """Copies `x` only if the first layer works in place."""
        first = next(m for m in self._list_parts(piece, of)[0].modules() if not next(m.children(), None))
        if getattr(first, "inplace", False) or not x.is_floating_point():
            return enter_graph(x)
        x = x.detach().requires_grad_()
        return x, x

    def _find_open(self, micro: int, of: int) -> _OpenBatch:
        if micro not in self._risen or self._risen[micro].of != of:
            raise StrategyError(f"batch {micro} has not begun its forward through {of} pieces")
        return self._risen[micro]

    def _list_parts(self, piece: int, of: int) -> list[nn.Module]:
        n = len(self.model_parts)
        return self.model_parts[piece * n // of : (piece + 1) * n // of]

    def _run_piece(self, batch: object, x: object, piece: int, of: int) -> Any:
        if of == 1:
            return self._learner.loss(self._model, batch)
        parts, last = self._list_parts(piece, of), piece == of - 1

        def mine(*inputs: object, **named: object) -> Any:
            given = run_parts(parts, x) if piece else run_parts(parts, *inputs, **named)
            if last:
                return given
            raise StageDone(given)

        with replace_forward(self._model, mine):
            try:
                return self._learner.loss(self._model, batch)
            except StageDone as handed:
                return handed.value
