"""How the engine's ranks agree on the canonical state, over the control wire."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workbench.engine.collectives.wire import Wire
from workbench.host.observe.held_out_numbers import compute_rms, sum_squares
from workbench.host.placement.canonical_state import RankDisagreement, check_same, list_buffers
from workbench.host.placement.parameter_layout import ParameterLayout
from workbench.host.placement.signature import describe_difference, describe_parameters, hash_signature


def gather_numbers(wire: Wire | None, number: int) -> list[int]:
    """Returns every rank's `number`, by rank."""
    if wire is None:
        return [number]
    mine = torch.tensor([number], dtype=torch.int64)
    out = torch.empty(wire.size, dtype=torch.int64)
    wire.wait(wire.all_gather(out, mine))
    return out.tolist()


def gather_lists(wire: Wire | None, numbers: list[int]) -> list[list[int]]:
    """Returns every rank's equally long `numbers`, by rank."""
    if wire is None:
        return [numbers]
    mine = torch.tensor(numbers, dtype=torch.int64)
    out = torch.empty(wire.size, len(numbers), dtype=torch.int64)
    wire.wait(wire.all_gather(out.view(-1), mine))
    rows: list[list[int]] = out.tolist()
    return rows


def check_equal(wire: Wire | None, number: int, what: str) -> None:
    """Raises RankDisagreement with the ranks whose `number` differs from rank 0's."""
    check_same(gather_numbers(wire, number), what)


def check_model(wire: Wire | None, model: nn.Module) -> None:
    """Raises RankDisagreement with the first parameter in which a rank's model differs from rank 0's."""
    numbers = gather_numbers(wire, hash_signature(model))
    if wire is None or len(set(numbers)) == 1:
        return
    first = json.loads(broadcast_text(wire, json.dumps(describe_parameters(model)).encode(), 0))
    odd = next(r for r, n in enumerate(numbers) if n != numbers[0])
    mine = describe_difference(first, describe_parameters(model), wire.rank) if wire.rank == odd else ""
    raise RankDisagreement(broadcast_text(wire, mine.encode(), odd).decode())


def broadcast_text(wire: Wire, text: bytes, source: int) -> bytes:
    """Returns rank `source`'s text on every rank."""
    length = torch.tensor([len(text)])
    wire.wait(wire.broadcast(length, source))
    body = torch.empty(int(length), dtype=torch.uint8)
    if wire.rank == source:
        body = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if int(length):
        wire.wait(wire.broadcast(body, source))
    return bytes(body.numpy())


def broadcast_model(wire: Wire | None, layout: ParameterLayout, model: nn.Module) -> None:
    """Copies rank 0's parameters and buffers to all ranks."""
    if wire is None:
        return
    frozen = [p.data for p in model.parameters() if not p.requires_grad]
    for x in [*layout.weights, *frozen, *model.buffers()]:
        flat = x.detach().contiguous().view(-1)
        if flat.numel():
            wire.wait(wire.broadcast(flat, 0))
            x.copy_(flat.view(x.shape))


@contextmanager
def use_mean_model(
    wire: Wire | None, layout: ParameterLayout, weights: list[Tensor], model: nn.Module
) -> Iterator[float]:
    """Inside the block, the model is the mean of all ranks' models. Yields this rank's RMS distance from it.

    weights: the parameters that may differ between ranks
    """
    if wire is None:
        yield 0.0
        return
    live = [x for x in [*weights, *list_buffers(model)] if x.numel()]
    count, away = sum(w.numel() > 0 for w in weights), 0.0
    kept: list[tuple[Tensor, Tensor]] = []
    try:
        for number, x in enumerate(live):
            if (own := _replace_by_mean(wire, x)) is not None:
                kept.append((x, own))
                away += sum_squares(own, x) if number < count else 0.0
        yield compute_rms(away, layout.element_count)
    finally:
        for x, own in kept:
            x.data.copy_(own)


def _replace_by_mean(wire: Wire, x: Tensor) -> Tensor | None:
    """Replaces `x` by the mean of all ranks' `x`. Returns the old value; None if it equals the mean, to save memory."""
    mean = x.detach().clone(memory_format=torch.contiguous_format)  # a view of other memory need not be flat
    wire.wait(wire.all_reduce(mean.view(-1)))
    if torch.equal(mean.div_(wire.size), x):
        return None
    own = x.detach().clone()
    x.data.copy_(mean)
    return own
