"""What both hosts know of a rank's sub-model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from workbench.rank import Units


class SubModel(Protocol):
    """The part of the model that the rank trains."""

    @property
    def hidden_units(self) -> list[Units]: ...
    @property
    def own_params(self) -> list[nn.Parameter]: ...
    def switch_to(self, kept: list[Tensor] | None, scaled: bool = False) -> float: ...
