"""Codecs in place of what ranks of one replica send each other in the middle of a pass."""

from __future__ import annotations

from workbench.compressors import Compressor
from workbench.compressors.error_feedback import bare
from workbench.partitions._base import Coding
from workbench.rank import Memory


def coding(activations: Compressor, gradients: Compressor, mask: bool, memory: Memory) -> Coding:
    """Both at work, without error feedback: what was left out of an activation is not missed by the next one."""
    there, back = (None if way.immediate else bare(way).coder(memory) for way in (activations, gradients))
    return Coding(there, back, mask)


def refused(activations: Compressor, gradients: Compressor, where: str) -> str | None:
    """Why one of them cannot stand there, "between two stages", in a sentence that says what would do; or None."""
    for name, way in (("activations", activations), ("gradients", gradients)):
        if bare(way).coder(Memory()) is None:
            return (
                f"{name}={way}: {where} every tensor crosses by itself, and {way} is a way to add up those of one "
                f"place in the model; take one that makes something of any tensor: Cast, E3M0, QSGD, TopK, or Dense"
            )
    return None
