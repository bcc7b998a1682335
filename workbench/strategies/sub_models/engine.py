"""Performs the verbs for pieces and sub-models on a real rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from workbench.rank import StrategyError, Units
from workbench.strategies.sub_models.sub_model import SubModel


class Pieces(Protocol):
    """Batches that go through a model piece by piece."""

    def count_pieces(self, most: int) -> int: ...
    def piece_forward(
        self, draw: Callable[[], Any], micro: int, piece: int, of: int, falls: bool
    ) -> tuple[Any, Tensor | None]: ...
    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None: ...


class SubModelHost(Protocol):
    """What the performer uses of a real rank."""

    @property
    def pieces(self) -> Pieces: ...
    @property
    def submodel(self) -> SubModel: ...
    @property
    def has_open_loss(self) -> bool: ...
    def draw_batch(self) -> Any: ...
    def time_piece(self, phase: str, micro: int, piece: int, of: int) -> AbstractContextManager[None]:
        """Records the block as a piece of a pass. With a pace, it lasts as long as the piece's share."""

    def note_loss(self, loss: Tensor, batch: Any, micro: int, falls: bool) -> Tensor:
        """Records and checks a batch's loss, and returns it. falls: its backward goes by pieces, too"""

    def note_forward(self, batch: Any) -> None:
        """Counts the memory after a piece's forward."""

    def measure_backward(self) -> AbstractContextManager[None]:
        """Counts the memory of the backward in the block."""

    def begin_narrowing(self) -> None: ...
    def note_submodel(self, own_params: list[nn.Parameter]) -> None:
        """Counts the memory of a sub-model's own parameters."""


class SubModelPerformer:
    """Computes parts of a model: batches that rise and fall piece by piece, and sub-models."""

    def __init__(self, host: SubModelHost) -> None:
        self._host = host
        self.verbs: dict[str, Callable[..., Any]] = {
            "pieces": host.pieces.count_pieces,
            "rise": self.piece_forward,
            "fall": self.piece_backward,
            "units": self.list_units,
            "narrow": self.narrow_model,
        }

    def piece_forward(self, micro: int, piece: int, of: int, falls: bool) -> Tensor | None:
        """Returns the loss after the last piece."""
        host = self._host
        with host.time_piece("forward", micro, piece, of):
            with torch.enable_grad():
                batch, loss = host.pieces.piece_forward(host.draw_batch, micro, piece, of, falls)
            shown = None if loss is None else host.note_loss(loss, batch, micro, falls)
            host.note_forward(batch)
        return shown

    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None:
        with self._host.time_piece("backward", micro, piece, of), self._host.measure_backward():
            self._host.pieces.piece_backward(micro, piece, of, grad)

    def list_units(self) -> list[Units]:
        return self._host.submodel.hidden_units

    def narrow_model(self, kept: list[Tensor] | None, scaled: bool) -> float:
        """Switches to a sub-model, or back to the model if `kept` is None. Returns its share of the compute."""
        if self._host.has_open_loss:
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        self._host.begin_narrowing()
        share = self._host.submodel.switch_to(kept, scaled)
        self._host.note_submodel(self._host.submodel.own_params)
        return share
