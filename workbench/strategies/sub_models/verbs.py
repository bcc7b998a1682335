"""The verbs for computing the model piece by piece, or training a part of it. Both hosts perform them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.rank import Op, Rank
from workbench.rank.verbs import list_verbs

if TYPE_CHECKING:
    from torch import Tensor


def pieces(rank: Rank, most: int) -> Op:
    """Returns how many pieces `rise` and `fall` can cut the model into, at most `most`, at least 1.

    Cuts are between the parts for a Pipeline's stages. Pieces have as equal a number of parts as possible.
    """
    return Op("pieces", most)


def rise(rank: Rank, micro: int, piece: int, of: int, falls: bool = False) -> Op:
    """Runs the next batch forward through piece `piece` of `of`; the last piece returns the loss.

    falls: its backward will be by `fall`, piece by piece; else by one `backward` after the last piece
    """
    return Op("rise", micro, piece, of, falls)


def fall(rank: Rank, micro: int, piece: int, of: int, grad: float = 1.0) -> Op:
    """Runs the backward through one piece of `micro`, the last first, and frees its graph.

    Gradients times `grad` stay on this rank and add up, as for an awaited `backward`.
    """
    return Op("fall", micro, piece, of, grad)


def units(rank: Rank) -> Op:
    """Returns a list of Units: hidden features, channels or heads that a sub-model can omit.

    Raises StrategyError if the task does not declare them. A strategy that `narrows` is refused for such a task
    beforehand.
    """
    return Op("units")


def narrow(rank: Rank, kept: list[Tensor] | None, scaled: bool = False) -> Op:
    """Makes this rank train the sub-model that keeps these indices, (k,) int64 for each `units`.

    None restores the whole model, including the values that the sub-model has learned.

    scaled: scale the weights that read k of F units by F / k while they are in the sub-model, so that the next
            layer's input keeps its mean, as under dropout

    The matrices are really smaller. A new optimizer starts without state. `forward`, an awaited `backward` and
    `update` act on the sub-model. `params` are always the whole model's: the cut ones change when the model is
    whole again. Returns the share of the whole model's operations that a forward now takes.
    """
    return Op("narrow", kept, scaled)


VERBS = list_verbs(pieces, rise, fall, units, narrow)
