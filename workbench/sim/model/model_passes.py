"""Passes of a model without values. Each runs once for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from workbench.experiment import Experiment
from workbench.host.memory.batches import BatchReader, count_batch_bytes
from workbench.host.passes.checkpointing import checkpoint_units
from workbench.host.passes.stage_module import cut_batch
from workbench.host.passes.tensor_parallel import compute_together
from workbench.host.passes.tensor_schedule import make_answer_like
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.stage_cuts import StageCuts, replace_forward, run_parts
from workbench.host.placement.tensor_split import TensorSplit
from workbench.host.sharding.access_trace import AccessTrace, TraceListener
from workbench.sim.model.evaluation_memory import measure_evaluation
from workbench.sim.model.known_memory import KeptBytes, measure_kept, measure_kept_pieces
from workbench.strategies.embedding_tables.rows import find_rows
from workbench.tasks import Learner

if TYPE_CHECKING:
    from workbench.partitions import Partition


class ModelPasses:
    """Results of passes. Arguments `model` are on the meta device.

    layers: how a stage's ranks compute its layers
    split:  how the model's matrices are split; the model has one rank's slice
    seen:   results that experiments with the same learner, ranks and seed share; None: not shared
    """

    def __init__(self, e: Experiment, learner: Learner, seen: dict[Any, Any] | None) -> None:
        self._learner, self._batch, self._ranks, self._seed = learner, e.batch, e.ranks, e.seed
        self._seen, self._budget = dict[Any, Any]() if seen is None else seen, bool(e.memory_mb)

    def trace_reads(self, model: nn.Module, layers: Partition) -> AccessTrace | None:
        """Returns the parameters that passes read, and the order of gradients; None on failure."""
        key = "trial", self._batch, layers.recompute
        return self._seen[key] if key in self._seen else self._run_once(key, lambda: self._run_trace(model, layers))

    def kept(self, model: nn.Module, batch: int, layers: Partition, split: TensorSplit | None,
             counts: tuple[int, ...] = ()) -> KeptBytes | None:  # fmt: skip
        """Returns what a batch keeps for its backward; None if unknown. counts: hidden units of a sub-model"""
        key = "kept", batch, layers, _split_key(split), counts
        if key in self._seen:  # each rank requests this
            found: KeptBytes | None = self._seen[key]
            return found

        def look() -> KeptBytes | None:
            try:
                return measure_kept(model, self._learner, self._draw_batch(batch), layers, split)
            except Exception:
                return None

        return self._run_once(key, look)

    def measure_kept_pieces(self, model: nn.Module, stages: StageCuts, batch: int, count: int, layers: Partition,
                split: TensorSplit | None) -> list[KeptBytes | None]:  # fmt: skip
        """Returns by piece what one of `count` micro-batches keeps; None if unknown."""
        counts = [len(parts) for parts in stages.pieces]

        def look() -> list[KeptBytes | None]:
            try:
                micro = cut_batch(self._draw_batch(batch), count)[0]
                return measure_kept_pieces(model, self._learner, micro, layers, split, counts)
            except Exception:
                return [None] * len(counts)

        return self._run_once(("kept in", tuple(counts), batch, count, layers, _split_key(split)), look)

    def list_piece_outputs(
        self, model: nn.Module, stages: StageCuts, batch: int, count: int, split: TensorSplit | None
    ) -> list[Tensor]:
        """Returns by piece the output for one of `count` micro-batches; the last is the loss."""
        counts = tuple(len(parts) for parts in stages.pieces)
        key = "crossing", counts, batch, count, _split_key(split)
        return self._run_once(key, lambda: self._run_pieces(model, stages, batch, count, split))

    def count_batch_bytes(self, batch: int) -> int:
        """0 if unknown."""
        try:
            return count_batch_bytes(self._draw_batch(batch))
        except Exception:
            return 0

    def measure_evaluation(
        self, model: nn.Module, stages: StageCuts | None, split: TensorSplit | None
    ) -> list[int] | None:
        """Returns by stage the peak bytes of computing the held-out metrics; None if unknown.

        Runs a task's functions that are not `pure` only under a memory budget.
        """
        if not (self._learner.pure or self._budget) or self._learner.evaluate is None:
            return None

        def look() -> list[int] | None:
            try:
                return measure_evaluation(model, self._learner, stages, split, self._seed)
            except Exception:
                return None

        return self._run_once(("evaluated", stages and tuple(map(len, stages.pieces)), _split_key(split)), look)

    def find_rows(self, batch: int, layout: ParameterLayout) -> dict[str, Tensor]:
        """Returns by embedding table the rows that a batch reads."""

        def look() -> dict[str, Tensor]:
            batches = BatchReader(self._learner.data, 0, self._ranks, "cpu")
            batches.restart_reading(batch, self._seed, 0)
            return find_rows(self._learner, batches.next_batch(), layout)

        return self._run_once(("rows", batch), look)

    def _run_once(self, key: Any, look: Callable[[], Any]) -> Any:
        if key not in self._seen:
            self._seen[key] = look()
        return self._seen[key]

    def _draw_batch(self, batch: int) -> Any:
        """All passes share the batch, because none writes to it."""

        def draw() -> Any:
            batches = BatchReader(self._learner.data, 0, self._ranks, "meta")
            batches.restart_reading(batch, self._seed, 0)
            return batches.next_batch()

        return self._run_once(("drawn", batch), draw)

    def _run_trace(self, model: nn.Module, layers: Partition) -> AccessTrace | None:
        listening = TraceListener({n: p for n, p in model.named_parameters() if p.requires_grad})
        try:
            with torch.enable_grad(), checkpoint_units(model, self._learner, layers):
                inputs = self._draw_batch(self._batch)
                with listening.listen_to_forward():
                    loss = self._learner.loss(model, inputs)
                with listening.listen_to_backward():
                    loss.backward()
        except Exception:
            return None
        return listening.heard_trace

    def _run_pieces(
        self, model: nn.Module, stages: StageCuts, batch: int, count: int, split: TensorSplit | None
    ) -> list[Tensor]:
        seen: list[Tensor] = []

        def forward(*inputs: Any, **named: Any) -> Any:
            x = run_parts(stages.pieces[0], *inputs, **named)
            for parts in stages.pieces[1:]:
                seen.append(x)
                x = run_parts(parts, x)
            return x

        micro = cut_batch(self._draw_batch(batch), count)[0]
        with torch.no_grad(), replace_forward(model, forward), ExitStack() as also:
            if split is not None:
                met = partial(make_answer_like, ways=split.ways)
                also.enter_context(compute_together(model, split, 0, met, draws=False))
            made = self._learner.loss(model, micro)
        return [x.detach() for x in (*seen, made)]


def _split_key(split: TensorSplit | None) -> tuple[int, bool] | None:
    """A key that all copies of the model share."""
    return None if split is None else (split.ways, split.splits_sequences)
