"""All-reduce algorithms, as messages between pairs of ranks: one algorithm per file."""

from typing import Any

from workbench.fabric.algorithms._base import Algorithm as Algorithm
from workbench.fabric.algorithms._base import Among as Among
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
