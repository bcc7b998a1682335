"""Prices of a phase and of a collective on an unshaped Link, and names of compressors' prices."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

PHASES = ("forward", "backward", "update")


class Duration(NamedTuple):
    """Seconds of a phase on one rank. spread: standard deviation between steps, as a share of them"""

    seconds: float
    spread: float = 0.0

    def draw_seconds(self, key: str) -> float:
        """Returns a step's seconds as a function of `key`: normal around `seconds`, at least half of it."""
        if not self.spread:
            return self.seconds
        return self.seconds * max(0.5, 1.0 + self.spread * Random(key).gauss(0.0, 1.0))


class AlphaBeta(NamedTuple):
    """Seconds per consecutive message (alpha) and per byte (beta) on an unshaped Link."""

    message: float = 0.0
    byte: float = 0.0

    def compute_seconds(self, sent: float, messages: int) -> float:
        return messages * self.message + sent * self.byte


def name_codec(compressor: Any) -> str:
    """Returns a compressor's type and the type that it wraps.

    >>> from workbench import ErrorFeedback, TopK
    >>> name_codec(ErrorFeedback(of=TopK()))
    'ErrorFeedback(TopK)'
    """
    inner = getattr(compressor, "of", None)
    name = type(compressor).__name__
    return f"{name}({name_codec(inner)})" if inner is not None else name
