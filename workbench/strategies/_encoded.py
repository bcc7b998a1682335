"""A tensor as one message in a compressor's code; both ends know its length from the shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from workbench.compressors import Coder, Compressor
from workbench.rank import Memory, outlined, sizes_of


@outlined(lambda compressor, memory, x: room(compressor, x))
def packet(compressor: Compressor, memory: Memory, x: Tensor) -> Tensor:
    """Encodes `x` and returns all parts concatenated: (...) -> (nbytes,) uint8."""
    made = _coder(compressor, memory).encode(x)
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in made])


def room(compressor: Compressor, x: Tensor) -> Tensor:
    """Returns an empty buffer for a packet of such a tensor: (nbytes,) uint8."""
    return x.new_empty(sum(n for n, _, _ in _known(compressor, x)), dtype=torch.uint8)


@outlined(lambda compressor, message, like: like.new_empty(like.shape))
def opened(compressor: Compressor, message: Tensor, like: Tensor) -> Tensor:
    """Decodes a packet, in the shape and the dtype of `like`."""
    at, payload = 0, []
    for nbytes, shape, kind in _known(compressor, like):
        payload.append(message[at : at + nbytes].clone().view(kind).view(shape))
        at += nbytes
    return _coder(compressor, Memory()).decode(tuple(payload), like)


_parts: dict[Any, tuple[tuple[int, torch.Size, torch.dtype], ...]] = {}


def _known(compressor: Compressor, x: Tensor) -> tuple[tuple[int, torch.Size, torch.dtype], ...]:
    """Returns bytes, shape and dtype of each part of an encoded `x`. Cached by shape and dtype."""
    key = compressor, x.shape, x.dtype
    if key not in _parts:
        made = _coder(compressor, Memory()).encode(sizes_of(x))
        _parts[key] = tuple((part.numel() * part.element_size(), part.shape, part.dtype) for part in made)
    return _parts[key]


def _coder(compressor: Compressor, memory: Memory) -> Coder:
    coder = compressor.coder(memory)
    assert coder is not None, "the compressor does not encode a single tensor"
    return coder
