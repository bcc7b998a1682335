"""What a layer's inputs and the gradients of its outputs say together, as a value. No verb lives here."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Factors(NamedTuple):
    """Second moments of one Linear layer, of this rank's examples, in fp32 at least.

    weight, bias: names of its parameters; bias "" where it has none
    inputs:       (i, i) mean of a a^T over rows, a 1 appended to each where there is a bias
    outputs:      (o, o) mean of g g^T over rows, g the gradient of a row's own loss with respect to what it made
    """

    weight: str
    bias: str
    inputs: Tensor
    outputs: Tensor
