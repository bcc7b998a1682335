"""Schedules: the orders in which stages of a pipeline compute, one per file."""

from typing import Any

from workbench.partitions.schedules._base import Action as Action
from workbench.partitions.schedules._base import Schedule as Schedule
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
