"""Finds parameters whose data the model has replaced (`p.data = x`)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from workbench.rank import Part, StrategyError


def find_replaced(params: list[nn.Parameter], parts: Sequence[Part], at: int, size: int) -> list[tuple[Tensor, Part]]:
    """Returns the data that does not lie in its part of a bucket. Nearly always none, so that case is quick.

    at: the bucket's address; size: bytes of an element
    """
    where = [at + size * part.start for part in parts]
    if where == list(map(Tensor.data_ptr, params)) and all(map(Tensor.is_contiguous, params)):
        return []
    data = zip((p.data for p in params), parts, where, strict=True)
    return [(x, part) for x, part, one in data if not x.is_contiguous() or (x.numel() and x.data_ptr() != one)]


def require_like(name: str, given: Tensor, part: Part, own: Tensor) -> None:
    """Raises StrategyError if the given data has another shape or dtype than its part of the bucket."""
    if given.shape != part.shape or given.dtype != own.dtype:
        was, now = ((list(shape), str(kind).removeprefix("torch.")) for shape, kind in
                    ((part.shape, own.dtype), (given.shape, given.dtype)))  # fmt: skip
        raise StrategyError(
            f"parameter {name}: the model has replaced its data of shape {was[0]} and type {was[1]} by {now[0]} and "
            f"{now[1]}, and ranks cannot follow; keep the shape and type, or create the model with the new ones"
        )


def explain_copied(name: str) -> StrategyError:
    """Returns the error of a write that a copy elsewhere would undo."""
    return StrategyError(
        f"parameter {name}: the model has written into it, and the strategy updates a copy on the host or the disk; "
        f"take ZeRO2 or ZeRO3, or do not write into parameters in the model"
    )
