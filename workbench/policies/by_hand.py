"""ByHand: no policy."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.policies._base import PolicyBase


@dataclass(frozen=True, kw_only=True)
class ByHand(PolicyBase):
    """Only people change knobs, live or by planned changes.

    When to use it: to see the effect of a single change. It takes no time, because it never looks.
    """
