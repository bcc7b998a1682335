"""Held-out metrics with real tensors: of the mean of all ranks' models, or of listed parameters."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Coroutine, Sequence
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from workbench.host.core.drive import LeaveLoop, drive_coroutine
from workbench.host.memory.storage_tracker import StorageTracker
from workbench.host.observe.held_out_numbers import Evaluated, compute_distance, compute_numbers, hold_values
from workbench.host.passes.coded_exchange import Ask
from workbench.host.passes.local_runner import run_together
from workbench.host.passes.pipelining import evaluate_pipeline
from workbench.host.placement.canonical_state import list_buffers
from workbench.host.placement.replica_spread import ReplicaSpread
from workbench.host.placement.stage_cuts import replace_forward
from workbench.rank import Bucket, Op, Rank
from workbench.sim.model.tensors import RankTensors


def evaluate_mean(ranks: list[RankTensors]) -> list[Evaluated]:
    """Returns by rank (metrics of the mean model, on rank 0 only; RMS distance of the rank from it)."""
    first, sharded = ranks[0], ranks[0].unsharder.sharded
    if first.spread is not None:
        return _evaluate_spread(ranks, first.spread)
    if sharded:
        assemble_shards(ranks, first)
    every = [[*([] if sharded else r.layout.weights), *list_buffers(r.model)] for r in ranks]
    means = [torch.stack(same).sum(0).div_(len(ranks)) if len(ranks) > 1 else same[0].clone()
             for same in zip(*every, strict=True)]  # fmt: skip
    count = 0 if sharded else len(first.layout.weights)
    drifts = [compute_distance(own[:count], means[:count], first.layout.element_count) for own in every]
    with hold_values(every[0], means), StorageTracker() as following:
        found = compute_numbers(first.learner.evaluate, first.model)
    for rank in ranks if sharded else [first]:
        rank.note_evaluation(following.most[0])
    return [(found if r == 0 else {}, drift) for r, drift in enumerate(drifts)]


def _evaluate_spread(ranks: list[RankTensors], spread: ReplicaSpread) -> list[Evaluated]:
    """The parts of the mean replica compute together."""
    drifts = [0.0] * len(ranks)
    count, ways = len(spread), spread.split.ways if spread.split else 1
    with ExitStack() as held:
        for place in range(count):
            alike = ranks[place::count]
            every = [[*r.layout.weights, *list_buffers(r.model)] for r in alike]
            means = [torch.stack(same).sum(0).div_(len(alike)) for same in zip(*every, strict=True)]
            n = len(alike[0].layout.weights)
            drifts[place::count] = [
                compute_distance(own[:n], means[:n], alike[0].layout.element_count) for own in every
            ]
            held.enter_context(hold_values(every[0], means))
        columns = [ranks[index:count:ways] for index in range(ways)]
        for stage in zip(*columns, strict=True) if spread.split else ():
            _refresh_common(stage)
        found = run_together([partial(_evaluate_stages, column) for column in columns])[0]
    return [(found if r == 0 else {}, drift) for r, drift in enumerate(drifts)]


def _refresh_common(group: Sequence[RankTensors]) -> None:
    with torch.no_grad():
        for index, owner in enumerate(group):
            for copies in zip(*(rank.common_params[index] for rank in group), strict=True):
                for copied in copies:
                    copied.copy_(copies[group.index(owner)])


def _evaluate_stages(stages: list[RankTensors], ask: Ask) -> dict[str, float]:
    def forward(*inputs: Any, **named: Any) -> Any:
        pieces = [rank.piece.pieces for rank in stages if rank.piece is not None]
        count = len(pieces)
        every = [evaluate_pipeline(Rank(k, count), its, *inputs, **named) for k, its in enumerate(pieces)]
        return _run_stages(every, following)[0]

    first, following = stages[0], StorageTracker(len(stages))
    for rank in stages:
        rank.begin_evaluation(ask)
    try:
        with replace_forward(first.model, forward) if first.piece is not None else nullcontext(), following:
            return compute_numbers(first.learner.evaluate, first.model)
    finally:
        for rank, most in zip(stages, following.most, strict=True):
            rank.end_evaluation(most)


def _run_stages(stages: Sequence[Coroutine[Op, Any, Any]], following: StorageTracker) -> list[Any]:
    """Runs the stages in turn, and returns their results. Messages wait for their receivers."""
    letters: dict[tuple[int, int, str], deque[Tensor]] = defaultdict(deque)
    waits, found = dict[int, tuple[int, int, str]](), dict[int, Any]()

    def perform(me: int, op: Op) -> Any:
        if op.verb == "do":
            return op.args[0]()
        if op.verb == "send":
            return letters[me, op.args[1], op.args[2]].append(op.args[0])
        waits[me] = op.args[1], me, op.args[2]
        if letters[waits[me]]:
            return letters[waits.pop(me)].popleft(), op.args[1]
        raise LeaveLoop

    while ready := [k for k in range(len(stages)) if k not in found and (k not in waits or letters[waits[k]])]:
        for k in ready:
            came = (letters[where := waits.pop(k)].popleft(), where[0]) if k in waits else None
            with following.count_for(k), suppress(LeaveLoop):
                found[k] = drive_coroutine(stages[k], partial(perform, k), value=came)
    return [found[k] for k in range(len(stages))]


def assemble_shards(ranks: list[RankTensors], here: RankTensors) -> None:
    """Copies every rank's shards into the model of `here`."""
    for rank in ranks:
        for bucket, own, begin in zip(here.list_params(), rank.layout.weights, rank.layout.begins, strict=True):
            kept = rank.away.read_parameters(bucket.index)
            own = own if kept is None else kept
            bucket.data[begin : begin + own.numel()].copy_(own)


def evaluate_known(rank: RankTensors, known: list[Bucket], evaluate: bool) -> Evaluated:
    """Returns (metrics of `known`, if `evaluate`; this rank's RMS distance from `known`)."""
    own, values = [b.data for b in rank.layout.list_params()], [b.data.clone() for b in known]
    drift = compute_distance(own, values, rank.layout.element_count)
    if not evaluate:
        return {}, drift
    with hold_values(own, values), StorageTracker() as following:
        found = compute_numbers(rank.learner.evaluate, rank.model)
    rank.note_evaluation(following.most[0])
    return found, drift
