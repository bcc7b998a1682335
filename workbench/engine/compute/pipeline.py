"""Performs the forward and backward of micro-batches in a stage of a replica, on the engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.compute.hooks import GradientHooks
from workbench.engine.compute.parts import ComputeParts
from workbench.engine.compute.tensor import TensorPerformer
from workbench.engine.compute.timing import Timing
from workbench.host.core.drive import drive
from workbench.host.passes.flow import Flow
from workbench.host.passes.meetings import Plans
from workbench.host.passes.piece import Piece
from workbench.host.passes.pipelining import WEIGHTS, one_batch, pass_name
from workbench.host.placement.spread import Spread
from workbench.rank import Op, StrategyError


class PipelinePerformer:
    """Computes this rank's stage of a replica, if `piece` is set.

    piece:    this rank's part of the model; None while it holds all layers
    share:    this rank's share of the model's compute: of its stage, and of its slices
    flow:     the micro-batches in flight
    """

    def __init__(self, parts: ComputeParts, timing: Timing, tensor: TensorPerformer, hooks: GradientHooks,
                 perform: Callable[[Op], Any]) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._hooks = parts, timing, tensor, hooks
        self._rank, self._perform = parts.rank, perform
        self.piece: Piece | None = None
        self.share = 1.0
        self.flow = Flow(lambda: parts.layout, lambda after: parts.batches.coming(after), self._buffers, self._forget,
                         lambda: parts.experiment().steps)  # fmt: skip
        self._shares: tuple[float, ...] = ()  # the share of each of its pieces
        self._batches: dict[int, Any] = {}  # batches without a backward so far
        self._count = 1  # micro-batches of a batch
        self._left: list[int] = []  # by piece: the backwards left of this batch
        self._exchanged = False

    def _buffers(self) -> list[Tensor]:
        return self.piece.buffers() if self.piece is not None else []

    def _forget(self, micros: list[int]) -> None:
        if self.piece is not None:
            self.piece.forget(micros)

    def opened(self) -> list[Tensor]:
        """Returns the activations whose backward is still to come."""
        return list(self.piece.opened.values()) if self.piece is not None else []

    def keep_batch(self, micro: int, batch: Any) -> None:
        """Keeps a batch until its backward, which takes it through the stages, both ways."""
        self._batches[micro] = batch

    def lie(self, spread: Spread | None, seed: int) -> None:
        """Takes over this rank's part of the model: the whole model if `spread` is None.

        seed: of random numbers that ranks with slices draw alike
        """
        self.piece, self.share = None, 1.0
        here, index = spread.place(self._rank.id) if spread else (0, 0)
        dealt = spread.split.share if spread and spread.split else 1.0
        if spread and (stages := spread.stages):
            self.piece = Piece(self._parts.model, stages.of(here), here, len(stages))
            self.share, self._shares = stages.share(here), tuple(s * dealt for s in stages.shares[here :: len(stages)])
        self.share *= dealt
        self._tensor.deal(spread.split if spread else None, index, seed)

    def tune(self, plans: tuple[Plans, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        """Applies the partition's present knobs. plans, units, again: of all stages, as TensorPerformer takes them"""
        here = slice(self.piece.stage, None, self.piece.stages) if self.piece else slice(None)
        self._tensor.tune(plans[here], units, again[here])

    def run_batch(self, grad: float | None, micro: int, exchanged: bool) -> Tensor:
        """Takes a batch through the stages, forward and backward. Returns its loss."""
        assert self.piece is not None
        if micro not in self._batches:
            raise StrategyError(f"backward of micro-batch {micro} was asked for before its forward")
        partition = self._parts.experiment().partition
        self._count = count = partition.micro_batches
        self._left = [count] * partition.pieces
        batch, self._exchanged = self._batches.pop(micro), exchanged
        self.flow.open(batch, partition)
        self._tensor.meet_before(batch)
        share = (1.0 if grad is None else grad) / count
        passes = one_batch(self._rank.group("stage"), partition, share, self.flow, self._rank.step)
        loss: Tensor = drive(passes, self._perform, self._parts.alone)
        return loss

    def stage_forward(self, x: Tensor | None, micro: int, chunk: int) -> Tensor:
        """Runs a piece's forward, together with the ranks that hold the other slices of its matrices."""
        assert self.piece is not None
        self._begin("forward", micro, chunk)
        part, number = self.flow.part(micro), self.flow.number(micro)
        group = self._tensor.group
        with torch.enable_grad(), group.passing(x, self.piece.params(chunk)) if group else nullcontext():
            with self.flow.forward(micro):
                made = self.piece.forward(self._parts.learner.loss, part, x, number, chunk)
        self._parts.ledger.forward(list(self.flow.inputs.values()))
        self._timing.end_pass()
        return made

    def stage_backward(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        """Runs a piece's backward. Returns the gradient of its input."""
        assert self.piece is not None
        return self._backward_of("backward", partial(self.piece.backward, grad), micro, chunk)

    def stage_inputs(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        """Runs the half of a backward that gives the input its gradient, and returns that."""
        assert self.piece is not None
        self._begin("backward", micro, chunk, 0.5)
        came = self.piece.inputs(grad, self.flow.number(micro), chunk)
        self._timing.end_pass()
        return came

    def stage_weights(self, micro: int, chunk: int) -> None:
        """Runs the half of a backward that gives parameters their gradients."""
        assert self.piece is not None
        self._backward_of(WEIGHTS, self.piece.weights, micro, chunk, 0.5)

    def _backward_of(self, name: str, run: Callable[[int, int], Any], micro: int, chunk: int, part: float = 1.0) -> Any:
        """Runs a backward, or its second half, that gives parameters their gradients."""
        assert self.piece is not None
        begun = sum(self._left) < len(self._left) * self._count
        self._left[chunk] -= 1
        if self._exchanged and not any(self._left):  # with this one, gradients are those of the whole batch
            mine = {id(p) for p in self.piece.params(chunk)}  # a parameter may be tied to another piece's
            self._hooks.open([place.param for place in self._parts.layout.order if id(place.param) not in mine])
        self._begin(name, micro, chunk, part)
        with self._parts.ledger.backward(self._hooks.listening), self.flow.backward(micro):
            came = run(self.flow.number(micro), chunk)
            if self._exchanged and not begun and any(self._left):
                self._hooks.attach()
                self._parts.layout.take_in()
        self._timing.end_pass()
        return came

    def _begin(self, name: str, micro: int, chunk: int, part: float = 1.0) -> None:
        """Begins a pass, or `part` of one."""
        assert self.piece is not None
        phase = name.partition(" ")[0]
        self._parts.at(f"{name} of micro-batch {micro}")
        self._tensor.begin_pass(phase, chunk)
        called = pass_name(name, self.flow.number(micro), chunk, len(self.piece.pieces))
        again = self._tensor.again(phase, chunk)
        self._timing.begin_pass(called, phase, self._shares[chunk] * part / self._count, again)

    def sum_of_replica(self, squares: float) -> float:
        """Returns the sum over all stages of a replica."""
        place = self._parts.layout.order[0].param.device
        x = torch.tensor([squares], dtype=torch.float64, device=place)
        return float(self._perform(self._rank.inside.all_reduce(x, "sum", "gradient norm")))
