"""Performs the verbs for curvature and arithmetic on a virtual rank.

Each takes the measured time, or none if it is unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from workbench.rank import Op
from workbench.strategies.second_order.factors import Factors


class Curvature(Protocol):
    """A rank's estimates: a CurvatureEstimator or a CurvatureOutline."""

    def collect_factors(self) -> None: ...
    def take_factors(self) -> list[Factors]: ...
    def compute_product(self, vector: list[Tensor], step: int) -> list[Tensor]: ...
    def compute_value(self, step: int) -> Tensor: ...


class CurvatureHost(Protocol):
    """What the performer uses of a virtual rank. step: the number of the present step"""

    @property
    def step(self) -> int: ...
    @property
    def curvature(self) -> Curvature: ...

    def note_collecting(self, collects: bool) -> None:
        """Notes whether a backward collects statistics, which takes extra time."""

    def answer_request(self, fiber: Any, name: str, phases: tuple[str, ...], value: Any) -> Any:
        """Answers with `value` after the measured time of `name`, or after the time of `phases`."""

    def answer_work(self, fiber: Any, name: str, flops: float, value: Any) -> Any:
        """Answers with `value` after the measured time of so many operations."""

    def sample(self, name: str, value: float) -> None: ...


class CurvaturePerformer:
    """Estimates curvature and runs a strategy's own arithmetic."""

    def __init__(self, host: CurvatureHost) -> None:
        self._host = host
        self.verbs: dict[str, Callable[[Any, Op], Any]] = {
            "collect": self.collect_factors,
            "factors": self.compute_factors,
            "curve": self.compute_product,
            "value": self.compute_value,
            "work": self.run_work,
        }

    def collect_factors(self, fiber: Any, op: Op) -> None:
        self._host.note_collecting(True)
        self._host.curvature.collect_factors()

    def compute_factors(self, fiber: Any, op: Op) -> Any:
        self._host.note_collecting(False)
        return self._host.answer_request(fiber, "factors", (), self._host.curvature.take_factors())

    def compute_product(self, fiber: Any, op: Op) -> Any:
        (vector,) = op.args
        product = self._host.curvature.compute_product(vector, self._host.step)
        return self._host.answer_request(fiber, "curve", ("forward", "backward"), product)

    def compute_value(self, fiber: Any, op: Op) -> Any:
        value = self._host.curvature.compute_value(self._host.step)
        return self._host.answer_request(fiber, "value", ("forward",), value)

    def run_work(self, fiber: Any, op: Op) -> Any:
        of, flops, name = op.args
        value = of()
        self._host.sample(f"flops {name}", flops)
        return self._host.answer_work(fiber, name, flops, value)
