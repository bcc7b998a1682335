"""Sends gradients in a narrower float."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from workbench.compressors._base import Codec, Payload
from workbench.settings import knob


@dataclass(frozen=True, kw_only=True)
class Cast(Codec):
    """Rounds every element to 16 bits and sums in that format: half the bytes of fp32.

    fp16 keeps 11 significant bits but overflows above 65504; bf16 keeps 8 bits and fp32's range. Bytes sent per rank: 2
    (p-1)/p * 2 n. Rounding to nearest usually counts as unbiased, but it is so only on average over inputs. The sum
    also rounds in the narrow type. Ranks pass shares, so a gradient is divided by p before the cast. Torch's hook casts
    first, so fp16 overflows at gradients 1/p as large. Floats of 8 bits cannot be added while they travel: see Float8.

    When to use it: as the baseline of every other compressor: nearly free, and half the bytes.

    Reference: torch's fp16_compress_hook and bf16_compress_hook,
    https://docs.pytorch.org/docs/stable/ddp_comm_hooks.html
    """

    known_as: ClassVar[tuple[str, ...]] = ("FP16", "BF16", "Half")
    to: str = knob("bf16", choices=("fp16", "bf16"), doc="the 16-bit float that is sent")

    linear: ClassVar[bool] = True
    kind: ClassVar[str] = "casts"
    starter: ClassVar[bool] = True

    def encode(self, x: Tensor) -> Payload:
        return (x.to(torch.float16 if self.to == "fp16" else torch.bfloat16),)

    def decode(self, payload: Payload, like: Tensor) -> Tensor:
        return payload[0].to(like.dtype)
