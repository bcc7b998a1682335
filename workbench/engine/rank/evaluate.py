"""Held-out loss of the consolidated model, outside step time."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from workbench.engine.control.canonical import use_mean_model
from workbench.engine.rank.model_view import ModelView
from workbench.host.observe.held_out_numbers import Evaluated, compute_distance, compute_numbers, hold_values
from workbench.host.passes.pipelining import evaluate_pipeline
from workbench.host.placement.canonical_state import flatten_tensors, list_buffers
from workbench.host.placement.stage_cuts import replace_forward
from workbench.rank import Bucket, Op, as_real


def evaluate_mean(run: ModelView) -> Evaluated:
    """Evaluates the mean model, and measures this rank's drift from it. Rank 0 evaluates for all ranks.

    If parameters are sharded, every rank evaluates, because evaluation gathers them.
    """
    with run.memory_account.measure_evaluation():
        return _evaluate_spread(run) if run.spread is not None else _evaluate_whole(run)


def _evaluate_whole(run: ModelView) -> Evaluated:
    wire, found = run.control, dict[str, float]()
    own = None if run.shared.is_shared else wire
    weights = [] if run.unsharder.sharded else run.layout.weights  # sharded parameters have only one value
    with torch.no_grad(), use_mean_model(own, run.layout, weights, run.model) as drift:
        if run.unsharder.sharded:
            with run.unsharder.run_pass("evaluation"):
                found = compute_numbers(run.learner.evaluate, run.model)
                run.host.drive_coroutine(run.unsharder.reshard_all())
            found = found if run.rank.id == 0 else {}
        elif run.rank.id == 0:
            found = compute_numbers(run.learner.evaluate, run.model)
        if wire is not None:
            wire.wait(wire.broadcast(torch.tensor([found.get("loss", math.nan)], dtype=torch.float64), 0))
    return found, drift


async def _await_op(op: Op) -> Any:
    return await op


def _evaluate_spread(run: ModelView) -> Evaluated:
    """Evaluates on the ranks of the first replica, if a replica spans several ranks."""
    wire, rank, piece = run.control, run.rank, run.host.pipeline.piece
    assert wire is not None
    found: dict[str, float] = {}

    def forward(*inputs: Any, **named: Any) -> Any:
        assert piece is not None
        return run.host.drive_coroutine(evaluate_pipeline(rank.group("stage"), piece.pieces, *inputs, **named))

    with torch.no_grad(), run.unsharder.run_pass("evaluation"), _use_replica_mean(run) as drift:
        if rank.replicas.index == 0:
            if run.host.tensor.group is not None:
                run.host.tensor.refresh_common()
            with replace_forward(run.model, forward) if piece is not None else nullcontext():
                found = compute_numbers(run.learner.evaluate, run.model)
        wire.wait(wire.broadcast(torch.tensor([found.get("loss", math.nan)], dtype=torch.float64), 0))
    return found if rank.id == 0 else {}, drift


@contextmanager
def _use_replica_mean(run: ModelView) -> Iterator[float]:
    """Inside the block, this rank's part of the model is the mean of all replicas; yields the RMS distance from it."""
    replicas = run.rank.replicas
    if replicas.size == 1:
        yield 0.0
        return
    weights = [as_real(x) for x in run.layout.weights]
    live = [x for x in [*weights, *map(as_real, list_buffers(run.model))] if x.numel()]
    numel = sum(x.numel() for x in weights)
    sizes = [x.numel() for x in live]
    own = flatten_tensors(live)
    mean = own.clone().div_(replicas.size)
    run.host.drive_coroutine(_await_op(replicas.all_reduce(mean, "sum", "parameters")))
    values, kept = ([part.view(x.shape) for part, x in zip(flat.split(sizes), live, strict=True)]
                    for flat in (mean, own))  # fmt: skip
    with hold_values(live, values, kept):
        yield compute_distance([own[:numel]], [mean[:numel]], run.layout.element_count)


def evaluate_known(run: ModelView, known: list[Bucket]) -> Evaluated:
    """Evaluates the parameters that rank 0 knows, in a copy, because the model itself may change."""
    kept = [] if run.evaluation_copy is None else [*run.evaluation_copy.parameters(), *run.evaluation_copy.buffers()]
    with torch.no_grad(), run.memory_account.measure_evaluation(sum(x.nbytes for x in kept)):
        with run.host.alone:
            values = [bucket.data.clone() for bucket in known]
            own = values if run.shared.is_shared else [bucket.data for bucket in run.layout.list_params()]
        drift = compute_distance(own, values, run.layout.element_count)
        if run.learner.evaluate is None or run.rank.id:
            return {}, drift
        twin = run.copy_model()
        params = dict(twin.named_parameters())
        for bucket, value in zip(known, values, strict=True):
            for part in bucket.parts:
                params[part.name].copy_(value[part.start : part.stop].view(part.shape))
        for copied, live in zip(twin.buffers(), run.model.buffers(), strict=True):
            copied.copy_(live)
        return compute_numbers(run.learner.evaluate, twin), drift
