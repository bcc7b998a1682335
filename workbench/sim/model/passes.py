"""Passes of one model without values. Each runs once, and its results serve all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.memory.batches import Batches, nbytes_of
from workbench.host.passes.checkpointing import checkpointing
from workbench.host.passes.meetings import answer_like
from workbench.host.passes.piece import micro_batches
from workbench.host.passes.together import computing
from workbench.host.placement.cutting import Stages, instead, through
from workbench.host.placement.layout import Layout
from workbench.host.placement.splitting import Split
from workbench.host.sharding.trial import Listening, Trial
from workbench.host.transfer.tables import read
from workbench.sim.model.evaluation import computed
from workbench.sim.model.known import Kept, kept_in, kept_of
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.partitions import Partition


class Passes:
    """Results of passes through an experiment's model. Models passed to it are on the meta device.

    layers: how the ranks of a stage compute them
    split:  how the model's matrices are split; the model has one rank's slice
    seen:   earlier results for the same learner, ranks and seed, which other experiments share; None: not shared
    """

    def __init__(self, e: Experiment, learner: Learner, seen: dict[Any, Any] | None) -> None:
        self._learner, self._batch, self._ranks, self._seed = learner, e.batch, e.ranks, e.seed
        self._seen, self._budget = dict[Any, Any]() if seen is None else seen, bool(e.memory_mb)

    def trial(self, model: nn.Module, layers: Partition) -> Trial | None:
        """Returns the parameters that a forward and a backward read, and the order of gradients; None on failure."""
        key = "trial", self._batch, layers.recompute
        return self._seen[key] if key in self._seen else self._once(key, lambda: self._tried(model, layers))

    def kept(self, model: nn.Module, batch: int, layers: Partition, split: Split | None,
             counts: tuple[int, ...] = ()) -> Kept | None:  # fmt: skip
        """Returns what a batch keeps for its backward; None if unknown. counts: of units, if it is a sub-model"""
        key = "kept", batch, layers, _said(split), counts
        if key in self._seen:  # each rank requests this
            found: Kept | None = self._seen[key]
            return found

        def look() -> Kept | None:
            try:
                return kept_of(model, self._learner, self._drawn(batch), layers, split)
            except Exception:
                return None

        return self._once(key, look)

    def kept_in(self, model: nn.Module, stages: Stages, batch: int, count: int, layers: Partition,
                split: Split | None) -> list[Kept | None]:  # fmt: skip
        """Returns by piece of the model what one of `count` micro-batches keeps; None if unknown."""
        counts = [len(parts) for parts in stages.pieces]

        def look() -> list[Kept | None]:
            try:
                micro = micro_batches(self._drawn(batch), count)[0]
                return kept_in(model, self._learner, micro, layers, split, counts)
            except Exception:
                return [None] * len(counts)

        return self._once(("kept in", tuple(counts), batch, count, layers, _said(split)), look)

    def crossing(self, model: nn.Module, stages: Stages, batch: int, count: int, split: Split | None) -> list[Tensor]:
        """Returns the outputs of each piece for one of `count` micro-batches; the last one is the loss."""
        counts = tuple(len(parts) for parts in stages.pieces)
        key = "crossing", counts, batch, count, _said(split)
        return self._once(key, lambda: self._crossed(model, stages, batch, count, split))

    def nbytes(self, batch: int) -> int:
        """Returns the bytes of a batch's tensors; 0 if unknown."""
        try:
            return nbytes_of(self._drawn(batch))
        except Exception:
            return 0

    def evaluated(self, model: nn.Module, stages: Stages | None, split: Split | None) -> list[int] | None:
        """Returns for each stage the most bytes of computing the held-out metrics; None if unknown.

        If the task's functions are not `pure`, it runs them only under a memory budget.
        """
        if not (self._learner.pure or self._budget) or self._learner.evaluate is None:
            return None

        def look() -> list[int] | None:
            try:
                return computed(model, self._learner, stages, split, self._seed)
            except Exception:
                return None

        return self._once(("evaluated", stages and tuple(map(len, stages.pieces)), _said(split)), look)

    def rows(self, batch: int, layout: Layout) -> dict[str, Tensor]:
        """Returns the rows of embedding tables that one batch reads."""

        def look() -> dict[str, Tensor]:
            batches = Batches(self._learner.data, 0, self._ranks, "cpu")
            batches.restart(batch, self._seed, 0)
            return read(self._learner, batches.next(), layout)

        return self._once(("rows", batch), look)

    def _once(self, key: Any, look: Callable[[], Any]) -> Any:
        if key not in self._seen:
            self._seen[key] = look()
        return self._seen[key]

    def _drawn(self, batch: int) -> Any:
        """Returns a batch without values. It is drawn once, because no pass writes to it."""

        def draw() -> Any:
            batches = Batches(self._learner.data, 0, self._ranks, "meta")
            batches.restart(batch, self._seed, 0)
            return batches.next()

        return self._once(("drawn", batch), draw)

    def _tried(self, model: nn.Module, layers: Partition) -> Trial | None:
        listening = Listening({n: p for n, p in model.named_parameters() if p.requires_grad})
        try:
            with torch.enable_grad(), checkpointing(model, self._learner, layers):
                inputs = self._drawn(self._batch)
                with listening.forward():
                    loss = self._learner.loss(model, inputs)
                with listening.backward():
                    loss.backward()
        except Exception:
            return None
        return listening.heard

    def _crossed(self, model: nn.Module, stages: Stages, batch: int, count: int, split: Split | None) -> list[Tensor]:
        seen: list[Tensor] = []

        def forward(*inputs: Any, **named: Any) -> Any:
            x = through(stages.pieces[0], *inputs, **named)
            for parts in stages.pieces[1:]:
                seen.append(x)
                x = through(parts, x)
            return x

        micro = micro_batches(self._drawn(batch), count)[0]
        with torch.no_grad(), instead(model, forward), ExitStack() as also:
            if split is not None:
                met = partial(answer_like, ways=split.ways)
                also.enter_context(computing(model, split, 0, met, draws=False))
            made = self._learner.loss(model, micro)
        return [x.detach() for x in (*seen, made)]


def _said(split: Split | None) -> tuple[int, bool] | None:
    """Returns a key of the split that is the same for all copies of the model."""
    return None if split is None else (split.ways, split.sequences)
