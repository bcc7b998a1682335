"""Partitions spread a replica over ranks. Each file has one frozen dataclass of knobs.

The order in which a pipeline computes is a family of its own, in `schedules`.
"""

from typing import Any

from workbench.partitions._base import PLAIN as PLAIN
from workbench.partitions._base import Coding as Coding
from workbench.partitions._base import Partition as Partition
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
