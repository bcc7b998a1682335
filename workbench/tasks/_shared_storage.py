"""Parameters that share memory without being one parameter. Ranks keep parameters in buckets, which would part them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor, nn

from workbench.settings import KnobError


def require_own_storage(model: nn.Module) -> None:
    """Raises KnobError if a trained parameter shares elements with another parameter or with a buffer."""
    by_storage: dict[int, list[tuple[str, Tensor]]] = {}
    for name, x in chain(model.named_parameters(), model.named_buffers()):
        if type(x.data) is Tensor and x.layout == torch.strided and x.numel() and not x.is_meta:
            by_storage.setdefault(x.untyped_storage().data_ptr(), []).append((name, x))
    for named in by_storage.values():
        for (one, a), (other, b) in _list_overlapping(named):
            if a.requires_grad or b.requires_grad:
                raise KnobError(
                    f"model: {one} and {other} share memory, and ranks cannot keep that; to tie two layers, give them "
                    f"one Parameter (`second.weight = first.weight`, not its data); to begin with equal values, copy "
                    f"them (`first.weight.data.clone()`)"
                )


def _list_overlapping(named: list[tuple[str, Tensor]]) -> Iterator[tuple[tuple[str, Tensor], tuple[str, Tensor]]]:
    """Yields pairs of tensors of one storage that share elements, at most one pair for each tensor."""
    furthest, *others = sorted(named, key=lambda pair: _byte_range(pair[1]))
    for pair in others:
        if _byte_range(pair[1])[0] < _byte_range(furthest[1])[1] and _share_elements(furthest[1], pair[1]):
            yield furthest, pair
        furthest = max(furthest, pair, key=lambda pair: _byte_range(pair[1])[1])


def _byte_range(x: Tensor) -> tuple[int, int]:
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


def _share_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors with overlapping ranges share a byte. Interleaved columns share none."""
    if a.is_contiguous() and b.is_contiguous():
        return True
    return bool(torch.isin(_byte_offsets(a), _byte_offsets(b)).any())


def _byte_offsets(x: Tensor) -> Tensor:
    """Returns the address of each byte: int64 of (bytes,)."""
    at = torch.tensor(x.data_ptr())
    for n, step in zip((*x.shape, x.element_size()), (*(s * x.element_size() for s in x.stride()), 1), strict=True):
        at = at.unsqueeze(-1) + torch.arange(n) * step
    return at.flatten()
