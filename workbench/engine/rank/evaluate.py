"""Held-out loss of the consolidated model, outside step time."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from workbench.engine.control.canonical import mean_model
from workbench.host.observe.evaluating import Evaluated, distance, holding, numbers
from workbench.host.passes.pipelining import evaluated
from workbench.host.placement.canonical import buffers, flattened
from workbench.host.placement.cutting import instead
from workbench.rank import Bucket, Op, as_real

if TYPE_CHECKING:
    from workbench.engine.rank.setup import Parts


def mean_evaluated(run: Parts) -> Evaluated:
    """Evaluates the mean model, and measures this rank's drift from it. Rank 0 evaluates for all ranks.

    If parameters are sharded, every rank evaluates, because evaluation gathers them.
    """
    with run.ledger.evaluating():
        return _spread_out(run) if run.spread is not None else _of_whole_replicas(run)


def _of_whole_replicas(run: Parts) -> Evaluated:
    wire, found = run.control, dict[str, float]()
    own = None if run.shared.held else wire
    weights = [] if run.reading.sharded else run.layout.weights  # sharded parameters have only one value
    with torch.no_grad(), mean_model(own, run.layout, weights, run.model) as drift:
        if run.reading.sharded:
            with run.reading.passing("evaluation"):
                found = numbers(run.learner.evaluate, run.model)
                run.host.drive(run.reading.close())
            found = found if run.rank.id == 0 else {}
        elif run.rank.id == 0:
            found = numbers(run.learner.evaluate, run.model)
        if wire is not None:
            wire.wait(wire.broadcast(torch.tensor([found.get("loss", math.nan)], dtype=torch.float64), 0))
    return found, drift


async def _asked(op: Op) -> Any:
    return await op


def _spread_out(run: Parts) -> Evaluated:
    """The same if a replica spans several ranks: the ranks of the first replica evaluate together."""
    wire, rank, piece = run.control, run.rank, run.host.pipeline.piece
    assert wire is not None
    found: dict[str, float] = {}

    def forward(*inputs: Any, **named: Any) -> Any:
        assert piece is not None
        return run.host.drive(evaluated(rank.group("stage"), piece.pieces, *inputs, **named))

    with torch.no_grad(), run.reading.passing("evaluation"), _mean_of_replicas(run) as drift:
        if rank.replicas.index == 0:
            if run.host.tensor.group is not None:
                run.host.tensor.refresh()
            with instead(run.model, forward) if piece is not None else nullcontext():
                found = numbers(run.learner.evaluate, run.model)
        wire.wait(wire.broadcast(torch.tensor([found.get("loss", math.nan)], dtype=torch.float64), 0))
    return found if rank.id == 0 else {}, drift


@contextmanager
def _mean_of_replicas(run: Parts) -> Iterator[float]:
    """Makes the local part of the model the mean of all replicas inside the block.

    Yields this rank's RMS distance from it.
    """
    replicas = run.rank.replicas
    if replicas.size == 1:
        yield 0.0
        return
    weights = [as_real(x) for x in run.layout.weights]
    live = [x for x in [*weights, *map(as_real, buffers(run.model))] if x.numel()]
    numel = sum(x.numel() for x in weights)
    sizes = [x.numel() for x in live]
    own = flattened(live)
    mean = own.clone().div_(replicas.size)
    run.host.drive(_asked(replicas.all_reduce(mean, "sum", "parameters")))
    values, kept = ([part.view(x.shape) for part, x in zip(flat.split(sizes), live, strict=True)]
                    for flat in (mean, own))  # fmt: skip
    with holding(live, values, kept):
        yield distance([own[:numel]], [mean[:numel]], run.layout.numel)


def known_evaluated(run: Parts, known: list[Bucket]) -> Evaluated:
    """Evaluates the parameters that rank 0 knows. Uses a copy, because the model itself may change."""
    kept = [] if run.twin is None else [*run.twin.parameters(), *run.twin.buffers()]
    with torch.no_grad(), run.ledger.evaluating(sum(x.nbytes for x in kept)):
        with run.host.alone:
            values = [bucket.data.clone() for bucket in known]
            own = values if run.shared.held else [bucket.data for bucket in run.layout.params()]
        drift = distance(own, values, run.layout.numel)
        if run.learner.evaluate is None or run.rank.id:
            return {}, drift
        twin = run.twin = run.twin or copy.deepcopy(run.model)
        params = dict(twin.named_parameters())
        for bucket, value in zip(known, values, strict=True):
            for part in bucket.parts:
                params[part.name].copy_(value[part.start : part.stop].view(part.shape))
        for copied, live in zip(twin.buffers(), run.model.buffers(), strict=True):
            copied.copy_(live)
        return numbers(run.learner.evaluate, twin), drift
