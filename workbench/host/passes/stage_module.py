"""Computes one pipeline stage: the user's own loss, with this stage's parts as the model."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.passes.split_backward import SplitBackward
from workbench.host.placement.stage_cuts import replace_forward, run_parts
from workbench.rank import StrategyError
from workbench.rank.errors import explain_missing_forward
from workbench.tasks import TaskError

Loss = Callable[[nn.Module, Any], Tensor]


class StageDone(BaseException):
    """Leaves the user's loss at the end of a stage before the last. The user's code does not catch it."""

    def __init__(self, value: Any) -> None:
        self.value = value


Pass = tuple[int, int]  # micro-batch, piece of this stage


class StageModule:
    """One stage's pieces, and micro-batches between forward and backward.

    opened: by micro-batch and piece, the output, whose graph holds what backward needs
    """

    def __init__(self, model: nn.Module, pieces: list[tuple[nn.Module, ...]], stage: int, stages: int) -> None:
        self.model, self.pieces, self.stage, self.stages = model, pieces, stage, stages
        self.opened: dict[Pass, Tensor] = {}
        self._came: dict[Pass, Tensor] = {}
        self._halves: dict[Pass, SplitBackward | Tensor] = {}  # backwards without their second half

    def run_forward(self, loss: Loss, batch: object, x: Tensor | None, micro: int, chunk: int = 0) -> Tensor:
        """Returns a piece's detached output, or the loss.

        x: the previous piece's output; None on the first piece
        """
        if x is not None:
            x, self._came[micro, chunk] = enter_graph(x)
        last = self.stage == self.stages - 1 and chunk == len(self.pieces) - 1
        parts = self.pieces[chunk]

        def mine(*inputs: object, **named: object) -> Any:
            given = run_parts(parts, *inputs, **named) if x is None else run_parts(parts, x)
            if last:
                return given
            raise StageDone(given)

        with replace_forward(self.model, mine):
            try:
                made = loss(self.model, batch)
            except StageDone as handed:
                made = handed.value
        self._require_output(made, last)
        self.opened[micro, chunk] = made
        return made.detach()

    def run_backward(self, grad: Tensor | float, micro: int, chunk: int = 0) -> Tensor | None:
        """Returns the gradient of a piece's input; None on the first piece.

        grad: on the model's last piece a factor of the loss
        """
        if (micro, chunk) not in self.opened:
            raise StrategyError(explain_missing_forward(micro))
        made = self.opened.pop((micro, chunk))
        if made.requires_grad:  # else no parameter before it learns
            made.backward(grad if isinstance(grad, Tensor) else torch.full_like(made, grad))
        x = self._came.pop((micro, chunk), None)
        if x is None:
            return None
        return self._require_gradient(x.grad, chunk)

    def backward_inputs(self, grad: Tensor | float, micro: int, chunk: int = 0) -> Tensor | None:
        made = self.opened.get((micro, chunk))
        if made is None:
            raise StrategyError(explain_missing_forward(micro))
        grad = grad if isinstance(grad, Tensor) else torch.full_like(made, grad)
        x = self._came.pop((micro, chunk), None)
        if x is None:
            self._halves[micro, chunk] = grad
            return None
        if not (made.requires_grad and x.requires_grad):
            return self._require_gradient(None, chunk)
        halves = self._halves[micro, chunk] = SplitBackward(made, x, self.list_params(chunk))
        found = halves.of_input(grad)
        return self._require_gradient(found, chunk)

    def backward_weights(self, micro: int, chunk: int = 0) -> None:
        if (micro, chunk) not in self._halves:
            raise StrategyError(f"the second half of micro-batch {micro}'s backward was asked for before its first")
        made, left = self.opened.pop((micro, chunk)), self._halves.pop((micro, chunk))
        if isinstance(left, SplitBackward):
            left.of_params()
        elif made.requires_grad:
            made.backward(left)

    def _require_gradient(self, found: Tensor | None, chunk: int) -> Tensor:
        if found is None:
            raise StrategyError(
                f"stage {self.stage}: its piece {chunk} returns no gradient for its input; pass float tensors "
                f"between stages, and use them in every piece"
            )
        return found

    def drop_micros(self, micros: Container[int]) -> None:
        for held in (self.opened, self._came):
            for entry in [entry for entry in held if entry[0] in micros]:
                del held[entry]

    def list_buffers(self) -> list[Tensor]:
        return [x for parts in self.pieces for part in parts for x in part.buffers()]

    def list_params(self, chunk: int) -> list[nn.Parameter]:
        return [p for part in self.pieces[chunk] for p in part.parameters()]

    def _require_output(self, made: Any, last: bool) -> None:
        if last:
            if not isinstance(made, Tensor) or made.numel() != 1 or not made.requires_grad:
                raise TypeError("the loss must be a scalar tensor with a gradient")
        elif not isinstance(made, Tensor):
            raise TaskError(
                f"the last part of a piece on stage {self.stage} returned a {type(made).__name__}: it must return "
                f"one Tensor for the next stage"
            )


class _EnterGraph(torch.autograd.Function):
    """Sends the gradient to a stand-in without memory."""

    @staticmethod
    def forward(ctx: Any, stand_in: Tensor, x: Tensor) -> Tensor:
        return x.clone()  # in-place layers write

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def enter_graph(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a part's input, and the tensor for its gradient."""
    if not (x.is_floating_point() or x.is_complex()):
        return x, x
    stand_in = x.new_zeros(1).expand(x.shape).requires_grad_()
    entered: Tensor = _EnterGraph.apply(stand_in, x)  # type: ignore[no-untyped-call]
    return entered, stand_in


def cut_batch(batch: object, count: int) -> list[Any]:
    """Cuts along the first dimension. Raises TaskError if parts cannot be equal."""
    if count == 1:
        return [batch]
    sizes = {x.shape[0] for x in list_tensors(batch) if x.dim()}
    if not sizes:
        raise TaskError("micro_batches: the batch has no tensors to cut; take micros=1")
    if len(sizes) > 1 or next(iter(sizes)) % count:
        listed = ", ".join(map(str, sorted(sizes)))
        raise TaskError(
            f"micros={count}: the batch's tensors have {listed} rows and cannot be cut into {count} equal parts; the "
            f"first dimension of each must count the examples, and be a multiple of {count} (DataLoader: "
            f"drop_last=True)"
        )
    return [_take_part(batch, number, count, next(iter(sizes))) for number in range(count)]


def list_tensors(batch: object) -> list[Tensor]:
    """Lists tensors in order."""
    if isinstance(batch, Tensor):
        return [batch]
    if isinstance(batch, Mapping):
        batch = list(batch.values())
    return [x for each in batch for x in list_tensors(each)] if isinstance(batch, list | tuple) else []


def _take_part(batch: object, number: int, count: int, rows: int) -> Any:
    if isinstance(batch, Tensor):
        return batch.chunk(count)[number] if batch.dim() else batch
    if isinstance(batch, Mapping):
        cut = {k: _take_part(v, number, count, rows) for k, v in batch.items()}
        return cut if type(batch) is dict else type(batch)(cut)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple):
        if len(batch) == rows and not list_tensors(batch):  # such as names
            return batch[number * rows // count : (number + 1) * rows // count]
        parts = [_take_part(v, number, count, rows) for v in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    return batch
