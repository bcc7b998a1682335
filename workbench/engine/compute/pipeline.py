"""Passes of micro-batches in a stage of a replica."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.gradient_hooks import GradientHooks
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.core.drive import drive_coroutine
from workbench.host.passes.in_flight import InFlight
from workbench.host.passes.pipelining import WEIGHT_HALF, name_pass, run_batch
from workbench.host.passes.stage_module import StageModule
from workbench.host.passes.tensor_schedule import PassPlan
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.rank import Op, StrategyError
from workbench.rank.errors import explain_missing_forward


class PipelinePerformer:
    """This rank's stage of a replica.

    piece:            this rank's part of the model; None while it holds all layers
    share:            its share of the model's compute: of its stage, and of its slices
    micros_in_flight: the micro-batches in flight
    """

    def __init__(self, parts: ComputeParts, timing: PassTimer, tensor: TensorPerformer, hooks: GradientHooks,
                 perform: Callable[[Op], Any]) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._hooks = parts, timing, tensor, hooks
        self._rank, self._perform = parts.rank, perform
        self.piece: StageModule | None = None
        self.share = 1.0
        self.micros_in_flight = InFlight(
            lambda: parts.layout,
            lambda after: parts.batches.peek_batch(after),
            self._list_buffers,
            self._forget_micros,
            lambda: parts.experiment().steps,
        )
        self._shares: tuple[float, ...] = ()  # of each of its pieces
        self._batches: dict[int, Any] = {}  # without a backward so far
        self._count = 1  # micro-batches of a batch
        self._left: list[int] = []  # by piece: the backwards left of this batch
        self._exchanged = False

    def _list_buffers(self) -> list[Tensor]:
        return self.piece.list_buffers() if self.piece is not None else []

    def _forget_micros(self, micros: list[int]) -> None:
        if self.piece is not None:
            self.piece.drop_micros(micros)

    def list_open(self) -> list[Tensor]:
        return list(self.piece.opened.values()) if self.piece is not None else []

    def keep_batch(self, micro: int, batch: Any) -> None:
        self._batches[micro] = batch

    def take_part(self, spread: ReplicaSpread | None, seed: int) -> None:
        """Takes over `spread`'s part for this rank; None: the whole model.

        seed: of random numbers that ranks with slices draw alike
        """
        self.piece, self.share = None, 1.0
        here, index = spread.locate_rank(self._rank.id) if spread else (0, 0)
        split_share = spread.split.share if spread and spread.split else 1.0
        if spread and (stages := spread.stages):
            self.piece = StageModule(self._parts.model, stages.pieces_of_stage(here), here, len(stages))
            self.share, self._shares = (
                stages.compute_share(here),
                tuple(s * split_share for s in stages.shares[here :: len(stages)]),
            )
        self.share *= split_share
        self._tensor.take_slices(spread.split if spread else None, index, seed)

    def tune_partition(self, plans: tuple[PassPlan, ...], units: list[nn.Module], again: tuple[float, ...]) -> None:
        """Takes all stages' values, see TensorPerformer."""
        here = slice(self.piece.stage, None, self.piece.stages) if self.piece else slice(None)
        self._tensor.tune_partition(plans[here], units, again[here])

    def run_batch(self, grad: float | None, micro: int, exchanged: bool) -> Tensor:
        """Runs a batch forward and backward through the stages. Returns its loss."""
        assert self.piece is not None
        if micro not in self._batches:
            raise StrategyError(explain_missing_forward(micro))
        partition = self._parts.experiment().partition
        self._count = count = partition.micro_batches
        self._left = [count] * partition.pieces
        batch, self._exchanged = self._batches.pop(micro), exchanged
        self.micros_in_flight.cut_batch(batch, partition)
        self._tensor.meet_before(batch)
        share = (1.0 if grad is None else grad) / count
        passes = run_batch(self._rank.group("stage"), partition, share, self.micros_in_flight, self._rank.step)
        loss: Tensor = drive_coroutine(passes, self._perform, self._parts.alone)
        return loss

    def stage_forward(self, x: Tensor | None, micro: int, chunk: int) -> Tensor:
        """Runs a piece's forward, together with the ranks that hold the other slices of its matrices."""
        assert self.piece is not None
        self._begin_pass("forward", micro, chunk)
        part, number = self.micros_in_flight.take_micro(micro), self.micros_in_flight.number_micro(micro)
        group = self._tensor.group
        with torch.enable_grad(), group.run_pass(x, self.piece.list_params(chunk)) if group else nullcontext():
            with self.micros_in_flight.read_in_forward(micro):
                made = self.piece.run_forward(self._parts.learner.loss, part, x, number, chunk)
        self._parts.memory_account.note_forward(list(self.micros_in_flight.inputs.values()))
        self._timing.end_pass()
        return made

    def stage_backward(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        """Returns the gradient of the piece's input."""
        assert self.piece is not None
        return self._run_stage_backward("backward", partial(self.piece.run_backward, grad), micro, chunk)

    def stage_inputs(self, grad: Tensor | float, micro: int, chunk: int) -> Tensor | None:
        """Runs the half that computes and returns the input's gradient."""
        assert self.piece is not None
        self._begin_pass("backward", micro, chunk, 0.5)
        came = self.piece.backward_inputs(grad, self.micros_in_flight.number_micro(micro), chunk)
        self._timing.end_pass()
        return came

    def stage_weights(self, micro: int, chunk: int) -> None:
        assert self.piece is not None
        self._run_stage_backward(WEIGHT_HALF, self.piece.backward_weights, micro, chunk, 0.5)

    def _run_stage_backward(
        self, name: str, run: Callable[[int, int], Any], micro: int, chunk: int, part: float = 1.0
    ) -> Any:
        """Runs a backward, or its half for parameters."""
        assert self.piece is not None
        begun = sum(self._left) < len(self._left) * self._count
        self._left[chunk] -= 1
        if self._exchanged and not any(self._left):  # gradients now become the whole batch's
            mine = {id(p) for p in self.piece.list_params(chunk)}  # a parameter may be tied to another piece's
            self._hooks.begin_exchange(
                [place.param for place in self._parts.layout.order if id(place.param) not in mine]
            )
        self._begin_pass(name, micro, chunk, part)
        with (
            self._parts.memory_account.measure_backward(self._hooks.is_exchanging),
            self.micros_in_flight.read_in_backward(micro),
        ):
            came = run(self.micros_in_flight.number_micro(micro), chunk)
            if self._exchanged and not begun and any(self._left):
                self._hooks.attach_hooks()
                self._parts.layout.move_gradients()
        self._timing.end_pass()
        return came

    def _begin_pass(self, name: str, micro: int, chunk: int, part: float = 1.0) -> None:
        assert self.piece is not None
        phase = name.partition(" ")[0]
        self._parts.at(f"{name} of micro-batch {micro}")
        self._tensor.begin_pass(phase, chunk)
        called = name_pass(name, self.micros_in_flight.number_micro(micro), chunk, len(self.piece.pieces))
        again = self._tensor.recomputed_share(phase, chunk)
        self._timing.begin_pass(called, phase, self._shares[chunk] * part / self._count, again)

    def sum_over_stages(self, squares: float) -> float:
        place = self._parts.layout.order[0].param.device
        x = torch.tensor([squares], dtype=torch.float64, device=place)
        return float(self._perform(self._rank.inside.all_reduce(x, "sum", "gradient norm")))
