"""No policy: only people decide."""

from __future__ import annotations

from dataclasses import dataclass

from workbench.policies._base import PolicyBase


@dataclass(frozen=True, kw_only=True)
class ByHand(PolicyBase):
    """Nobody decides but people: what is changed is what they set, live or as changes planned beforehand.

    When to use it: to see what one change does. It costs nothing; a run under it never looks.
    """
