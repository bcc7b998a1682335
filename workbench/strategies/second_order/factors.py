"""Factors: second moments of a layer's inputs and output gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Factors(NamedTuple):
    """Second moments of one Linear layer over this rank's examples, at least in fp32.

    weight, bias: names of its parameters; bias is "" if it has none
    inputs:       (i, i), mean of a a^T over rows a; a row ends in a 1 if there is a bias
    outputs:      (o, o), mean of g g^T over rows; g is the gradient of a row's own loss by its output
    """

    weight: str
    bias: str
    inputs: Tensor
    outputs: Tensor
