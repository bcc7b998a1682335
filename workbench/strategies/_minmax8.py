"""One byte per element: where a value lies between the smallest and the largest of its tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(x: Tensor) -> torch.dtype:
    """The type in which is reckoned, and in which the heading travels."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def encode(x: Tensor) -> Tensor:
    """(n,) -> (heading + n,) uint8: the smallest value and the step between two codes, then q = (x - min) / step.

    The largest value gets the code 255 and nothing goes beyond it. What is not finite makes the heading so, and all
    that is decoded from it.
    """
    wide = x.to(_wide(x))
    low, high = wide.aminmax()
    step = ((high.double() - low.double()) / 255).to(wide.dtype)
    q = (wide - low).div_(torch.where(step > 0, step, torch.ones_like(step))).round_()
    codes = q.nan_to_num_(0.0).clamp_(0, 255).to(torch.uint8)
    return torch.cat([torch.stack([low, step]).view(torch.uint8), codes])


def decode(letter: Tensor, like: Tensor) -> Tensor:
    """What `encode` was given, in the type of `like`: off by half a step at most."""
    head = 2 * _wide(like).itemsize
    low, step = letter[:head].clone().view(_wide(like)).unbind()
    return (letter[head:].to(_wide(like)) * step + low).to(like.dtype)


def encoded(like: Tensor) -> Tensor:
    """Room for what `encode` makes of a tensor such as `like`."""
    return like.new_empty(2 * _wide(like).itemsize + like.numel(), dtype=torch.uint8)
