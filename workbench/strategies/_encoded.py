"""A tensor as one message in a coder's few bits, whose length both ends know from its shape."""

from __future__ import annotations

import torch
from torch import Tensor

from workbench.compressors import Coder
from workbench.rank import sizes_of


def packet(coder: Coder, x: Tensor) -> Tensor:
    """(...) -> all that the coder makes of `x`, end to end: (nbytes,) uint8."""
    return torch.cat([part.contiguous().flatten().view(torch.uint8) for part in coder.encode(x)])


def room(coder: Coder, x: Tensor) -> Tensor:
    """Where a packet of such a tensor is taken in: (nbytes,) uint8."""
    return x.new_empty(sum(part.numel() * part.element_size() for part in _parts(coder, x)), dtype=torch.uint8)


def opened(coder: Coder, message: Tensor, like: Tensor) -> Tensor:
    """What a packet says, in the shape and the dtype of `like`."""
    at, payload = 0, []
    for part in _parts(coder, like):
        nbytes = part.numel() * part.element_size()
        payload.append(message[at : at + nbytes].clone().view(part.dtype).view(part.shape))
        at += nbytes
    return coder.decode(tuple(payload), like)


def _parts(coder: Coder, x: Tensor) -> tuple[Tensor, ...]:
    return coder.encode(sizes_of(x))
