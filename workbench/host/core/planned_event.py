"""Events between two steps other than changes of settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from workbench.settings import Change


@dataclass(frozen=True)
class PlannedEvent:
    """Something that all ranks do before step `at_step`."""

    at_step: int


Planned: TypeAlias = Change | PlannedEvent
