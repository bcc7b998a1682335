"""How one replica of the model is spread over ranks: one partition per file, a frozen dataclass of knobs; found by
looking. In which order a pipeline computes is a family of its own, in `schedules`.
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
