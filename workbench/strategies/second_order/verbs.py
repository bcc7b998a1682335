"""The verbs for curvature, and for a strategy's own long arithmetic. Both hosts perform them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from workbench.rank import Op, Rank
from workbench.rank.verbs import list_verbs

if TYPE_CHECKING:
    from torch import Tensor


def collect(rank: Rank) -> Op:
    """Makes this rank's Linear layers and convolutions collect statistics from the next forward on, until `factors`."""
    return Op("collect")


def factors(rank: Rank) -> Op:
    """Returns a list of Factors: for each Linear layer and convolution, the statistics of all passes since `collect`.

    The order is the same on all ranks. A layer that was not called has zeros. Layers that share parameters with
    another module are excluded. Gradients are of the loss itself, whatever factor `backward` applied.
    """
    return Op("factors")


def curve(rank: Rank, vector: list[Tensor]) -> Op:
    """Returns the Gauss-Newton matrix of the last forward's batch times `vector`: `(n,)` per bucket.

    Use it before the next change of the parameters. Raises StrategyError if the loss does not depend on the output
    of one call of the model.
    """
    return Op("curve", vector)


def value(rank: Rank) -> Op:
    """Returns the loss of the last forward's batch under the present parameters, without a graph."""
    return Op("value")


def work(rank: Rank, of: Callable[[], Any], flops: float, name: str) -> Op:
    """Returns `of()`: long arithmetic of about `flops` floating-point operations, recorded as a Span.

    From this Span and a Sample "flops NAME", the simulator derives seconds per operation for other sizes and
    numbers of ranks. A child may use it too.
    """
    return Op("work", of, flops, name)


VERBS = list_verbs(collect, factors, curve, value, work)
