"""The verbs of a Rank about a model that it passes piece by piece, so that two passes can take turns."""

from __future__ import annotations

from workbench.rank.awaitables import Op


class Pieces:
    """The part of a Rank that computes a forward or a backward in pieces."""

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
