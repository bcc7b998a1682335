"""The memory of an evaluation on one rank, from a pass without values."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from workbench.host.core.valueless import put_on_cpu
from workbench.host.memory.batches import Chance
from workbench.host.memory.storage_tracker import StorageTracker, count_arrived
from workbench.host.observe.held_out_numbers import CHUNK_ELEMENTS, compute_numbers, count_kept_bytes
from workbench.host.passes.tensor_parallel import compute_together
from workbench.host.passes.tensor_schedule import make_answer_like
from workbench.host.placement.canonical_state import list_buffers
from workbench.host.placement.stage_cuts import StageCuts, list_parts, replace_forward, run_parts
from workbench.host.placement.tensor_split import TensorSplit
from workbench.tasks import Learner


def measure_evaluation(
    model: nn.Module, learner: Learner, stages: StageCuts | None, split: TensorSplit | None, seed: int
) -> list[int]:
    """Returns by stage the peak bytes of computing the held-out metrics. model: on the meta device

    Raises if `evaluate` reads values, except numbers from tensors, which are zero. Its own data, and results from that
    data alone, are real, so it may cache them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    from workbench.sim.fake.fake_cache import FakeCacheMode

    fake, count = copy.deepcopy(model), len(stages) if stages else 1
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        put_on_cpu(fake)
        mode.from_tensor(torch.zeros(1))  # its first call imports modules, which may keep callers' frames
    following = StorageTracker(count, sizes=True)
    with Chance(seed), ExitStack() as also:
        if split is not None:
            also.enter_context(
                compute_together(fake, split, 0, partial(make_answer_like, ways=split.ways), draws=False)
            )
        if stages:
            parts, ends = list_parts(fake, learner), [0, *accumulate(len(some) for some in stages.pieces)]
            pieces = [parts[a:b] for a, b in pairwise(ends)]
            also.enter_context(replace_forward(fake, partial(_run_stages, following, count, pieces)))
        if learner.pure:
            also.enter_context(replace_forward(fake, partial(_forward_once, following, dict[Any, Any](), fake.forward)))
        also.enter_context(FakeCacheMode())
        also.enter_context(following)
        compute_numbers(learner.evaluate, fake)
    return following.most


def _forward_once(
    following: StorageTracker, seen: dict[Any, Any], forward: Any, x: Any, *more: Any, **named: Any
) -> Any:
    """Later batches of the same sizes reuse the first one's sizes and memory.

    A model that reads values reuses nothing, because its output may differ.
    """
    from torch._subclasses.fake_tensor import FakeTensor

    if more or named or not isinstance(x, Tensor) or torch.is_grad_enabled():
        return forward(x, *more, **named)
    key = type(x), x.shape, x.stride(), x.dtype, x.device
    if key in seen:
        beyond, like = seen[key]
        following.count_repetition(beyond)
        with following.pause_counting():
            made = torch.empty_like(like)
        count_arrived(made)
        return made
    with following.measure_apart() as beyond:
        made = forward(x)
    if type(made) is FakeTensor and not following.read and following.has_counted(made):
        if made.untyped_storage().nbytes() == made.nbytes:
            with following.pause_counting():
                seen[key] = beyond, torch.empty_like(made)
    return made


def _run_stages(following: StorageTracker, count: int, pieces: Sequence[Sequence[nn.Module]], *inputs: Any,
               **named: Any) -> Any:  # fmt: skip
    """Runs the stages as `pipelining.evaluate_pipeline` does. Returns the last output."""
    x: Any = None
    for number, parts in enumerate(pieces):
        with following.count_for(number % count):
            if number:
                count_arrived(x)
                inputs, named = (x,), {}
            x = run_parts(parts, *inputs, **named)
    count_arrived(x)
    return x


def count_evaluation_bytes(run: Any, together: bool, most: int | None) -> int | None:
    """Returns the extra bytes of an evaluation on this rank: copies of parameters, and computation.

    together: whether all ranks meet for the mean model; most: bytes of the computation, None if unknown. Returns None
    if the rank computes and `most` is unknown.
    """
    rank, layout = run.rank, run.layout
    others = sum(b.numel() * b.element_size() for b in list_buffers(run.model))
    sizes = [bucket.nbytes for bucket in layout.list_params()]
    first = rank.replicas.index == 0 or run.unsharder.sharded
    if run.learner.evaluate is None:
        most = 0
    if first and most is None:
        return None
    computes, compared = most or 0 if first else 0, 2 * min(4 * CHUNK_ELEMENTS, max(sizes))
    if not together:
        return sum(sizes) + max(compared, sum(sizes) + others + computes if first and most else 0)
    if run.spread is not None:
        return computes if rank.replicas.size == 1 else 2 * (sum(sizes) + others) + max(compared, computes)
    held = 0 if run.unsharder.sharded else sum(sizes)
    kept = count_kept_bytes(run.experiment.strategy, rank.size, held, others)
    made = max(sizes) if held and rank.size > 1 else 0
    return kept + max(made, computes)
