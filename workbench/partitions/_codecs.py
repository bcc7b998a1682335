"""Codecs for tensors that the ranks of one replica exchange within a pass."""

from __future__ import annotations

from workbench.compressors import Compressor
from workbench.compressors.error_feedback import without_feedback
from workbench.partitions._base import Coding
from workbench.rank import Memory


def coding(activations: Compressor, gradients: Compressor, mask: bool, memory: Memory) -> Coding:
    """Returns the Coding of both, without error feedback.

    The next activation does not need the unsent part of this one.
    """
    there, back = (None if way.immediate else without_feedback(way).coder(memory) for way in (activations, gradients))
    return Coding(there, back, mask)


def refused(activations: Compressor, gradients: Compressor, where: str) -> str | None:
    """Returns why a codec cannot be used at `where` ("between two stages"), with a remedy; or None."""
    for name, way in (("activations", activations), ("gradients", gradients)):
        if without_feedback(way).coder(Memory()) is None:
            return (
                f"{name}={way}: {where} a rank sends each tensor by itself, and {way} sums the tensors of several "
                f"ranks; take a compressor that encodes a single tensor: Cast, E3M0, QSGD, TopK, or Dense"
            )
    return None
