"""Times and counts passes through parts of a model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor, nn

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.model import ModelPerformer
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.engine.compute.tensor import TensorPerformer
from workbench.host.passes.piecewise import PiecewisePass
from workbench.host.passes.pipelining import name_pass


class PiecewiseCompute:
    """What a rank does around a pass through a part of its model. See SubModelPerformer."""

    def __init__(self, parts: ComputeParts, timing: PassTimer, tensor: TensorPerformer, pipeline: PipelinePerformer,
                 whole: ModelPerformer) -> None:  # fmt: skip
        self._parts, self._timing, self._tensor, self._pipeline, self._whole = parts, timing, tensor, pipeline, whole
        self.submodel = parts.submodel
        self.pieces = PiecewisePass(parts.model, parts.learner)

    @property
    def has_open_loss(self) -> bool:
        return bool(self._whole.open_losses)

    def list_open(self) -> list[Tensor]:
        return list(self.pieces.list_open())

    def draw_batch(self) -> Any:
        return self._parts.batches.next_batch()

    @contextmanager
    def time_piece(self, phase: str, micro: int, piece: int, of: int) -> Iterator[None]:
        """Records the block as a piece of a pass. With a pace, it lasts as long as the piece's share."""
        self._parts.at(f"{phase} of wave {micro}")
        self._tensor.begin_pass(phase)
        again = self._tensor.recomputed_share(phase) if phase == "backward" else 0.0
        share = self._pipeline.share * self.pieces.estimate_share(piece, of)
        self._timing.begin_pass(name_pass(phase, micro, piece, of), phase, share, again)
        yield
        self._timing.end_pass()

    def note_loss(self, loss: Tensor, batch: Any, micro: int, falls: bool) -> Tensor:
        """Records and checks a batch's loss, and returns it. falls: its backward goes by pieces, too"""
        shown = loss.detach()
        self._timing.losses.append(shown)
        if not falls:
            self._whole.open_losses[micro] = loss
        self._whole.check_loss(shown, batch)
        return shown

    def note_forward(self, batch: Any) -> None:
        self._parts.memory_account.note_forward(batch)

    def measure_backward(self) -> AbstractContextManager[None]:
        return self._parts.memory_account.measure_backward(False)

    def begin_narrowing(self) -> None:
        self._parts.at("narrow")

    def note_submodel(self, own_params: list[nn.Parameter]) -> None:
        self._parts.memory_account.note_submodel(own_params)
