"""Batches as examples: taking some out, and adding those of other ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from workbench.rank import Rank, StrategyError


async def injected(rank: Rank, batch: Any, sharing: list[int], share: float) -> Any:
    """Returns `batch` followed by the examples that the other ranks of `sharing` send.

    Each of these ranks sends the first `share` of its own examples, at least one, to all other ranks. A batch is a
    tensor, or tuples, lists and dicts of tensors of any dtype. Examples are in dimension 0. Other values in it stay.
    Raises StrategyError if the tensors disagree on the number of examples.
    """
    own = list(_tensors(batch))
    examples = {t.shape[0] if t.dim() else 0 for t in own}
    if len(examples) != 1 or examples == {0}:
        raise StrategyError(
            "sharing examples needs the examples in dimension 0 of every tensor of a batch, and the shapes are "
            "{[tuple(t.shape) for t in own]}; use inject_ranks=0 with this task"
        )
    if rank.index in sharing:
        few = max(1, round(share * examples.pop()))
        for other in range(rank.size):
            for k, t in enumerate(own if other != rank.index else ()):
                await rank.send(t[:few], other, f"examples {k}")
    more: list[list[Tensor]] = [[t] for t in own]
    for source in sharing:
        for k, t in enumerate(own if source != rank.index else ()):
            theirs, _ = await rank.recv(None, source, f"examples {k}")
            more[k].append(theirs.to(t.device))
    return _with(batch, iter([torch.cat(pieces) for pieces in more]))


def _tensors(batch: Any) -> Iterator[Tensor]:
    """Yields every tensor of a batch, in the same order on all ranks."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, (dict, list, tuple)):
        for inner in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(inner)


def _with(batch: Any, tensors: Iterator[Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return next(tensors)
    if isinstance(batch, dict):
        made = {k: _with(v, tensors) for k, v in batch.items()}
        return made if type(batch) is dict else type(batch)(made)
    if isinstance(batch, (list, tuple)):
        inner = [_with(v, tensors) for v in batch]
        return type(batch)(*inner) if hasattr(batch, "_fields") else type(batch)(inner)
    return batch
