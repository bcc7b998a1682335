"""Performs the verbs for pieces and sub-models on a virtual rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor, nn

from workbench.rank import Op, StrategyError, Units
from workbench.strategies.sub_models.sub_model import SubModel


class SubModelHost(Protocol):
    """What the performer uses of a virtual rank: its tensors, or its sizes only."""

    @property
    def submodel(self) -> SubModel: ...
    @property
    def has_open_loss(self) -> bool: ...
    def count_pieces(self, most: int) -> int: ...
    def piece_forward(self, micro: int, piece: int, of: int, falls: bool) -> Tensor | None:
        """Returns the loss after the last piece; None with sizes only."""

    def piece_backward(self, micro: int, piece: int, of: int, grad: float) -> None: ...
    def answer_piece(self, fiber: Any, phase: str, value: Any, micro: int, piece: int, of: int) -> Any:
        """Answers with `value` after the piece's share of the phase."""

    def note_submodel(self, own_params: list[nn.Parameter]) -> None:
        """Counts the memory of a sub-model's own parameters."""


class SubModelPerformer:
    """Computes parts of a model: batches that rise and fall piece by piece, and sub-models."""

    def __init__(self, host: SubModelHost) -> None:
        self._host = host
        self.verbs: dict[str, Callable[[Any, Op], Any]] = {
            "pieces": self.count_pieces,
            "rise": self.piece_forward,
            "fall": self.piece_backward,
            "units": self.list_units,
            "narrow": self.narrow_model,
        }

    def count_pieces(self, fiber: Any, op: Op) -> int:
        return self._host.count_pieces(*op.args)

    def piece_forward(self, fiber: Any, op: Op) -> Any:
        micro, piece, of, _ = op.args
        return self._host.answer_piece(fiber, "forward", self._host.piece_forward(*op.args), micro, piece, of)

    def piece_backward(self, fiber: Any, op: Op) -> Any:
        micro, piece, of, _ = op.args
        self._host.piece_backward(*op.args)
        return self._host.answer_piece(fiber, "backward", None, micro, piece, of)

    def list_units(self, fiber: Any, op: Op) -> list[Units]:
        return self._host.submodel.hidden_units

    def narrow_model(self, fiber: Any, op: Op) -> float:
        """Switches to a sub-model, or back to the model. Returns its share of the compute."""
        if self._host.has_open_loss:
            raise StrategyError("narrow: a forward is open; ask for its backward first")
        share = self._host.submodel.switch_to(*op.args)
        self._host.note_submodel(self._host.submodel.own_params)
        return share
