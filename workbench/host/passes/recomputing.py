"""Finds out, by passes on the meta device, which share of a forward runs again in backward."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.experiment import Experiment
from workbench.host.core.meta import outline
from workbench.host.memory.batches import example, to_device
from workbench.host.passes.checkpointing import OFF, checkpointing, units_of
from workbench.host.passes.meetings import Passes, answer_like
from workbench.host.passes.piece import micro_batches
from workbench.host.passes.together import computing, slice_of
from workbench.host.placement.cutting import Stages, cut
from workbench.host.placement.splitting import Split
from workbench.settings import KnobError
from workbench.settings.said import text_of
from workbench.tasks import Learner

Shares = tuple[float, ...]
_FOUND: WeakKeyDictionary[Learner, dict[Any, Shares | str]] = WeakKeyDictionary()


def recomputed(e: Experiment, learner: Learner, split: Split | None) -> Shares:
    """Returns, by piece, which share of its forward's floating-point operations backward repeats.

    0 if the model does not run on the meta device. Raises KnobError if only the checkpointed model fails there.
    """
    way = e.partition
    count = way.depth * way.pieces
    if way.layers.recompute[0] == OFF:
        return (0.0,) * count
    cut_so = way.depth, way.pieces, way.cuts
    key = way.layers.recompute, way.slices, way.sequences, cut_so, way.micro_batches, e.batch
    made = _FOUND.setdefault(learner, {})
    if key not in made:
        with torch.random.fork_rng():
            try:
                made[key] = _tried(e, learner, split)
            except KnobError as error:
                made[key] = str(error)
    if isinstance(found := made[key], str):
        raise KnobError(found)
    return found or (0.0,) * count


def _tried(e: Experiment, learner: Learner, split: Split | None) -> Shares:
    way, what = e.partition, e.partition.layers.recompute[0]
    try:
        whole = outline(learner)
        part = slice_of(whole, split, 0) if split else whole
        stages = cut(e, part, learner) if way.depth > 1 else None
        batch = micro_batches(to_device(example(learner, e, "cpu"), "meta"), way.micro_batches)[0]
        plain = _passed(part, learner, batch, stages, split)
    except Exception:
        units_of(whole, learner, way.layers)
        return ()
    try:
        with checkpointing(part, learner, way.layers):
            again = _passed(part, learner, batch, stages, split)
    except KnobError:
        raise
    except Exception as error:
        raise KnobError(
            f"checkpoint={what}: tried on one batch, a unit cannot be computed again: {text_of(error)}; let no unit "
            f"write into what it is given, or take checkpoint=none"
        ) from error
    shares = tuple((b - a) / (forward or 1.0) for (forward, a), (_, b) in zip(plain, again, strict=True))
    if what == "attention" and not any(shares):
        raise KnobError(
            "checkpoint=attention: no unit of the model calls scaled_dot_product_attention, so nothing would be "
            "computed again; take checkpoint=units"
        )
    return shares


def _passed(model: nn.Module, learner: Learner, batch: Any, stages: Stages | None, split: Split | None) -> list[Any]:
    """Returns, by piece, the floating-point operations of its forward and its backward."""
    counted: list[Any] = []
    with ExitStack() as also, torch.enable_grad():
        if split:
            answer = partial(answer_like, ways=split.ways)
            also.enter_context(computing(model, split, 0, answer, draws=False))
        ways = Passes(model, learner, stages, batch)
        for number in range(ways.count):
            with FlopCounterMode(display=False) as counter:
                ways.forward(number)
            counted.append([counter.get_total_flops()])
        for number in reversed(range(ways.count)):
            with FlopCounterMode(display=False) as counter:
                ways.backward(number)
            counted[number].append(counter.get_total_flops())
    model.zero_grad(set_to_none=True)
    return counted
