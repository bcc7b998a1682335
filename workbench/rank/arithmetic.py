"""The verbs of a Rank about curvature, and about arithmetic of a strategy's own that is long enough to be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.rank.awaitables import Op

if TYPE_CHECKING:
    from torch import Tensor


class Arithmetic:
    """The part of a Rank that computes what is neither a pass of the strategy's nor a codec's work."""

    # curvature and arithmetic
    def collect(self) -> Op:
        """From the next forward on, this rank's Linear layers are listened to, until `factors` is asked for."""
        return Op("collect")

    def factors(self) -> Op:
        """-> a list of Factors: of each Linear layer what the forwards and backwards since `collect` have shown.

        In an order that is the same on all ranks; zero of a layer that was not called. Layers whose parameters another
        module has, too, are not among them. They are of the loss itself, whatever `backward` multiplied it by.
        """
        return Op("factors")

    def curve(self, vector: list[Tensor]) -> Op:
        """-> the Gauss-Newton matrix of the last forward's batch on this rank times `vector`; (n,) for each bucket.

        Between that forward and the next change of the parameters. Raises StrategyError where the loss does not go by
        what one call of the model returns.
        """
        return Op("curve", vector)

    def value(self) -> Op:
        """-> the loss of the last forward's batch with the parameters as they are now: no gradient will follow it."""
        return Op("value")

    def work(self, of: Callable[[], Any], flops: float, name: str) -> Op:
        """-> what `of()` answers: long arithmetic of about so many floating-point operations, which goes on the record.

        Beside its Span stands the Sample "flops NAME", so that seconds per operation can be measured, and simulated
        for other sizes and numbers of ranks. A child may ask for it, too.
        """
        return Op("work", of, flops, name)
