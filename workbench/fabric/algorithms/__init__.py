"""How an all-reduce goes in messages between two ranks: one algorithm per file, found by looking."""

from typing import Any

from workbench.fabric.algorithms._base import Algorithm as Algorithm
from workbench.fabric.algorithms._base import Among as Among
from workbench.settings import member, shipped


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
