"""What one part of a step costs: a phase on a rank, a collective off any Link; and whose codec it is."""

from __future__ import annotations

from random import Random
from typing import Any, NamedTuple

PHASES = ("forward", "backward", "update")


class Duration(NamedTuple):
    """Seconds of a phase on one rank, and the standard deviation from step to step as a share of them."""

    seconds: float
    spread: float = 0.0

    def draw(self, key: str) -> float:
        """The phase's seconds in one step: normal about `seconds`, cut at half of it; the same for the same key."""
        if not self.spread:
            return self.seconds
        return self.seconds * max(0.5, 1.0 + self.spread * Random(key).gauss(0.0, 1.0))


class AlphaBeta(NamedTuple):
    """What a collective takes off any Link: alpha, seconds per message one after the other, and beta, per byte sent."""

    message: float = 0.0
    byte: float = 0.0

    def seconds(self, sent: float, messages: int) -> float:
        return messages * self.message + sent * self.byte


def kind(compressor: Any) -> str:
    """The name under which a compressor's costs are kept: its type and what it wraps, without settings.

    >>> from workbench import ErrorFeedback, TopK
    >>> kind(ErrorFeedback(of=TopK()))
    'ErrorFeedback(TopK)'
    """
    inner = getattr(compressor, "of", None)
    name = type(compressor).__name__
    return f"{name}({kind(inner)})" if inner is not None else name
