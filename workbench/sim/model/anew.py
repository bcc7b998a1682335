"""What a virtual rank computes with as a generation begins: no step that broke off, and the model laid anew."""

from __future__ import annotations

from typing import Any

from workbench.experiment import Experiment
from workbench.host.observe.curvature import Curvature
from workbench.host.placement.layout import Layout


class TensorsAnew:
    """The part of Tensors that goes on in another generation."""

    def come_again(self) -> None:
        """Nothing of a step that broke off is left."""
        me: Any = self
        for kept in (me._open, me._looked, me._grads, me._batches, me.losses):
            kept.clear()
        me._worker, me._waves = "", None
        me.layout.clear()

    def forget_order(self) -> None:
        """The next backward shows in which order gradients appear, on every rank of a generation."""
        me: Any = self
        me._arrival, me._learned = None, False

    def lie_bare(self, e: Experiment, seed: int) -> None:
        """Nothing of how the model lay is left."""
        me: Any = self
        me._keep_all()
        if me._together is not None:
            me._together.undo()
        me.spread = me.piece = me.split = me._together = None
        me.stage, me.share, me.shares, me.fresh = (0, 1), 1.0, (1.0,), True

    def lie_anew(self, e: Experiment) -> None:
        """All of the model lies here, with an optimizer that remembers nothing."""
        me: Any = self
        me.layout = Layout(me.model, e.bucket_mb)
        me.layout.keeps_values = True
        me.curvature = Curvature(me.model, me.learner.loss, me.layout)
        me.optimizer = me.made(e)
        me._arrival, me._learned = None, False
        me._cut()
        me.tune(e)


class SizesAnew:
    """The part of Sizes that does."""

    reading: Any = None  # its session's

    def come_again(self) -> None:
        """Nothing of a step that broke off is left."""
        me: Any = self
        me._asked.clear()
        me.opened, me.going, me.came, me.roomy = [0.0] * len(me.shares), 0, None, False

    def forget_order(self) -> None:
        """The next backward shows in which order gradients appear, on every rank of a generation."""
        me: Any = self
        me._told = me.learning = False

    def lie_bare(self, e: Experiment, seed: int) -> None:
        """This rank computes the whole model from now on."""
        me: Any = self
        me.relaid(set(me.whole.names), None, 0, e, seed)

    def lie_anew(self, e: Experiment) -> None:
        """There is an optimizer for all of the model."""
        me: Any = self
        me.rebucket(e.bucket_mb)
        me.go_on_with(me.made(e))
