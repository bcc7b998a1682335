"""The strategies, discovered on import. Each file has one: a frozen dataclass with one coroutine."""

from typing import Any

from workbench.settings import member, shipped
from workbench.strategies._base import Strategy as Strategy


def __getattr__(name: str) -> Any:
    return member(__name__, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *shipped(__name__)})
