"""Resets a rank's model when a generation begins."""

from __future__ import annotations

from typing import Any

from workbench.experiment import Experiment
from workbench.host.observe.curvature import CurvatureEstimator
from workbench.host.placement.parameter_layout import ParameterLayout


class RenewableTensors:
    """The part of RankTensors that begins another generation."""

    def discard_step(self) -> None:
        me: Any = self
        for kept in (me._open, me._looked, me._grads, me._batches, me.losses):
            kept.clear()
        me._worker, me._waves = "", None
        me.layout.drop_gradients()

    def forget_order(self) -> None:
        """Forgets the order of gradients. The next backward shows it to every rank."""
        me: Any = self
        me._arrival, me._learned = None, False

    def release_state(self, e: Experiment, seed: int) -> None:
        """Removes stages, slices and checkpointing."""
        me: Any = self
        me._stop_recomputing()
        if me._together is not None:
            me._together.restore_modules()
        me.spread = me.piece = me.split = me._together = None
        me.stage, me.share, me.shares, me.fresh = (0, 1), 1.0, (1.0,), True

    def reallocate_state(self, e: Experiment) -> None:
        """Lays out the whole model on this rank, with a new optimizer."""
        me: Any = self
        me.layout = ParameterLayout(me.model, e.bucket_mb)
        me.layout.keeps_values = True
        me.curvature = CurvatureEstimator(me.model, me.learner.loss, me.layout)
        me.optimizer = me.make_optimizer(e)
        me._arrival, me._learned = None, False
        me._cut_buckets()
        me.tune_partition(e)


class RenewableSizes:
    """The part of RankSizes that begins another generation."""

    unsharder: Any = None  # the session sets it

    def discard_step(self) -> None:
        me: Any = self
        me._asked.clear()
        me.opened, me.going, me.came, me.roomy = [0.0] * len(me.shares), 0, None, False

    def forget_order(self) -> None:
        me: Any = self
        me._told = me.learning = False

    def release_state(self, e: Experiment, seed: int) -> None:
        me: Any = self
        me.lay_out_parameters(set(me.whole.names), None, 0, e, seed)

    def reallocate_state(self, e: Experiment) -> None:
        me: Any = self
        me.resize_buckets(e.bucket_mb)
        me.take_optimizer(me.make_optimizer(e))
