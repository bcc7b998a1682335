"""Measures a compressor's error and bytes on some values, on one rank without a network."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.compressors._base import Compressor
from workbench.compressors.error_feedback import without_feedback
from workbench.rank import Bucket, Memory, Op, Rank, StrategyError

MEMORY_TRIES = 5  # tries of a compressor with memory on the same values


def tried(compressor: Compressor, bucket: Bucket) -> tuple[Tensor, int]:
    """Returns (norm of the values that `compressor` loses, bytes that it sends). An echo acts as the other rank.

    Changes nothing and draws only from the trial's own generator. A compressor with memory, such as PowerSGD, repeats
    while its loss falls.
    """
    of, memory = without_feedback(compressor), Memory()
    lost, sent = _once(of, bucket, memory)
    for _ in range(MEMORY_TRIES - 1):
        if not (memory.parts or memory.buffers):
            break
        again, sent = _once(of, bucket, memory)
        if not again < lost:
            break
        lost = again
    return lost, sent


def _once(of: Compressor, bucket: Bucket, memory: Memory) -> tuple[Tensor, int]:
    child = of.reduce(Rank(0, 2), bucket.like(bucket.data.clone()), memory)
    sent, answer = 0, None
    try:
        while True:
            op = child.send(answer)
            answer, size = _echo(op)
            sent += size
    except StopIteration as stop:
        own = stop.value
    lost = bucket.data - own if own is not None else bucket.data.new_zeros(1)
    return torch.linalg.vector_norm(lost.float()), sent


def _echo(op: Op) -> tuple[Any, int]:
    """Returns a collective's result if the second of 2 ranks holds the same, and the bytes sent to it."""
    x = op.args[0]
    match op.verb:
        case "sample":
            return None, 0
        case "all_reduce":
            return x.mul_(2) if op.args[1] == "sum" else x, x.nbytes
        case "broadcast":
            return x, x.nbytes
        case "all_gather":
            return torch.stack([x, x]), x.nbytes
        case "all_to_all":
            return torch.stack([x[0], x[0]]), x[1].nbytes
        case "reduce_scatter":
            return x.view(2, -1)[0] * 2, x.nbytes // 2
        case "all_to_allv":
            due = op.args[1][1][0]  # the echo holds the same, so it sends the row of this length
            its = next((row for row in x if row.numel() == due), x[0].new_zeros(due))
            return [x[0], its.clone()], x[1].nbytes
    raise StrategyError(f"a compressor requested {op.verb}, which is not a collective")
