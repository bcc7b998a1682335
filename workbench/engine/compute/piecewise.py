"""Performs passes through parts of a model."""

from __future__ import annotations

import torch

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.model import ModelPerformer
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.passes.pipelining import name_pass
from workbench.rank import StrategyError


class PiecewisePerformer:
    """Computes parts of a model: batches that rise and fall piece by piece, and sub-models."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, tensor: TensorPerformer, pipeline: PipelinePerformer,
                 whole: ModelPerformer) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._pipeline, self._whole = parts, timing, tensor, pipeline, whole
        self._waves = PiecewisePass(parts.model, parts.learner)

    def list_open(self) -> list[torch.Tensor]:
        return list(self._waves.list_open())

    def count_pieces(self, most: int) -> int:
        return self._waves.count_pieces(most)

    def piece_forward(self, micro: int, piece: int, of: int, falls: bool) -> torch.Tensor | None:
        """Computes a piece of a forward. Returns the loss after the last piece."""
        self._begin_pass("forward", micro, piece, of)
        with torch.enable_grad():
            drawn, loss = self._waves.piece_forward(self._parts.batches.next_batch, micro, piece, of, falls)
        shown = None
        if loss is not None:
            shown = loss.detach()
            self._timing.losses.append(shown)
            if not falls:
                self._whole.open_losses[micro] = loss
            self._whole.check_loss(shown, drawn)
        self._parts.memory_account.note_forward(drawn)
        self._timing.end_pass()
        return shown

    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None:
        self._begin_pass("backward", micro, piece, of)
        with self._parts.memory_account.measure_backward(False):
            self._waves.piece_backward(micro, piece, of, grad)
        self._timing.end_pass()

    def _begin_pass(self, phase: str, micro: int, piece: int, of: int) -> None:
        self._parts.at(f"{phase} of wave {micro}")
        self._tensor.begin_pass(phase)
        again = self._tensor.recomputed_share(phase) if phase == "backward" else 0.0
        share = self._pipeline.share * self._waves.estimate_share(piece, of)
        self._timing.begin_pass(name_pass(phase, micro, piece, of), phase, share, again)

    def narrow_model(self, kept: list[torch.Tensor] | None, scaled: bool) -> float:
        """Switches to a sub-model, or back to the model if `kept` is None. Returns its share of the compute."""
        if self._whole.open_losses:
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        self._parts.at("narrow")
        share: float = self._parts.submodel.switch_to(kept, scaled)
        self._parts.memory_account.note_submodel(self._parts.submodel.own_params)
        return share
