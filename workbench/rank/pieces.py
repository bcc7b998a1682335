"""The verbs of a Rank about a model of which it passes a piece at a time, or trains only a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workbench.rank.awaitables import Op

if TYPE_CHECKING:
    from torch import Tensor


class Pieces:
    """The part of a Rank that computes less than the whole model at once."""

    # parts of a model
    def pieces(self, most: int) -> Op:
        """-> into how many pieces `rise` and `fall` can cut the model here, `most` at most; 1 where it cannot be cut.

        Between the parts of which a Pipeline's stages are made, as many of them in each piece as can be.
        """
        return Op("pieces", most)

    def rise(self, micro: int, piece: int, of: int, falls: bool = False) -> Op:
        """The forward of the next batch through one of so many pieces, in their order; the last answers with the loss.

        falls: its backward will be by `fall`, piece by piece; else by `backward`, once it has risen through all
        """
        return Op("rise", micro, piece, of, falls)

    def fall(self, micro: int, piece: int, of: int, grad: float = 1.0) -> Op:
        """The backward through one of the pieces that `micro` has risen through, the last first: what autograd has kept
        for it is given back. Gradients, times `grad`, stay at home and add up, as those of an awaited `backward` do.
        """
        return Op("fall", micro, piece, of, grad)

    def units(self) -> Op:
        """-> a list of Units: hidden features, channels or heads of the model that a sub-model can be without.

        Raises StrategyError where the task does not show which; a strategy that says `narrows` is refused there before.
        """
        return Op("units")

    def narrow(self, kept: list[Tensor] | None, scaled: bool = False) -> Op:
        """From now on this rank trains the sub-model that keeps these of each of the `units`, (k,) int64 each; None:
        the whole model again, with what the sub-model has learned in its entries.

        scaled: the weights that read k of F units are F / k times as large while they are in the sub-model, so that
                what the next layer is given is on average as large as in the whole model, as under dropout

        Its matrices are really smaller, an optimizer of its own begins with nothing, and `forward`, an awaited
        `backward` and `update` are its. `params` are the whole model's at any time; where they are cut they change
        when it is whole again. Returns what share of the whole model's operations a forward makes from now on.
        """
        return Op("narrow", kept, scaled)
