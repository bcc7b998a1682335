"""Held-out loss where there are real tensors: of the mean of all virtual ranks' models, or of what one knows."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch

from workbench.host.canonical import buffers
from workbench.host.crew import Work, together
from workbench.host.cutting import instead, through
from workbench.host.evaluating import Evaluated, distance, holding, numbers
from workbench.host.splitting import Split
from workbench.host.together import Ask
from workbench.rank import Bucket
from workbench.sim.tensors import Tensors


def mean_evaluated(ranks: list[Tensors]) -> list[Evaluated]:
    """By rank: the held-out numbers of the mean model, on the first; the rank's RMS distance from it."""
    first, sharded = ranks[0], ranks[0].reading.sharded
    if first.piece is not None:
        return _in_stages(ranks, first.piece.stages)
    if first.split is not None:
        return _in_slices(ranks, first.split)
    if sharded:
        assembled(ranks, first)
    every = [[*([] if sharded else r.layout.weights), *buffers(r.model)] for r in ranks]
    means = [torch.stack(same).sum(0).div_(len(ranks)) if len(ranks) > 1 else same[0].clone()
             for same in zip(*every, strict=True)]  # fmt: skip
    count = 0 if sharded else len(first.layout.weights)
    drifts = [distance(own[:count], means[:count], first.layout.numel) for own in every]
    with holding(every[0], means):
        found = numbers(first.learner.evaluate, first.model)
    return [(found if r == 0 else {}, drift) for r, drift in enumerate(drifts)]


def _in_stages(ranks: list[Tensors], count: int) -> list[Evaluated]:
    """The same where replicas lie in stages: of the mean of each stage's replicas, one after the other."""
    drifts = [0.0] * len(ranks)
    with ExitStack() as held:
        for stage in range(count):
            alike = ranks[stage::count]
            every = [[*r.layout.weights, *buffers(r.model)] for r in alike]
            means = [torch.stack(same).sum(0).div_(len(alike)) for same in zip(*every, strict=True)]
            n = len(alike[0].layout.weights)
            drifts[stage::count] = [distance(own[:n], means[:n], alike[0].layout.numel) for own in every]
            held.enter_context(holding(every[0], means))

        def forward(*inputs: Any, **named: Any) -> Any:
            stages = [rank.piece.pieces for rank in ranks[:count] if rank.piece is not None]
            first, *rest = [stage[number] for number in range(len(stages[0])) for stage in stages]
            x = through(first, *inputs, **named)
            for parts in rest:
                x = through(parts, x)
            return x

        for rank in ranks[1:count]:
            rank.model.eval()
        with instead(ranks[0].model, forward):
            found = numbers(ranks[0].learner.evaluate, ranks[0].model)
        for rank in ranks[1:count]:
            rank.model.train()
    return [(found if r == 0 else {}, drift) for r, drift in enumerate(drifts)]


def _in_slices(ranks: list[Tensors], split: Split) -> list[Evaluated]:
    """The same where replicas lie in slices: of the mean of the replicas, all slices together."""
    drifts = [0.0] * len(ranks)
    with ExitStack() as held:
        for index in range(split.ways):
            alike = ranks[index :: split.ways]
            every = [[*r.layout.weights, *buffers(r.model)] for r in alike]
            means = [torch.stack(same).sum(0).div_(len(alike)) for same in zip(*every, strict=True)]
            n = len(alike[0].layout.weights)
            drifts[index :: split.ways] = [distance(own[:n], means[:n], alike[0].layout.numel) for own in every]
            held.enter_context(holding(every[0], means))
        here = ranks[: split.ways]
        with torch.no_grad():
            for name, owner in split.owners.items():
                for rank in here:
                    rank.model.get_parameter(name).copy_(here[owner].model.get_parameter(name))

        def work(rank: Tensors) -> Work:
            def evaluated(ask: Ask) -> Any:
                rank.ask = ask
                return numbers(rank.learner.evaluate, rank.model)

            return evaluated

        found = together([work(rank) for rank in here])[0]
    return [(found if r == 0 else {}, drift) for r, drift in enumerate(drifts)]


def assembled(ranks: list[Tensors], here: Tensors) -> None:
    """The model of one rank has the values of every rank's shards."""
    for rank in ranks:
        for bucket, own, begin in zip(here.params(), rank.layout.weights, rank.layout.begins, strict=True):
            bucket.data[begin : begin + own.numel()].copy_(own)


def known_evaluated(rank: Tensors, known: list[Bucket], evaluate: bool) -> Evaluated:
    """The held-out numbers of the parameters in `known` if `evaluate`; this rank's RMS distance from them."""
    own, values = [b.data for b in rank.layout.params()], [b.data.clone() for b in known]
    drift = distance(own, values, rank.layout.numel)
    if not evaluate:
        return {}, drift
    with holding(own, values):
        return numbers(rank.learner.evaluate, rank.model), drift
