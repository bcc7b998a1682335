"""A model's description and hash, which ranks compare before training."""

from __future__ import annotations

import hashlib
from typing import Any

from torch import nn


def hash_signature(model: nn.Module) -> int:
    """Returns a 63-bit hash of parameter names, shapes and dtypes."""
    text = ";".join(f"{n}{tuple(p.shape)}{p.dtype}{p.requires_grad}" for n, p in model.named_parameters())
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def describe_parameters(model: nn.Module) -> list[list[Any]]:
    """Lists [name, shape, dtype, whether it is trained]."""
    return [[n, list(p.shape), str(p.dtype)[6:], p.requires_grad] for n, p in model.named_parameters()]


def describe_difference(first: list[list[Any]], other: list[list[Any]], rank: int) -> str:
    """Describes the first difference from rank 0's model."""
    for one, two in zip(first, other, strict=False):
        if one != two:
            what = f"parameter {one[0]!r} is {_format_parameter(one)} on rank 0, "
            what += (
                f"{_format_parameter(two)} on rank {rank}" if one[0] == two[0] else f"where rank {rank} has {two[0]!r}"
            )
            break
    else:
        more, who = (first, 0) if len(first) > len(other) else (other, rank)
        extra = more[min(len(first), len(other))]
        what = f"parameter {extra[0]!r}, {_format_parameter(extra)}, exists on rank {who} only"
    return f"{what}: task.model() must return the same model on every rank"


def _format_parameter(about: list[Any]) -> str:
    _, shape, dtype, trained = about
    return f"{dtype} of shape {tuple(shape)}{'' if trained else ', frozen'}"
