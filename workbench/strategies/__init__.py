"""How ranks agree: one strategy per file, each a frozen dataclass with one coroutine; they are found by looking."""

from typing import Any

from workbench.settings import member, shipped
from workbench.strategies._base import Strategy as Strategy


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
