"""Compute outside the passes of a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from workbench.engine.compute.compute_parts import ComputeParts
from workbench.engine.compute.pass_timer import PassTimer
from workbench.engine.compute.pipeline import PipelinePerformer
from workbench.host.observe.curvature import CurvatureEstimator
from workbench.rank import Factors


class ArithmeticPerformer:
    """Estimates curvature and runs a strategy's own arithmetic, each as a span."""

    def __init__(
        self, parts: ComputeParts, timing: PassTimer, pipeline: PipelinePerformer, curvature: CurvatureEstimator
    ) -> None:
        self._rank, self._at, self._pace, self._watch = parts.rank, parts.at, parts.pace, parts.watch
        self._timing, self._pipeline, self._curvature = timing, pipeline, curvature

    def compute_factors(self) -> list[Factors]:
        """Returns second moments of the layers' inputs and gradients."""
        self._at("factors")
        began = self._watch.now()
        found = self._curvature.take_factors()
        self._watch.end_span(self._rank.step, "factors", began)
        return found

    def compute_curvature(self, vector: list[Tensor]) -> list[Tensor]:
        """With a pace, it lasts as long as a forward and a backward."""
        self._at("curve")
        began = self._watch.now()
        self._pace.begin_phase("forward", self._rank.step, self._pipeline.share)
        self._timing.reach_fraction(1.0)
        self._pace.begin_phase("backward", self._rank.step, self._pipeline.share)
        product = self._curvature.compute_product(vector, self._rank.step)
        self._timing.reach_fraction(1.0)
        self._watch.end_span(self._rank.step, "curve", began)
        return product

    def compute_value(self) -> Tensor:
        """Computes the batch's loss again. With a pace, it lasts as long as a forward."""
        self._at("value")
        began = self._watch.now()
        self._pace.begin_phase("forward", self._rank.step, self._pipeline.share)
        value = self._curvature.compute_value(self._rank.step)
        self._timing.reach_fraction(1.0)
        self._watch.end_span(self._rank.step, "value", began)
        return value

    def run_work(self, of: Callable[[], Any], flops: float, name: str) -> Any:
        self._at(name)
        began = self._watch.now()
        value = of()
        self._watch.end_span(self._rank.step, name, began)
        self._watch.record.sample(self._rank.step, f"flops {name}", self._watch.clock.now(), float(flops))
        return value
