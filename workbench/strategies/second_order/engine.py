"""Performs the verbs for curvature and arithmetic on a real rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from workbench.strategies.second_order.curvature import CurvatureEstimator
from workbench.strategies.second_order.factors import Factors


class CurvatureHost(Protocol):
    """What the performer uses of a real rank. step: the number of the present step"""

    @property
    def step(self) -> int: ...

    def time_request(self, name: str, *phases: str) -> AbstractContextManager[None]:
        """Records the block as a span. With a pace, it lasts as long as these phases."""

    def sample(self, name: str, value: float) -> None: ...


class CurvaturePerformer:
    """Estimates curvature and runs a strategy's own arithmetic, each as a span."""

    def __init__(self, host: CurvatureHost, curvature: CurvatureEstimator) -> None:
        self._host, self._curvature = host, curvature
        self.verbs: dict[str, Callable[..., Any]] = {
            "collect": curvature.collect_factors,
            "factors": self.compute_factors,
            "curve": self.compute_product,
            "value": self.compute_value,
            "work": self.run_work,
        }

    def compute_factors(self) -> list[Factors]:
        with self._host.time_request("factors"):
            return self._curvature.take_factors()

    def compute_product(self, vector: list[Tensor]) -> list[Tensor]:
        with self._host.time_request("curve", "forward", "backward"):
            return self._curvature.compute_product(vector, self._host.step)

    def compute_value(self) -> Tensor:
        with self._host.time_request("value", "forward"):
            return self._curvature.compute_value(self._host.step)

    def run_work(self, of: Callable[[], Any], flops: float, name: str) -> Any:
        with self._host.time_request(name):
            value = of()
        self._host.sample(f"flops {name}", flops)
        return value
