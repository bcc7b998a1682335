"""Finds on the meta device which share of a forward runs again in backward."""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from workbench.experiment import Experiment
from workbench.host.core.valueless import make_outline
from workbench.host.memory.batches import make_example, move_to_device
from workbench.host.passes.checkpointing import NO_RECOMPUTE, checkpoint_units, list_units
from workbench.host.passes.stage_module import cut_batch
from workbench.host.passes.tensor_parallel import compute_together, copy_slice
from workbench.host.passes.tensor_schedule import PiecePasses, make_answer_like
from workbench.host.placement.stage_cuts import StageCuts, cut_model
from workbench.host.placement.tensor_split import TensorSplit
from workbench.settings import KnobError
from workbench.settings.describe_error import text_of
from workbench.tasks import Learner

Shares = tuple[float, ...]
_FOUND: WeakKeyDictionary[Learner, dict[Hashable, Shares | str]] = WeakKeyDictionary()


def find_recomputed(e: Experiment, learner: Learner, split: TensorSplit | None) -> Shares:
    """Returns, by piece, which share of its forward's floating-point operations backward repeats.

    0 if the model does not run on the meta device. Raises KnobError if only the checkpointed model fails there.
    """
    way = e.partition
    count = way.depth * way.pieces
    if way.layers.recompute[0] == NO_RECOMPUTE:
        return (0.0,) * count
    cut_so = way.depth, way.pieces, way.cuts
    key = way.layers.recompute, way.slices, way.sequences, cut_so, way.micro_batches, e.batch
    made = _FOUND.setdefault(learner, {})
    if key not in made:
        with torch.random.fork_rng():
            try:
                made[key] = _try_passes(e, learner, split)
            except KnobError as error:
                made[key] = str(error)
    if isinstance(found := made[key], str):
        raise KnobError(found)
    return found or (0.0,) * count


def _try_passes(e: Experiment, learner: Learner, split: TensorSplit | None) -> Shares:
    way, what = e.partition, e.partition.layers.recompute[0]
    try:
        whole = make_outline(learner)
        part = copy_slice(whole, split, 0) if split else whole
        stages = cut_model(e, part, learner) if way.depth > 1 else None
        batch = cut_batch(move_to_device(make_example(learner, e, "cpu"), "meta"), way.micro_batches)[0]
        plain = _count_operations(part, learner, batch, stages, split)
    except Exception:
        list_units(whole, learner, way.layers)
        return ()
    try:
        with checkpoint_units(part, learner, way.layers):
            again = _count_operations(part, learner, batch, stages, split)
    except KnobError:
        raise
    except Exception as error:
        raise KnobError(
            f"checkpoint={what}: in a trial on one batch, a unit cannot be computed again: {text_of(error)}; do not "
            f"write into a unit's input, or take checkpoint=none"
        ) from error
    shares = tuple((b - a) / (forward or 1.0) for (forward, a), (_, b) in zip(plain, again, strict=True))
    if what == "attention" and not any(shares):
        raise KnobError(
            "checkpoint=attention: no unit of the model calls scaled_dot_product_attention, so nothing would be "
            "computed again; take checkpoint=units"
        )
    return shares


def _count_operations(
    model: nn.Module, learner: Learner, batch: object, stages: StageCuts | None, split: TensorSplit | None
) -> list[Any]:
    counted: list[Any] = []
    with ExitStack() as also, torch.enable_grad():
        if split:
            answer = partial(make_answer_like, ways=split.ways)
            also.enter_context(compute_together(model, split, 0, answer, draws=False))
        ways = PiecePasses(model, learner, stages, batch)
        for number in range(ways.count):
            with FlopCounterMode(display=False) as counter:
                ways.run_forward(number)
            counted.append([counter.get_total_flops()])
        for number in reversed(range(ways.count)):
            with FlopCounterMode(display=False) as counter:
                ways.run_backward(number)
            counted[number].append(counter.get_total_flops())
    model.zero_grad(set_to_none=True)
    return counted
